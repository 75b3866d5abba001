"""What models cost, beside the cost columns of the paper's Tables I to III."""

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import pmvit
from experiments.common import FOLDER, Row, Rows, Settings, comparisons, read_rows
from experiments.figure4_threshold import NAME as FIGURE4
from experiments.subjects import FolderSubject
from pmvit.measuring import Scores
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.tables import format_number, markdown_table

import timm  # isort: skip  # after pmvit, which lets torchvision import

SCORED = "deit_tiny_patch16_224"  # whose scores the other plain models of its shape are planned with
DEPLOYMENT = FOLDER.parent / "benchmarks" / "deployment.json"
BATCH, ROUNDS = 2, 7
COUNTED = """GFLOPs are multiply-accumulates, merge and reconstruct included, counted on the graph that runs. *Local*
plans keep the same number of tokens in every block, the only reading that a formula can follow; *global* ones are by
score: by DeiT-Tiny's, carried over, for plain ViTs, and by random ones for Swin. *Formula* is the paper's own,
12 N D^2 + 2 N^2 D a block, for the blocks alone."""


@cache
def _scores(name: str, settings: Settings) -> Scores:
    if name.startswith("swin"):
        return pmvit.measure(timm.create_model(name), [], method="scored", scorer="random")
    subject = FolderSubject(SCORED, settings.data, settings, "")
    return pmvit.measure(subject.model, subject.scored_images()[:1], method="scored")


def add_cost(rows: Rows, name: str, keep: float, settings: Settings) -> None:
    """Count the FLOPs of a model at this keep, with a local and a global plan."""

    def count() -> Row:
        model = timm.create_model(name)
        if keep == 1:
            return {"local": (whole := pmvit.flops(model).gflops), "global": whole, "formula": _formula(model, keep)}
        found: Row = {"formula": _formula(model, keep)}
        for scope in ("local", "global"):
            plan = pmvit.plan(_scores(name, settings), keep=keep, prune=0.1, scope=scope)
            found[scope] = pmvit.flops(pmvit.compress(model, plan)).gflops
        return found

    rows.add({"cost of": name, "keep": keep}, count)


def _formula(model: Any, keep: float) -> float | None:
    """The blocks of a plain ViT by the paper's formula, in billions."""
    if not hasattr(model, "embed_dim") or not hasattr(model, "cls_token"):
        return None
    tokens, width = 1 + keep * model.patch_embed.num_patches, model.embed_dim
    return float(len(model.blocks) * (12 * tokens * width**2 + 2 * tokens**2 * width) / 1e9)


def add_plain_cost(rows: Rows, name: str, **arguments: Any) -> None:
    """Count the FLOPs of a model that is not ours to compress."""

    def count() -> Row:
        with torch.device("meta"):
            model: Any = timm.create_model(name, **arguments).eval()
            image = torch.zeros(1, *model.pretrained_cfg["input_size"])
            counter = FlopCounterMode(display=False)
            with torch.no_grad(), counter:
                model(image)
        whole = counter.get_total_flops() / 2e9
        return {"local": whole, "global": whole, "formula": None}

    rows.add({"cost of": name, "keep": 1.0}, count)


def add_speed(rows: Rows, name: str, keep: float, settings: Settings) -> None:
    """Time a model against its original, in turns, on random weights."""

    def time() -> Row:
        plan = pmvit.plan(_scores(name, settings), keep=keep, prune=0.1)
        small = pmvit.compress(timm.create_model(name), plan)
        variants = ("original", "compressed", "optimized")
        result = pmvit.benchmark(small, against=variants, batches=(BATCH,), rounds=ROUNDS, threads=1)
        return {"batch": BATCH, **{row.variant: row.speedup for row in result.rows}}

    rows.add({"speed of": name, "keep": keep}, time)


def measured_speed(model: str, keep: float) -> Row:
    """What `python -m benchmarks.deployment` found in eager PyTorch, at the largest batch that has everything."""
    rows = [
        row
        for row in json.loads(DEPLOYMENT.read_text(encoding="utf-8"))["rows"]
        if (row["model"], row["keep"], row["place"]) == (model, keep, "eager") and row["of_bound"] is not None
    ]
    batch = max(row["batch"] for row in rows)
    return {"batch": batch, **{row["variant"]: row["speedup"] for row in rows if row["batch"] == batch}}


def cost_table(rows: Sequence[Row], cells: Sequence[tuple[str, float, float]]) -> str:
    """Counted GFLOPs beside printed ones: (model, keep, the paper's)."""
    found = {(row["key"]["cost of"], row["key"]["keep"]): row for row in rows if "cost of" in row["key"]}
    lines = []
    for name, keep, printed in cells:
        row = found[name, keep]
        counts = [format_number(row[way], ".3f") for way in ("local", "global", "formula")]
        lines.append([name, "-" if keep == 1 else str(keep), str(printed), *counts, agreement(row, printed)])
    return markdown_table(
        ["model", "keep", "the paper's GFLOPs", "ours, local", "ours, global", "formula", "agree"], lines
    )


def agreement(row: Row, printed: float) -> str:
    """Whether a count is printed so, with one decimal."""
    counts = (row["local"], row["global"])
    if any(format_number(count, ".1f") == format_number(printed, ".1f") for count in counts):
        return "yes"
    if any(math.floor(10 * count) / 10 == printed for count in counts):
        return "if cut, not rounded"
    above = row["formula"] is not None and row["formula"] > printed + 0.05
    return "no: the formula gives more" if above else "no"


def speed_table(found: Sequence[tuple[str, float, str, Row]]) -> str:
    """Times as fast as the original: (model, keep, the paper's, ours)."""
    lines = [
        [
            name,
            str(keep),
            printed,
            str(row["batch"]),
            *(str(Estimate(*row[way])) for way in ("compressed", "optimized")),
        ]
        for name, keep, printed, row in found
    ]
    return markdown_table(["model", "keep", "the paper's (V100)", "batch", "ours", "ours, optimised"], lines)


def accuracy(paper: dict[str, str], against: str, model: str, path: Path | None = None) -> list[str]:
    """What Fig. 4's experiment measured of this model at these keeps, not tuned."""
    path = path or FOLDER / f"{FIGURE4}.json"
    rows = read_rows(path) if path.exists() else []
    return comparisons([row for row in rows if row["key"]["subject"].startswith(model)], paper, against)
