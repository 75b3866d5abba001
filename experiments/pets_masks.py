"""Oxford Pets masks on a CPU: train a Segmenter, compress it, fine-tune with self-distillation at every pixel.

    python -m experiments.pets_masks

Pet, background and border; a ViT-Tiny encoder at 224 px with a mask transformer. The budgets are the GFLOPs of keep
0.8, 0.7 and 0.5 where the first and last two blocks are left alone, as in the paper; at these, plans that take most
tokens from the last blocks, and ToMe with un-merge; at 0.7 also the paper's choice of blocks. Images, masks and
weights come from the folder that PMVIT_DATA names. Every run is checkpointed below `runs/pets_masks`, so that the
command can be stopped and started again; runs that are named (`python -m experiments.pets_masks tome-0.7`) are
trained and nothing else, so that several can go side by side. Rows land in `pets_masks.json`, the table in
`pets_masks.md`. All measures are those of the last epoch, on test images that nothing was selected on: which blocks
to compress was chosen on training images. Takes about two hours on two cores.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pmvit
from experiments.common import percent
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
from pmvit.methods import Tome
from pmvit.methods.budget import method_for
from pmvit.numbers.bootstrap import bootstrap, mean, median
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.tables import format_number
from pmvit.progress import track
from pmvit.runtime.bench.timing import compare, speedup

DATA = Path(os.environ.get("PMVIT_DATA", "../shared/data"))
PETS = DATA / "pets"
RUNS = Path("runs/pets_masks")
RESULTS = Path(__file__).with_suffix(".json")
CLASSES = ("pet", "background", "border")
FIRST_LABEL = 1
KEEPS = (0.8, 0.7, 0.5)
PRUNE = 0.1
DECAYS = (0.0, 0.05, 0.08)
LATE: dict[str, Any] = {"skip": (), "layer_decay": DECAYS[-1]}
TEST_EVERY = 2  # every second test image is measured on
CHOICE_EVERY = 60  # every 60th training image, to choose the blocks on
EPOCHS, TUNING_EPOCHS = 6, 1
RECIPE = pmvit.FinetuneConfig.preset("segmenter", batch_size=16, warmup_epochs=0.2, workers=1, checkpoint_every=50)
FPS_BATCH, FPS_ROUNDS = 16, 40

Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """A way to make the original faster, and how much of it is kept."""

    method: str
    keep: float

    @property
    def name(self) -> str:
        return f"{self.method.replace(',', '').replace(' ', '-')}-{self.keep}"


OURS, TOME, ENDS_ALONE = "prune and merge", "tome", "prune and merge, ends left alone"
VARIANTS = (*(Variant(method, keep) for keep in KEEPS for method in (OURS, TOME)), Variant(ENDS_ALONE, 0.7))


def original() -> nn.Module:
    """A Segmenter whose encoder knows ImageNet and whose decoder knows nothing, trained on the masks."""
    torch.manual_seed(0)
    weights = DATA / "weights" / "vit_tiny_patch16_224.safetensors"
    model = create_model("segmenter:vit_tiny_patch16_224", weights, classes=len(CLASSES), image_size=224)
    output = RUNS / "original"
    options = {**vars(RECIPE), "epochs": EPOCHS, "lr": 2e-4, "alpha": 0.0}
    pmvit.finetune(model, train=PETS, output=output, resume=True, first_label=FIRST_LABEL, **options)
    return pmvit.load(output / "last")


def scores_of(model: nn.Module) -> pmvit.Scores:
    path = RUNS / "scores.json"
    if not path.exists():
        options: dict[str, Any] = {"batch_size": 32, "workers": 1, "shuffle": True, "first_label": FIRST_LABEL}
        pmvit.measure(model, open_loader(model, PETS, **options), method="scored", iterations=30).save(path)
    return pmvit.Scores.load(path)


def compressed(model: nn.Module, variant: Variant) -> nn.Module:
    """The original made faster, not tuned yet; all at the GFLOPs of the paper's choice of blocks."""
    scores = scores_of(model)
    small = pmvit.compress(model, pmvit.plan(scores, keep=variant.keep, prune=PRUNE))
    if variant.method == ENDS_ALONE:
        return small
    gflops = pmvit.flops(small).gflops
    if variant.method == TOME:
        return pmvit.compress(model, method_for(model, Tome, gflops))
    return pmvit.compress(model, pmvit.plan(scores, gflops=gflops, prune=PRUNE, **LATE))


def every(split: Split, step: int) -> FileSource:
    """Some of the images of a split."""
    source = open_pairs(PETS, len(CLASSES), split, FIRST_LABEL)
    return replace(source, files=source.files[::step], labels=(source.labels or ())[::step])


def compare_blocks(model: nn.Module) -> list[Row]:
    """Agreement with the original and mIoU on some training images, by which blocks are compressed, without tuning."""
    some = every("train", CHOICE_EVERY)
    batches = list(create_loader(some, host_of(model).data_config(), batch_size=16, workers=0))
    rows = []
    for keep in KEEPS:
        gflops = pmvit.flops(compressed(model, Variant(ENDS_ALONE, keep))).gflops
        choices: dict[str, Row] = {"ends left alone": {}}
        choices |= {f"all, layer decay {decay:g}": {"skip": (), "layer_decay": decay} for decay in DECAYS}
        for name, options in choices.items():
            small = pmvit.compress(model, pmvit.plan(scores_of(model), gflops=gflops, prune=PRUNE, **options))
            found = evaluate_segmentation(small, batches, reference=model, progress=False)
            rows.append({"blocks": name, "keep": keep, "gflops": gflops, "images": len(some), **asdict(found)})
    return rows


def tuned(model: nn.Module, variant: Variant) -> nn.Module:
    output = RUNS / variant.name
    small = compressed(model, variant)
    options = {**vars(RECIPE), "epochs": TUNING_EPOCHS}
    pmvit.finetune(small, train=PETS, teacher=model, output=output, resume=True, first_label=FIRST_LABEL, **options)
    return pmvit.load(output / "last")


def count(name: str, model: nn.Module) -> dict[str, Tensor]:
    """What is counted on each test image, (images, 3, classes), and the class of every pixel; kept in a file."""
    path = RUNS / "counts" / f"{name.replace(' ', '-')}.safetensors"
    if not path.exists():
        loader = create_loader(every("val", TEST_EVERY), host_of(model).data_config(), whole=True, workers=1)
        counts, classes = [], []
        with torch.inference_mode():
            for images, labels in track(loader, name, len(loader), show=True):
                found = classes_at(sliding_logits(model.eval(), images, (224, 224)), tuple(labels.shape[-2:]))
                counts.append(count_classes(found, labels, len(CLASSES)))
                classes.append(found.flatten().to(torch.uint8))
        tensors = {"counts": torch.cat(counts), "classes": torch.cat(classes)}
        write_atomically(path, lambda temporary: save_file(tensors, temporary))
    return load_file(path)


def measure(models: dict[str, nn.Module]) -> dict[str, Row]:
    """mIoU of all models on the test images, with intervals by bootstrap over images."""
    reference = count("original", models["original"])
    rows = {}
    for name, model in models.items():
        counted = count(name, model)
        counts = torch.stack([counted["counts"], reference["counts"]], 1)
        miou = bootstrap(counts[:, 0], _drawn_iou)
        total = counts[:, 0].sum(0)
        rows[name] = {
            "miou": miou.value,
            "miou_low": miou.low,
            "miou_high": miou.high,
            "difference": bootstrap(counts, lambda *drawn: -_drawn_iou(*drawn).diff()[:, 0]),
            "class_iou": class_iou(total).tolist(),
            "pixel_accuracy": float(pixel_accuracy(total)),
            "agreement": float((counted["classes"] == reference["classes"]).double().mean()),
            "images": len(counts),
        }
    return rows


def _drawn_iou(times: Tensor, counts: Tensor) -> Tensor:
    return mean_iou(mean(times, counts))


def measure_speed(models: dict[str, nn.Module]) -> dict[str, Row]:
    """Images a second of all models, taking turns on the same images; and how many times faster than the original.

    Ours also after the deployment passes. Tuning changes no cost, so that of every variant one model is timed.
    """
    timed = {name: model for name, model in models.items() if not name.endswith("compressed")}
    ours = [name for name in timed if name.startswith(OURS.replace(" ", "-"))]
    fast = {f"{name} optimised": pmvit.optimize_for_inference(timed[name]) for name in ours}
    images = torch.randn(FPS_BATCH, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    times = compare({**timed, **fast}, images, FPS_ROUNDS)
    rows: dict[str, Row] = {}
    for name in timed:
        fps = bootstrap(FPS_BATCH / torch.tensor(times[name], dtype=torch.float64), median)
        rows[name] = {"fps": fps.value, "fps_low": fps.low, "fps_high": fps.high}
        rows[name]["speedup"] = tuple(speedup(times, name, "original"))
        if name in ours:
            rows[name]["optimised"] = tuple(speedup(times, f"{name} optimised", "original"))
        rows[name.replace("tuned", "compressed")] = rows[name]
    return rows


def all_models() -> dict[str, tuple[Row, nn.Module]]:
    """Every model of the table by name, with what it is."""
    reference = original()
    found: dict[str, tuple[Row, nn.Module]] = {
        "original": ({"name": "original", "keep": None, "stage": "original"}, reference)
    }
    for variant in VARIANTS:
        what = {"name": variant.method, "keep": variant.keep}
        found[f"{variant.name} compressed"] = ({**what, "stage": "compressed"}, compressed(reference, variant))
        found[f"{variant.name} tuned"] = ({**what, "stage": "tuned"}, tuned(reference, variant))
    return found


def blocks_markdown(rows: list[Row]) -> str:
    lines = [
        "",
        f"Which blocks to compress, on {rows[0]['images']} training images, nothing tuned (agreement with the "
        f"original, mIoU; the original's is {_percent(rows[0]['reference_miou'])}):",
        "",
        f"| blocks | {' | '.join(f'keep {keep}' for keep in KEEPS)} |",
        f"|---|{'---|' * len(KEEPS)}",
    ]
    for name in dict.fromkeys(row["blocks"] for row in rows):
        cells = (f"{percent(row['agreement'])}, {_percent(row['miou'])}" for row in rows if row["blocks"] == name)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def markdown(rows: list[Row]) -> str:
    first = rows[0]
    lines = [
        "# Oxford Pets masks: segmentation with fewer tokens",
        "",
        "`python -m experiments.pets_masks` made this page. Segmenter with a ViT-Tiny/16 encoder at 224 px and a "
        f"mask transformer; {', '.join(CLASSES)}; {first['images']:,} test images (every second), at file size. The "
        f"original was trained for {EPOCHS} epochs; every model made of it for {TUNING_EPOCHS} more, with the "
        f"original as teacher (alpha {RECIPE.alpha:g} at every pixel). *prune and merge* compresses all blocks, "
        f"the later the more (`--skip none --layer-decay {LATE['layer_decay']}`); *ends left alone* is the paper's "
        "choice and the default for segmenters, which leaves the first and last two blocks as they are; *tome* "
        "merges in all blocks and gives every patch back after the last. Rows of the same keep have the same "
        "GFLOPs, counted for what runs: those of the paper's choice at this keep. Intervals are 95 % by bootstrap "
        f"over images; differences are paired. FPS: eager PyTorch in batches of {FPS_BATCH}, all models taking "
        "turns in one run; only the ratios mean something. *optimised* is the speed-up after "
        "`pmvit.optimize_for_inference`, which changes no prediction.",
        "",
        "| model | keep | GFLOPs | mIoU not tuned | tuned | to the original | agreement | FPS | speed-up | optimised |",
        "|---|---|---|---|---|---|---|---|---|---|",
        f"| original | - | {format_number(first['gflops'], '.3f')} | - | {_percent(first['miou'])} "
        f"[{_percent(first['miou_low'])}, {_percent(first['miou_high'])}] | - | - | "
        f"{format_number(first['fps'], '.1f')} | 1.00x | - |",
    ]
    for before in rows:
        if before["stage"] != "compressed":
            continue
        after = next(r for r in rows if (r["name"], r["keep"], r["stage"]) == (before["name"], before["keep"], "tuned"))
        change = Estimate(*after["difference"]).text("+.2f", 100)
        optimised = Estimate(*after["optimised"]) if "optimised" in after else "-"
        lines.append(
            f"| {before['name']} | {before['keep']} | {format_number(after['gflops'], '.3f')} | "
            f"{_percent(before['miou'])} | {_percent(after['miou'])} | {change} | {percent(after['agreement'])} | "
            f"{format_number(after['fps'], '.1f')} | {Estimate(*after['speedup'])} | {optimised} |"
        )
    lines += [
        "",
        "IoU of each class:",
        "",
        f"| model | keep | {' | '.join(CLASSES)} | pixel accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["stage"] != "compressed":
            shares = " | ".join(_percent(value) for value in row["class_iou"])
            lines.append(f"| {row['name']} | {row['keep'] or '-'} | {shares} | {_percent(row['pixel_accuracy'])} |")
    return "\n".join(lines) + "\n"


def _percent(share: float) -> str:
    return format_number(100 * share, ".2f")


def main() -> None:
    if names := sys.argv[1:]:
        reference = original()
        for variant in (variant for name in names for variant in VARIANTS if variant.name == name):
            tuned(reference, variant)
        return
    models = all_models()
    networks = {name: model.eval() for name, (_, model) in models.items()}
    speeds = measure_speed(networks)
    measured = measure(networks)
    rows = [
        {**what, "gflops": pmvit.flops(model).gflops, **measured[name], **speeds[name]}
        for name, (what, model) in models.items()
    ]
    blocks = compare_blocks(networks["original"])
    write_text(RESULTS, json.dumps(rows, indent=1) + "\n")
    write_text(RESULTS.with_suffix(".md"), markdown(rows) + blocks_markdown(blocks))


if __name__ == "__main__":
    main()
