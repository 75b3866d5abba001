"""What the experiments share: options, rows that are kept as they are measured, intervals, and pages made of them."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pmvit.errors import PmvitError
from pmvit.files import write_text
from pmvit.numbers.bootstrap import RESAMPLES, bootstrap, mean
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.tables import format_number, markdown_table

FOLDER = Path(__file__).parent
SEED = 0  # of the order of images, of random scores and of the resampling
ORIGINAL = "original"

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What to measure on; the options are the same for every experiment.

    Attributes:
        data: A folder with `imagenet/train` and `imagenet/val`, or with `train` and `val`; `weights/MODEL.safetensors`
            beside them is read if it is there, timm's pretrained weights if not.
        models: timm's names of the models that are not tuned.
        images: How many validation images are measured, in an order that depends on the seed alone.
        scored: How many training images are scored.
        tune_data: A folder with `train` and `val` to tune the first of the models on; the built-in demo if not given.
        epochs: Epochs of tuning.
        seeds: How often a tuned variant is trained.
        output: Where the results go: beside the code.
    """

    data: Path
    models: tuple[str, ...] = ("vit_tiny_patch16_224", "deit_tiny_patch16_224")
    images: int = 500
    scored: int = 250
    tune_data: Path | None = None
    epochs: int = 3
    seeds: int = 3
    output: Path = FOLDER


def read_settings(arguments: Sequence[str] | None = None) -> Settings:
    """The settings that a command line asks for."""
    usual = Settings(Path(os.environ.get("PMVIT_DATA", "../shared/data")))
    parser = argparse.ArgumentParser(description="Measure what is missing of an experiment and write its page.")
    parser.add_argument("--data", type=Path, default=usual.data, help="folder with train and val, as ImageNet has them")
    parser.add_argument("--model", nargs="+", default=usual.models, help="timm's names of the models")
    parser.add_argument("--images", type=int, default=usual.images, help="validation images")
    parser.add_argument("--scored", type=int, default=usual.scored, help="training images that are scored")
    parser.add_argument("--tune-data", type=Path, help="folder with train and val to tune the first model on")
    parser.add_argument("--epochs", type=int, default=usual.epochs, help="epochs of tuning")
    parser.add_argument("--seeds", type=int, default=usual.seeds, help="tunings of each variant")
    parser.add_argument("--output", type=Path, default=usual.output, help="folder for JSON and Markdown")
    asked = vars(parser.parse_args(arguments))
    return Settings(models=tuple(asked.pop("model")), **asked)


class Rows:
    """Measured rows in a JSON file. Each is written as soon as it is there, so that a stopped run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = read_rows(path) if path.exists() else []
        self.added = 0
        self.commit = commit()

    def add(self, key: Row, measure: Callable[[], Row]) -> None:
        """Measure the row with this key, if it is not there yet."""
        if any(row["key"] == key for row in self.rows):
            return
        self.rows.append({"key": key, "commit": self.commit, **measure()})
        self.added += 1
        lines = ",\n".join(json.dumps(row) for row in self.rows)
        write_text(self.path, f"[\n{lines}\n]\n")
        print(self.path.stem, *key.values(), flush=True)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; raise `PmvitError` if it has none."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise PmvitError(f"expected a JSON list of measured rows in {path}; it cannot be read ({error})") from None
    if not isinstance(rows, list):
        raise PmvitError(f"{path}: expected a JSON list of measured rows, got a {type(rows).__name__}")
    return rows


@cache
def commit() -> str:
    """The commit of the code that runs, and whether the code differs from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(FOLDER.parent), *words]
        result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # words of ours
        return result.stdout.strip()

    found = git("rev-parse", "--short=10", "HEAD") or "unknown"
    return f"{found} with changes" if git("status", "--porcelain", "--", "*.py") else found


def interval(values: Tensor) -> Estimate:
    """The mean of (images,) or (seeds, images) numbers and its 95 % interval, by resampling images and seeds.

    The interval of a difference is that of the differences, image by image: `interval(ours - others)`.
    """
    values = values.double().reshape(-1, values.shape[-1])
    generator = torch.Generator().manual_seed(SEED)

    def mean_of_seeds(times: Tensor, images: Tensor) -> Tensor:
        of_seeds = mean(times, images)
        if len(times) == 1:  # all of them, once
            return of_seeds.mean(1)
        return of_seeds.gather(1, torch.randint(len(values), of_seeds.shape, generator=generator)).mean(1)

    return bootstrap(values.T, mean_of_seeds)


def percent(share: float | Tensor) -> str:
    """A share in a table."""
    return format_number(float(share), ".1%")


def bits(values: Tensor) -> str:
    """Yes or no for each image, as a row keeps it."""
    return "".join("1" if value else "0" for value in values.tolist())


def numbers(rows: Sequence[Row], name: str) -> Tensor:
    """What rows, one a seed, have for each image: (seeds, images)."""
    return torch.tensor([[float(value) for value in row[name]] for row in rows], dtype=torch.float64)


def page(name: str, title: str, rows: Sequence[Row], text: str, *parts: str) -> str:
    """A page: title, what made it, what it shows, tables."""
    commits = ", ".join(f"`{made}`" for made in dict.fromkeys(row["commit"] for row in rows))
    made_by = f"`python -m experiments.{name}` made this page, commit {commits}."
    return "\n\n".join([f"# {title}", f"{made_by} {text}", *parts]) + "\n"


INTERVALS = (
    f"In brackets: 95 % intervals from {RESAMPLES:,} resamplings of the images (and of the seeds, where there are "
    f"several); differences are taken image by image. Seed {SEED}."
)


def comparisons(rows: Sequence[Row], paper: Mapping[str, str], against: str) -> list[str]:
    """For each subject that was measured, its variants beside the paper's figures and beside one of them.

    Of the seeds, those that all variants have count; the others wait until they are complete.
    """
    parts = []
    for subject in dict.fromkeys(row["key"]["subject"] for row in rows):
        found: dict[str, list[Row]] = {}
        for row in rows:
            if row["key"]["subject"] == subject:
                found.setdefault(row["key"]["variant"], []).append(row)
        if ORIGINAL in found and against in found:
            parts.append(_comparison(subject, found, paper, against))
    return parts


def _comparison(subject: str, found: Mapping[str, list[Row]], paper: Mapping[str, str], against: str) -> str:
    original = numbers(found[ORIGINAL], "correct")
    titles = ["", "the paper's", "GFLOPs", "top-1", "to the original", f"to {against}", "KL", "KL, to the same"]
    variants = [name for name in paper if name in found]
    seeds = set.intersection(*({row["key"]["seed"] for row in found[name]} for name in variants))
    of_seeds = {name: [row for row in found[name] if row["key"]["seed"] in seeds] for name in variants}
    lines = []
    for variant, rows in of_seeds.items():
        correct, kl = numbers(rows, "correct"), numbers(rows, "kl")
        differences = ["-", "-"]
        if variant != against:
            better = correct - numbers(of_seeds[against], "correct")
            farther = kl - numbers(of_seeds[against], "kl")
            differences = [interval(better).text("+.1f", 100), interval(farther).text("+.3f")]
        lines.append(
            [
                variant,
                paper[variant],
                format_number(rows[0]["gflops"], ".3f"),
                interval(correct).text(".1f", 100),
                interval(correct - original).text("+.1f", 100),
                differences[0],
                interval(kl).text(".3f"),
                differences[1],
            ]
        )
    over = f", {len(seeds)} seeds" if len(seeds) > 1 else ""
    reached = format_number(100 * float(original.mean()), ".1f")
    return f"## {subject}: original {reached}{over}\n\n{markdown_table(titles, lines)}"


def run(
    name: str,
    measure: Callable[[Rows, Settings], None],
    markdown: Callable[[list[Row]], str],
    arguments: Sequence[str] | None = None,
) -> None:
    """Measure what is missing, and write the page."""
    settings = read_settings(arguments)
    try:
        rows = Rows(settings.output / f"{name}.json")
        measure(rows, settings)
    except PmvitError as error:
        sys.exit(f"{name}: {error}")
    write_text(rows.path.with_suffix(".md"), markdown(rows.rows))
    print(f"{name}: {len(rows.rows)} rows, {rows.added} of them measured now", flush=True)
