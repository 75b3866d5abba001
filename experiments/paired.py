"""What several experiments share: answers image by image, kept small, and intervals of paired differences."""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.common import Row, bits, interval, percent
from experiments.without_tuning import BATCH_SIZE
from pmvit.evaluation.classification import measure
from pmvit.files import write_text
from pmvit.numbers.tables import format_number

Measure = Callable[[list[Row], int], None]  # adds rows for so many images


@torch.inference_mode()
def logits(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """What a model says of all images."""
    return torch.cat([model(images) for images, _ in batches])


def answers(found: Tensor, labels: Tensor, reference: Tensor) -> Row:
    """What a row keeps of every image: whether original and model are right and agree, and the divergence."""
    result = measure(found, labels, reference)
    return {
        "original": bits(result["reference_top1"]),
        "correct": bits(result["top1"]),
        "agrees": bits(result["agreement"]),
        "kl": [float(f"{value:.3g}") for value in result["kl"].tolist()],
    }


def numbers(row: Row, name: str) -> Tensor:
    """What a row has for each image."""
    return torch.tensor([float(value) for value in row[name]], dtype=torch.float64)


def lost(row: Row) -> Tensor:
    """Points lost to the original, image by image."""
    return 100 * (numbers(row, "original") - numbers(row, "correct"))


def with_interval(values: Tensor, form: str) -> str:
    """The mean and, in brackets, its 95 % interval by resampling the images."""
    return interval(values).text(form)


def tables(
    rows: list[Row],
    models: Sequence[str],
    shares: Sequence[float],
    methods: Sequence[str],
    form: str,
    against: str = "",
) -> list[str]:
    """A table for each model, with the methods at each budget one below the other.

    Args:
        rows: With a key of model, share of the blocks' FLOPs, method and number of images.
        models: In the order of the tables.
        shares: In the order of the lines.
        methods: Likewise.
        form: Of the KL.
        against: A method; a last column then has the difference of the KL from its own, image by image.
    """
    lines = []
    names = ["budget", "plan", "GFLOPs", "share", "top-1", "points lost", "agreement", "KL"]
    names += [f"KL to that of {against}"] if against else []
    for model in models:
        own = [row for row in rows if row["key"][0] == model]
        if not own:
            continue
        original = percent(numbers(own[0], "original").mean())
        lines += ["", f"## {model}: original {original} on {own[0]['key'][3]:,} images", ""]
        lines += [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        for share in shares:
            at = [row for method in methods for row in own if row["key"][1:3] == [share, method]]
            other = next((row for row in at if row["key"][2] == against), None)
            for row in at:
                kl = numbers(row, "kl")
                cells = [str(share), row["key"][2], format_number(row["gflops"], ".3f")]
                cells += [format_number(row["share"], ".3f"), percent(numbers(row, "correct").mean())]
                cells += [with_interval(lost(row), ".1f"), percent(numbers(row, "agrees").mean())]
                cells.append(with_interval(kl, form))
                if against:
                    has_other = other is not None and other is not row
                    cells.append(with_interval(kl - numbers(other or row, "kl"), f"+{form}") if has_other else "-")
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def run(description: str | None, results: Path, measure: Measure, markdown: Callable[[list[Row]], str]) -> None:
    """Measure the rows of an experiment that are not there yet, for as many images as asked for, and write its page."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=2000, help=f"validation images, a multiple of {BATCH_SIZE}")
    count = parser.parse_args().images
    torch.manual_seed(0)
    rows: list[Row] = json.loads(results.read_text()) if results.exists() else []
    rows = [row for row in rows if row["key"][3] == count]
    measure(rows, count)
    write_text(results.with_suffix(".md"), markdown(rows))
