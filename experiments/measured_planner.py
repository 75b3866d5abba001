"""Plans that need no fine-tuning: priced merges beside the paper's plan, the default plan and ToMe, at equal FLOPs.

    python -m experiments.measured_planner [--images 2000]

Scores and prices come from `imagenet/train` (1,000 and 512 images), accuracy from `imagenet/val` (2,000 images, or as
many of them as named, in an order that depends on a seed alone) below the folder that PMVIT_DATA names. Rows are kept
in `measured_planner.json` as they are measured, so that a stopped run goes on; the tables go to `measured_planner.md`.
Takes about an hour on two cores.
"""

import argparse
import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pmvit
from experiments.without_tuning import BATCH_SIZE, DATA, MODELS, Row, loader
from pmvit.cost import ModelCost, model_cost
from pmvit.evaluation.classification import measure as compare
from pmvit.files import write_text
from pmvit.loading import create_model
from pmvit.methods.tome import tome
from pmvit.planning import PAPER

RESULTS = Path(__file__).with_suffix(".json")
SHARES = (0.79, 0.68, 0.58)  # of the FLOPs of the blocks
RESAMPLES = 2000
DEFAULTS = "scores, `residual` (the defaults)"
METHODS = {
    "measured, neighbours": {"groups": "neighbours"},
    DEFAULTS: {},
    "scores, `pinv` (the paper's plan)": PAPER,
    "measured, any groups": {"groups": "any"},
    "ToMe (depends on the image)": None,
}


class Candidates:
    """One model, and what the methods make of it; scores and prices are measured when they are first asked for."""

    def __init__(self, name: str) -> None:
        self.model = create_model(name, DATA / "weights" / f"{name}.safetensors")
        self.cost: ModelCost = model_cost(self.model)
        self.sources: dict[str, pmvit.Scores | pmvit.Prices] = {}

    def make(self, method: str, share: float) -> nn.Module:
        """The model at this share of the FLOPs of its blocks."""
        budget = self.cost.outside + share * (self.cost.macs - self.cost.outside)
        options: dict[str, Any] | None = METHODS[method]
        if options is None:
            return next(small for r in range(1, 99) if pmvit.flops(small := tome(self.model, r)).macs <= budget)
        groups = options.get("groups")
        plan_options = {} if groups else {"prune": 0.1, **options}
        return pmvit.compress(self.model, pmvit.plan(self._source(groups), gflops=budget / 1e9, **plan_options))

    def _source(self, groups: str | None) -> pmvit.Scores | pmvit.Prices:
        name = groups or "scores"
        if name not in self.sources:
            images = loader(self.model, "train", shuffle=True)
            price = partial(pmvit.price, groups=groups) if groups else pmvit.score
            self.sources[name] = price(self.model, images)
        return self.sources[name]


def measure(rows: list[Row], count: int) -> None:
    """Measure the rows that are not there yet and write them one by one."""
    for name in MODELS:
        candidates = Candidates(name)
        batches, reference = _first(candidates.model, count), None
        for method in METHODS:
            for share in SHARES:
                key = [name, share, method, count]
                if any(row["key"] == key for row in rows):
                    continue
                if reference is None:
                    reference = _logits(candidates.model, batches)
                small = candidates.make(method, share)
                result = compare(_logits(small, batches), torch.cat([labels for _, labels in batches]), reference)
                block_macs = candidates.cost.macs - candidates.cost.outside
                macs = pmvit.flops(small).macs
                rows.append(
                    {
                        "key": key,
                        "gflops": macs / 1e9,
                        "share": (macs - candidates.cost.outside) / block_macs,
                        "original": _bits(result["reference_top1"]),
                        "correct": _bits(result["top1"]),
                        "agrees": _bits(result["agreement"]),
                        "kl": [float(f"{value:.3g}") for value in result["kl"].tolist()],
                    }
                )
                write_text(RESULTS, json.dumps(rows) + "\n")
                print(key, f"top-1 {result['top1'].mean():.2%}, KL {result['kl'].mean():.3f}", flush=True)


def _first(model: nn.Module, count: int) -> list[tuple[Tensor, Tensor]]:
    """As many of the validation images."""
    return list(islice(loader(model, "val", shuffle=True), count // BATCH_SIZE))


@torch.inference_mode()
def _logits(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.cat([model(images) for images, _ in batches])


def _bits(values: Tensor) -> str:
    return "".join("1" if value else "0" for value in values.tolist())


def _numbers(row: Row, name: str) -> Tensor:
    """What a row has for each image."""
    return torch.tensor([float(value) for value in row[name]], dtype=torch.float64)


def interval(values: Tensor) -> tuple[float, float]:
    """The 95 % interval of the mean, by resampling the images."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    low, high = values[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def markdown(rows: list[Row]) -> str:
    """The tables, from the measured rows alone."""
    lines = [
        "# Plans without fine-tuning, priced by measurement",
        "",
        "`python -m experiments.measured_planner` made this page. Shares are of the FLOPs of the blocks. Points lost "
        "and KL are to the original on the same images; in brackets 95 % intervals, from 2,000 resamplings of the "
        "images. The last column is the difference of the KL from that of the default plan at the same budget, image "
        "by image: below zero is better.",
    ]
    for name in MODELS:
        own = [row for row in rows if row["key"][0] == name]
        if own:
            original = _numbers(own[0], "original").mean()
            lines += ["", f"## {name}: original {original:.1%} on {own[0]['key'][3]:,} images", ""]
            lines += [
                "| budget | plan | GFLOPs | share | top-1 | points lost | agreement | KL | KL to the default plan's |",
                "|---|---|---|---|---|---|---|---|---|",
            ]
            for share in SHARES:
                at = [row for row in own if row["key"][1] == share]
                default = next((row for row in at if row["key"][2] == DEFAULTS), None)
                lines += [_line(row, default) for row in at]
    return "\n".join(lines) + "\n"


def _line(row: Row, default: Row | None) -> str:
    _, share, method, _ = row["key"]
    correct, kl = _numbers(row, "correct"), _numbers(row, "kl")
    lost = 100 * (_numbers(row, "original") - correct)
    against = "-"
    if default is not None and default is not row:
        difference = kl - _numbers(default, "kl")
        against = f"{difference.mean():+.3f} {_bracket(interval(difference), '+.3f')}"
    return (
        f"| {share} | {method} | {row['gflops']:.3f} | {row['share']:.3f} | {correct.mean():.1%} | "
        f"{lost.mean():.1f} {_bracket(interval(lost), '.1f')} | {_numbers(row, 'agrees').mean():.1%} | "
        f"{kl.mean():.3f} {_bracket(interval(kl), '.3f')} | {against} |"
    )


def _bracket(bounds: tuple[float, float], form: str) -> str:
    return f"[{bounds[0]:{form}}, {bounds[1]:{form}}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=2000, help=f"validation images, a multiple of {BATCH_SIZE}")
    count = parser.parse_args().images
    torch.manual_seed(0)
    rows: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = [row for row in rows if row["key"][3] == count]
    measure(rows, count)
    write_text(RESULTS.with_suffix(".md"), markdown(rows))


if __name__ == "__main__":
    main()
