"""The demo: the whole of pmvit on a small ViT, in about two minutes."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import pmvit
from pmvit.compression import plan_of_image, record_source
from pmvit.config import FinetuneConfig
from pmvit.data.demo import CLASSES, DEMO, demo_images, demo_loader, demo_model
from pmvit.evaluation.reference import Reference
from pmvit.files import write_text
from pmvit.measuring import kind_of
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.measures import MEASURES
from pmvit.numbers.tables import format_number
from pmvit.pipeline import measured_file
from pmvit.planning.drawing import table
from pmvit.reporting.blocks import blocks_of
from pmvit.reporting.page.measurements import BATCHES, Measurements
from pmvit.reporting.pictures.visualize import draw_blocks
from pmvit.saving.card import CardDetails
from pmvit.training.metrics import FILE as METRICS

KEEP = 0.6
TUNING = FinetuneConfig(epochs=4, lr=3e-4, alpha=1.0, warmup_epochs=0.25)
TUNING_BATCH = 25


def run(output: Path, console: Console) -> dict[str, Any]:
    """Measure, plan, compress, fine-tune, evaluate, time, picture and report; what is left of it goes to `output`.

    Returns:
        What the last table shows, as data.
    """
    model, test = demo_model(), demo_loader("test")
    measured = pmvit.measure(model, demo_loader("train"))
    chosen = pmvit.plan(measured, keep=KEEP)
    small = pmvit.compress(model, chosen)
    record_source(small, DEMO)
    console.print(table(chosen))
    name, image = CLASSES[int(demo_images("test", 1)[1][0])], test[0][0][0]
    of_image = plan_of_image(small, image)
    if of_image is not None:
        console.print(f"what merges in a test image ({name}); every image has groups of its own")
        console.print(of_image.draw(console.width))

    original_model = Reference(model, "original")
    compressed = pmvit.evaluate(small, test, reference=original_model)
    train, val = demo_loader("train", TUNING_BATCH), demo_loader("test")[:1]  # a batch is enough for a curve
    with tempfile.TemporaryDirectory() as folder:
        pmvit.finetune(small, teacher=model, train=train, val=val, output=folder, **vars(TUNING))
        metrics = (Path(folder) / METRICS).read_text(encoding="utf-8")
    tuned = pmvit.evaluate(small, test, reference=original_model)

    original = {"top1": compressed.reference_top1, "images": compressed.images}
    evaluations = {"original": original, "compressed": asdict(compressed), "tuned": asdict(tuned)}
    pmvit.save(small, output, card=CardDetails(evaluations, {"finetune": asdict(TUNING)}))
    measured.save(measured_file(output, kind_of(measured)))
    write_text(output / METRICS, metrics)
    draw_blocks(small, blocks_of(small, image), image, name).save(output / "blocks.png", "png")
    page = pmvit.report(output, output / "report.html", data=DEMO, original=model)

    rows = (Measurements.read(page.with_suffix(".json")).speed or {})["rows"]
    speeds = {row["variant"]: Estimate(*row["speedup"]) for row in rows if row["batch"] == BATCHES[-1]}
    gflops = {"original": pmvit.flops(model).gflops, "compressed": pmvit.flops(small).gflops}
    title = f"Fashion-MNIST, {compressed.images} test images, {TUNING.epochs} short epochs"
    summary = Table("", title=title, pad_edge=False)
    for stage in ("original", "compressed", "fine-tuned"):
        summary.add_column(stage, justify="right")
    for measure in ("top1", "agreement"):
        values = [row.get(measure) for row in evaluations.values()]
        cells = ("" if value is None else format_number(value, ".1%") for value in values)
        summary.add_row(MEASURES[measure].full_title, *cells)
    summary.add_row("GFLOPs (MACs)", *(format_number(cost, ".3f") for cost in gflops.values()), "")
    summary.add_row(f"speed, batch of {BATCHES[-1]}, eager", "1.00x", str(speeds["compressed"]), "")
    summary.add_row("  optimised for inference", "", str(speeds["optimized"]), "")
    console.print(summary)
    console.print(f"what each block keeps of a test image ({name}): {output / 'blocks.png'}")
    console.print(f"the fine-tuned model: {output}")
    console.print(f"all of it on a page to open in a browser: {page}")
    return {
        "model": output,
        "picture": output / "blocks.png",
        "report": page,
        "evaluations": evaluations,
        "gflops": {**gflops, "tuned": gflops["compressed"]},
        "speedups": {
            variant: {"median": ratio.value, "low": ratio.low, "high": ratio.high} for variant, ratio in speeds.items()
        },
    }
