"""Oxford Pets masks on a CPU: train a Segmenter, make it faster in several ways at equal FLOPs, tune what comes of it.

    python -m experiments.pets_masks            # mIoU
    python -m experiments.pets_masks --speed    # images a second, of all at once: on a machine that does nothing else

Pet, background and border; a ViT-Tiny encoder at 224 px with a mask transformer. The budgets are the GFLOPs of the
paper's choice at keep 0.8, 0.7 and 0.5: plans from scores that leave the first and last two blocks alone. Images, masks
and weights come from the folder that PMVIT_DATA names. Every run is checkpointed below `runs/pets_masks`, so that the
command can be stopped and started again; rows land in `pets_masks.json` as they are measured, what matters most comes
first, tables in `pets_masks.md`. All measures are those of the last epoch, on test images that nothing was selected on:
which blocks are compressed was chosen on training images.
"""

import argparse
import os
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pmvit
from experiments.common import ORIGINAL, Row, Rows, page, percent
from pmvit.config import FinetuneConfig
from pmvit.config.measuring import Measurement
from pmvit.data.loaders import create_loader
from pmvit.data.opening import open_loader
from pmvit.data.segmentation import Split, open_pairs
from pmvit.data.sources import FileSource
from pmvit.evaluation.segmentation import (
    class_iou,
    classes_at,
    count_classes,
    evaluate_segmentation,
    mean_iou,
    pixel_accuracy,
)
from pmvit.evaluation.sliding import sliding_logits
from pmvit.files import write_atomically, write_text
from pmvit.hosts import host_of
from pmvit.loading import create_model
from pmvit.measuring import Measured, measure_by, measure_config, read_measured
from pmvit.methods import Tome
from pmvit.methods.budget import method_for
from pmvit.numbers.bootstrap import bootstrap, mean, median
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.tables import format_number, markdown_table
from pmvit.progress import track
from pmvit.runtime.bench.timing import compare, speedup

from timm.layers import set_fused_attn  # isort: skip  # after pmvit, which lets torchvision import

NAME = "pets_masks"
DATA = Path(os.environ.get("PMVIT_DATA", "../shared/data"))
PETS = DATA / "pets"
FOLDER = Path("runs") / NAME
RESULTS = Path(__file__).with_suffix(".json")
CLASSES = ("pet", "background", "border")
FIRST_LABEL = 1
BUDGETS = {0.5: 1.044, 0.7: 1.212, 0.8: 1.297}  # GFLOPs, by the keep at which the paper's choice costs so much
TEST_EVERY = 2  # every second test image is measured on
CHOICE_EVERY = 60  # every 60th training image, to choose the blocks on
EPOCHS, TUNING_EPOCHS = 6, 1
RECIPE = FinetuneConfig.preset(
    "segmenter", batch_size=16, warmup_epochs=0.2, workers=1, checkpoint_every=50, mixed_precision="bf16"
)
FPS_BATCH, FPS_ROUNDS = 16, 15
UNTUNED, TUNED = "compressed", "tuned"
ENDS = (0, 1, -2, -1)  # the blocks that the paper leaves alone
ALL: dict[str, Any] = {"skip": ()}
ADAPTIVE, MEASURED, LATE, PAPERS, TOME = "adaptive", "measured", "scored, late", "scored, ends left alone", "tome"
PLANS: dict[str, tuple[Measurement, dict[str, Any]]] = {
    ADAPTIVE: ("adaptive", {}),
    MEASURED: ("measured", ALL),
    LATE: ("scored", {"prune": 0.1, "layer_decay": 0.08, **ALL}),
    PAPERS: ("scored", {"prune": 0.1, "skip": ENDS}),
}
CHOICES: dict[str, tuple[Measurement, dict[str, Any]]] = {
    "adaptive": PLANS[ADAPTIVE],
    "measured": PLANS[MEASURED],
    "measured, ends left alone": ("measured", {"skip": ENDS}),
    "scored, layer decay 0": ("scored", {"prune": 0.1, "layer_decay": 0.0, **ALL}),
    LATE: PLANS[LATE],
    PAPERS: PLANS[PAPERS],
}
METHODS = (ADAPTIVE, TOME, MEASURED, LATE, PAPERS)
TUNE = (ADAPTIVE, TOME, MEASURED)


@dataclass(frozen=True)
class Variant:
    """A way to make the original faster, what it keeps, and whether it was tuned afterwards."""

    method: str
    keep: float | None
    stage: str

    @property
    def name(self) -> str:
        return f"{self.method.replace(',', '').replace(' ', '-')}-{self.keep}"

    @property
    def key(self) -> Row:
        return {"name": self.method, "keep": self.keep, "stage": self.stage}


WHOLE = Variant(ORIGINAL, None, ORIGINAL)
VARIANTS = tuple(
    Variant(method, keep, stage)
    for keep in BUDGETS
    for stage, methods in ((UNTUNED, METHODS), (TUNED, TUNE))
    for method in methods
)


class Masks:
    """The Segmenter that was trained on the masks, and what the methods make of it."""

    @cached_property
    def original(self) -> nn.Module:
        """Its encoder knew ImageNet and its decoder nothing."""
        torch.manual_seed(0)
        weights = DATA / "weights" / "vit_tiny_patch16_224.safetensors"
        model = create_model("segmenter:vit_tiny_patch16_224", weights, classes=len(CLASSES), image_size=224)
        options = {**vars(RECIPE), "epochs": EPOCHS, "lr": 2e-4, "alpha": 0.0}
        output = FOLDER / ORIGINAL
        pmvit.finetune(model, train=PETS, output=output, resume=True, first_label=FIRST_LABEL, **options)
        return pmvit.load(output / "last")

    def measured(self, method: Measurement) -> Measured:
        """What plans are made from: measured on training images, and kept for a run that goes on."""
        path = FOLDER / (f"{method}.safetensors" if method == "adaptive" else f"{method}.json")
        if not path.exists():
            loader = open_loader(self.original, PETS, batch_size=32, workers=1, shuffle=True, first_label=FIRST_LABEL)
            config = measure_config(self.original, method, {"limit": 960} if method == "scored" else {})
            measure_by(config, self.original, loader).save(path)
        return read_measured(path)

    def planned(self, measured: Measurement, keep: float, options: dict[str, Any]) -> nn.Module:
        """The original with a plan of so many GFLOPs."""
        plan = pmvit.plan(self.measured(measured), gflops=BUDGETS[keep], **options)
        return pmvit.compress(self.original, plan)

    def make(self, variant: Variant) -> nn.Module:
        """The model of a variant; tuned, if it is to be."""
        if variant.keep is None:
            return self.original
        if variant.method == TOME:
            small = pmvit.compress(self.original, method_for(self.original, Tome, BUDGETS[variant.keep]))
        else:
            measured, options = PLANS[variant.method]
            small = self.planned(measured, variant.keep, options)
        if variant.stage == UNTUNED:
            return small
        output = FOLDER / variant.name
        options = {**vars(RECIPE), "epochs": TUNING_EPOCHS}
        pmvit.finetune(
            small, train=PETS, teacher=self.original, output=output, resume=True, first_label=FIRST_LABEL, **options
        )
        return pmvit.load(output / "last")

    @cached_property
    def reference(self) -> dict[str, Tensor]:
        return self.count(WHOLE, self.original)

    def count(self, variant: Variant, model: nn.Module) -> dict[str, Tensor]:
        """What is counted on each test image, (images, 3, classes), and the class of every pixel; kept in a file."""
        path = FOLDER / "counts" / f"{variant.name}-{variant.stage}.safetensors"
        if not path.exists():
            loader = create_loader(every("val", TEST_EVERY), host_of(model).data_config(), whole=True, workers=1)
            counts, classes = [], []
            with torch.inference_mode():
                for images, labels in track(loader, variant.name, len(loader), show=True):
                    found = classes_at(sliding_logits(model.eval(), images, (224, 224)), tuple(labels.shape[-2:]))
                    counts.append(count_classes(found, labels, len(CLASSES)))
                    classes.append(found.flatten().to(torch.uint8))
            tensors = {"counts": torch.cat(counts), "classes": torch.cat(classes)}
            write_atomically(path, lambda temporary: save_file(tensors, temporary))
        return load_file(path)

    def row(self, variant: Variant) -> Row:
        """mIoU on the test images beside the original's, with intervals by bootstrap over images."""
        model = self.make(variant)
        counted = self.count(variant, model)
        counts = torch.stack([counted["counts"], self.reference["counts"]], 1)
        miou = bootstrap(counts[:, 0], _drawn_iou)
        total = counts[:, 0].sum(0)
        return {
            **variant.key,
            "gflops": pmvit.flops(model).gflops,
            "miou": miou.value,
            "miou_low": miou.low,
            "miou_high": miou.high,
            "difference": bootstrap(counts, lambda *drawn: -_drawn_iou(*drawn).diff()[:, 0]),
            "class_iou": class_iou(total).tolist(),
            "pixel_accuracy": float(pixel_accuracy(total)),
            "agreement": float((counted["classes"] == self.reference["classes"]).double().mean()),
            "images": len(counts),
        }

    def chosen(self, name: str, keep: float) -> Row:
        """Agreement with the original and mIoU on some training images, without tuning."""
        some = every("train", CHOICE_EVERY)
        batches = list(create_loader(some, host_of(self.original).data_config(), batch_size=16, workers=0))
        small = self.planned(CHOICES[name][0], keep, CHOICES[name][1])
        found = evaluate_segmentation(small, batches, reference=self.original, progress=False)
        return {
            "gflops": pmvit.flops(small).gflops,
            "images": len(some),
            "agreement": found.agreement,
            "miou": found.miou,
            "reference_miou": found.reference_miou,
        }


def every(split: Split, step: int) -> FileSource:
    """Some of the images of a split."""
    source = open_pairs(PETS, len(CLASSES), split, FIRST_LABEL)
    return replace(source, files=source.files[::step], labels=(source.labels or ())[::step])


def _drawn_iou(times: Tensor, counts: Tensor) -> Tensor:
    return mean_iou(mean(times, counts))


def measure(rows: Rows) -> None:
    """Measure the rows that are not there yet and write them one by one."""
    set_fused_attn(False)  # on CPUs, training in bfloat16 takes less time without
    masks = Masks()
    rows.add(WHOLE.key, partial(masks.row, WHOLE))
    for name in CHOICES:
        for keep in BUDGETS:
            rows.add({"blocks": name, "keep": keep}, partial(masks.chosen, name, keep))
    for variant in VARIANTS:
        before = rows.added
        rows.add(variant.key, partial(masks.row, variant))
        if rows.added > before:
            write_text(RESULTS.with_suffix(".md"), markdown(rows.rows))


def measure_speed(rows: Rows) -> None:
    """Images a second of all untuned models, which tuning does not change, taking turns; ours also after the passes."""
    masks = Masks()
    models = {variant.name: masks.make(variant).eval() for variant in (WHOLE, *VARIANTS) if variant.stage != TUNED}
    ours = [variant.name for variant in VARIANTS if variant.stage == UNTUNED and variant.method != TOME]
    fast = {f"{name} optimised": pmvit.optimize_for_inference(models[name]) for name in (WHOLE.name, *ours)}
    images = torch.randn(FPS_BATCH, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    times = compare({**models, **fast}, images, FPS_ROUNDS)
    found: Row = {}
    for name in models:
        fps = bootstrap(FPS_BATCH / torch.tensor(times[name], dtype=torch.float64), median)
        found[name] = {"fps": fps.value, "fps_low": fps.low, "fps_high": fps.high}
        found[name]["speedup"] = tuple(speedup(times, name, WHOLE.name))
        if f"{name} optimised" in times:
            found[name]["optimised"] = tuple(speedup(times, f"{name} optimised", WHOLE.name))
    key = {"timed": f"eager, batch {FPS_BATCH}"}
    rows.rows = [row for row in rows.rows if row["key"] != key]
    rows.add(key, lambda: {"models": found})


def of_models(rows: list[Row]) -> list[Row]:
    """The rows of models, each with its speed if that was measured."""
    timed: Row = next((row["models"] for row in rows if "timed" in row["key"]), {})
    models = [row for row in rows if "stage" in row["key"]]
    return [{**row, **timed.get(Variant(row["name"], row["keep"], row["stage"]).name, {})} for row in models]


def markdown(rows: list[Row]) -> str:
    """The tables, from the measured rows alone."""
    found = of_models(rows)
    whole, *others = sorted(found, key=lambda row: -(row["keep"] or 1))
    text = (
        f"Segmenter with a ViT-Tiny/16 encoder at 224 px and a mask transformer; {', '.join(CLASSES)}; "
        f"{whole['images']:,} test images (every second), at file size. The original was trained for {EPOCHS} epochs; "
        f"what was tuned, for {TUNING_EPOCHS} more with the original as teacher (alpha {RECIPE.alpha:g} at every "
        "pixel), computing in bfloat16. *adaptive* plans are the default; *measured* ones are fixed. *scored* plans "
        "are the paper's, which leaves the first and last two blocks alone, and one that takes most from the last "
        "blocks (`--skip none --layer-decay 0.08`). *tome* merges in all blocks and gives every patch back after the "
        "last. Rows of the same keep have the same GFLOPs, counted for what runs: those of the paper's choice at this "
        "keep. Intervals are 95 % by bootstrap over images; differences to the original are paired."
    )
    titles = ["model", "keep", "GFLOPs", "mIoU not tuned", "to the original", "tuned", "to the original"]
    has_speed = "speedup" in whole
    if has_speed:
        titles += ["speed-up", "optimised"]
        text += (
            f" Speed: eager PyTorch in batches of {FPS_BATCH}, all models taking turns in one run; *optimised* is "
            "after `pmvit.optimize_for_inference`, which changes no prediction."
        )
    miou = Estimate(whole["miou"], whole["miou_low"], whole["miou_high"]).text(".2f", 100)
    lines = [["original", "-", format_number(whole["gflops"], ".3f"), miou, "-", "-", "-"]]
    if has_speed:
        lines[0] += ["1.00x", str(Estimate(*whole["optimised"]))]
    for before in (row for row in others if row["stage"] == UNTUNED):
        after = next((row for row in others if row["key"] == {**before["key"], "stage": TUNED}), None)
        cells = [before["name"], str(before["keep"]), format_number(before["gflops"], ".3f"), _percent(before["miou"])]
        cells += [Estimate(*before["difference"]).text("+.2f", 100)]
        cells += (
            ["-", "-"] if after is None else [_percent(after["miou"]), Estimate(*after["difference"]).text("+.2f", 100)]
        )
        if has_speed:
            optimised = Estimate(*before["optimised"]) if "optimised" in before else "-"
            cells += [str(Estimate(*before["speedup"])), str(optimised)]
        lines.append(cells)
    by_class = [
        [f"{row['name']}, {row['stage']}" if row["keep"] else "original", str(row["keep"] or "-")]
        + [_percent(value) for value in row["class_iou"]]
        + [_percent(row["pixel_accuracy"]), percent(row["agreement"])]
        for row in [whole, *others]
    ]
    parts = [markdown_table(titles, lines), "IoU of each class, and agreement with the original:"]
    parts += [markdown_table(("model", "keep", *CLASSES, "pixel accuracy", "agreement"), by_class)]
    return page(NAME, "Oxford Pets masks: segmentation with fewer tokens", rows, text, *parts, *_blocks(rows))


def _blocks(rows: list[Row]) -> list[str]:
    chosen = [row for row in rows if "blocks" in row["key"]]
    if not chosen:
        return []
    said = (
        f"Which blocks to compress, on {chosen[0]['images']} training images, nothing tuned (agreement with the "
        f"original, mIoU; the original's is {_percent(chosen[0]['reference_miou'])}):"
    )
    lines = []
    for name in CHOICES:
        found = {row["key"]["keep"]: row for row in chosen if row["key"]["blocks"] == name}
        cells = (found.get(keep) for keep in sorted(BUDGETS, reverse=True))
        lines.append(
            [name, *("-" if row is None else f"{percent(row['agreement'])}, {_percent(row['miou'])}" for row in cells)]
        )
    return [said, markdown_table(("plan", *(f"keep {keep}" for keep in sorted(BUDGETS, reverse=True))), lines)]


def _percent(share: float) -> str:
    return format_number(100 * share, ".2f")


def main() -> None:
    parser = argparse.ArgumentParser(description="Segmentation with fewer tokens, on the masks of Oxford Pets.")
    parser.add_argument("--speed", action="store_true", help="time all models, side by side")
    rows = Rows(RESULTS)
    (measure_speed if parser.parse_args().speed else measure)(rows)
    write_text(RESULTS.with_suffix(".md"), markdown(rows.rows))


if __name__ == "__main__":
    main()
