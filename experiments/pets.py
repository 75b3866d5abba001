"""Oxford Pets, end to end on a CPU: fine-tune ViT-Tiny to the 37 breeds, compress it, fine-tune with self-distillation.

    python -m experiments.pets

Images and weights come from the folder that PMVIT_DATA names (`pets/images/{train,test}`, `weights`). Every run is
checkpointed below `runs/pets`, so that the command can be stopped and started again; rows land in `pets.json` as they
are measured, the table in `pets.md`, the learning curves in `pets.png`. Accuracy is that of the last epoch: nothing is
selected on the test images. Takes about three hours on two cores.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pmvit
from experiments.common import percent, read_rows
from pmvit.config import FinetuneConfig
from pmvit.data.loaders import ImageLoader, create_loader
from pmvit.data.sources import open_source
from pmvit.files import write_atomically, write_text
from pmvit.hosts import host_of
from pmvit.loading import create_model
from pmvit.measuring import Scores
from pmvit.numbers.tables import format_number, markdown_table
from pmvit.training.metrics import read_metrics

DATA = Path(os.environ.get("PMVIT_DATA", "../shared/data"))
TRAIN, TEST = DATA / "pets/images/train", DATA / "pets/images/test"
RUNS = Path("runs/pets")
RESULTS = Path(__file__).with_suffix(".json")
EPOCHS = 4
RECIPE = FinetuneConfig.preset("quick", epochs=EPOCHS, workers=1)
PINV = {"reconstruct": "pinv", "weights": "normalize"}

# name, keep, options of `plan`, options of `finetune`
VARIANTS: tuple[tuple[str, float, dict[str, Any], dict[str, Any]], ...] = (
    ("residual", 0.6, {}, {}),
    ("pinv", 0.6, PINV, {}),
    ("alpha = 0", 0.6, {}, {"alpha": 0.0}),
    ("frozen matrices", 0.6, {}, {"matrices": "frozen"}),
    ("residual", 0.7, {}, {}),
    ("residual, 10 epochs", 0.6, {}, {"epochs": 10}),
)

Row = dict[str, Any]


def folder_of(name: str, keep: float) -> Path:
    return RUNS / f"{re.sub('[ =,]', '', name)}-{keep}"


def test_loader(model: nn.Module) -> ImageLoader:
    return create_loader(open_source(TEST, 37), host_of(model).data_config(), batch_size=50, workers=1)


def original() -> nn.Module:
    """ViT-Tiny fine-tuned to the breeds, without a teacher."""
    torch.manual_seed(0)
    weights = DATA / "weights" / "vit_tiny_patch16_224.safetensors"
    model = create_model("vit_tiny_patch16_224", weights, num_classes=37)
    pmvit.finetune(model, train=TRAIN, val=TEST, output=RUNS / "original", resume=True, **vars(RECIPE))
    return pmvit.load(RUNS / "original" / "last")


def scores_of(model: nn.Module) -> Scores:
    path = RUNS / "scores.json"
    if not path.exists():
        config = host_of(model).data_config()
        loader = create_loader(open_source(TRAIN, 37), config, batch_size=32, workers=1, shuffle=True)
        pmvit.measure(model, loader, method="scored").save(path)
    return Scores.load(path)


def measure(rows: list[Row]) -> None:
    """Measure the rows that are not there yet and write them one by one."""

    def add(name: str, keep: float | None, stage: str, model: nn.Module, **more: Any) -> None:
        result = pmvit.evaluate(model, test_loader(model), reference=reference)
        gflops = pmvit.flops(model).gflops
        rows.append({"name": name, "keep": keep, "stage": stage, "gflops": gflops, **more, **asdict(result)})
        write_text(RESULTS, json.dumps(rows, indent=1) + "\n")
        print(name, keep, stage, f"{result.top1:.2%}", flush=True)

    def has(*key: Any) -> bool:
        return any((row["name"], row["keep"], row["stage"]) == key for row in rows)

    reference = original()
    if not has("original", None, "tuned"):
        add("original", None, "tuned", reference)
    scores = scores_of(reference)
    for name, keep, plan_options, tune_options in VARIANTS:
        small = pmvit.compress(reference, pmvit.plan(scores, keep=keep, prune=0.1, **plan_options))
        if not tune_options and not has(name, keep, "compressed"):
            add(name, keep, "compressed", small)
        if not has(name, keep, "tuned"):
            output = folder_of(name, keep)
            options = {**vars(RECIPE), **tune_options}
            pmvit.finetune(small, train=TRAIN, val=TEST, teacher=reference, output=output, resume=True, **options)
            small = pmvit.load(output / "last")
            curve = [line["top1"] for line in read_metrics(output) if line.get("kind") == "epoch"]
            add(name, keep, "tuned", small, curve=curve)


def markdown(rows: list[Row]) -> str:
    original_top1 = rows[0]["top1"]
    lines = [
        "# Oxford Pets: compress, then fine-tune with self-distillation",
        "",
        f"`python -m experiments.pets` made this page. ViT-Tiny/16 at 224 px, {rows[0]['images']:,} test images; the "
        f"standard error of a top-1 is {percent(rows[0]['top1_error'])}, but all rows see the same images. The "
        f"original was fine-tuned for {EPOCHS} epochs, every compressed model for {EPOCHS} more where nothing else is "
        "said, with the `quick` preset. Accuracy is that of the last epoch; nothing was selected on the test images.",
        "",
        "| model | keep | GFLOPs | compressed | tuned | to the original | agreement | KL |",
        "|---|---|---|---|---|---|---|---|",
    ]
    before = {(row["name"], row["keep"]): row for row in rows if row["stage"] == "compressed"}
    for row in rows:
        if row["stage"] != "tuned":
            continue
        if row["keep"] is None:
            lines.append(
                f"| original | - | {format_number(row['gflops'], '.2f')} | - | {percent(row['top1'])} | - | - | - |"
            )
            continue
        start = before.get((row["name"], row["keep"])) or before[("residual", row["keep"])]
        lines.append(
            f"| {row['name']} | {row['keep']} | {format_number(row['gflops'], '.2f')} | {percent(start['top1'])} | "
            f"{percent(row['top1'])} | {format_number(100 * (row['top1'] - original_top1), '+.1f')} | "
            f"{percent(row['agreement'])} | {format_number(row['kl'], '.3f')} |"
        )
    lines += ["", "![Test accuracy after each epoch](pets.png)"]
    return "\n".join(lines) + "\n"


def measured_before(names: Mapping[str, str], keep: float = 0.6) -> str:
    """Some of the tuned models for the page of another experiment, by the names they have there."""
    rows = {row["name"]: row for row in read_rows(RESULTS) if row["stage"] == "tuned" and row["keep"] in (keep, None)}
    lines = []
    for shown, name in {"original": "original", **names}.items():
        row = rows[name]
        lines.append(
            [
                shown,
                f"{percent(row['top1'])} ± {percent(row['top1_error'])}",
                percent(row["agreement"]),
                format_number(row["kl"], ".3f"),
            ]
        )
    return (
        f"## Oxford Pets, ViT-Tiny/16, keep {keep}, tuned for {EPOCHS} epochs\n\n"
        f"Measured by `python -m experiments.pets` on {rows['original']['images']:,} test images, one run each; "
        "behind ± the standard error.\n\n" + markdown_table(["", "top-1", "agreement", "KL"], lines)
    )


def draw(rows: list[Row]) -> None:
    """Test accuracy after every epoch of fine-tuning, from the compressed model on."""
    before = {(row["name"], row["keep"]): row["top1"] for row in rows if row["stage"] == "compressed"}
    curves = []
    for row in rows:
        if "curve" in row:
            start = before.get((row["name"], row["keep"])) or before[("residual", row["keep"])]
            style = "--" if row["keep"] != 0.6 else "-"
            curves.append((f"{row['name']}, keep {row['keep']}", style, [start, *row["curve"]]))
    draw_curves(curves, rows[0]["top1"], RESULTS.with_suffix(".png"))


def draw_curves(curves: list[tuple[str, str, list[float]]], original: float, picture: Path) -> None:
    """Accuracies after 0, 1, ... epochs, each with its name and style of line, and that of the original."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.axhline(100 * original, color="black", linestyle=":", label="original")
    for label, style, values in curves:
        axis.plot([100 * value for value in values], style, marker="o", markersize=4, label=label)
    axis.set(xlabel="epochs of fine-tuning", ylabel="top-1 on the test images (%)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9)
    write_atomically(picture, lambda temporary: figure.savefig(temporary, format="png", dpi=110))


def main() -> None:
    rows: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    measure(rows)
    write_text(RESULTS.with_suffix(".md"), markdown(rows))
    draw(rows)


if __name__ == "__main__":
    main()
