"""The demo: the whole of pmvit on a small ViT, in about two minutes."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from pmvit.compression import compress, record_source
from pmvit.config import FinetuneConfig
from pmvit.data.demo import CLASSES, DEMO, demo_images, demo_loader, demo_model
from pmvit.evaluation.classification import Evaluation, evaluate
from pmvit.files import write_text
from pmvit.measuring import measure
from pmvit.measuring.flops import flops
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.measures import MEASURES
from pmvit.numbers.tables import format_number
from pmvit.pipeline import measured_file
from pmvit.planning import plan
from pmvit.planning.drawing import table
from pmvit.reporting.blocks import blocks_of
from pmvit.reporting.images import InputImages
from pmvit.reporting.page.measurements import BATCHES, Measurements
from pmvit.reporting.page.report import report
from pmvit.reporting.pictures.block_figures import Photo, describe_model, draw_blocks
from pmvit.saving.card import CardDetails
from pmvit.saving.models import save
from pmvit.training import finetune
from pmvit.training.metrics import FILE as METRICS

KEEP = 0.6
TUNING = FinetuneConfig(epochs=4, lr=3e-4, alpha=1.0, warmup_epochs=0.25)
TUNING_BATCH = 25


def run(output: Path, console: Console) -> dict[str, Any]:
    """Measure, plan, compress, fine-tune, evaluate, time, picture and report; what is left of it goes to `output`.

    Returns:
        What the last table shows, as data.
    """
    model = demo_model()
    test = demo_loader("test")
    measured = measure(model, demo_loader("train"))
    chosen = plan(measured, keep=KEEP)
    small = compress(model, chosen)
    record_source(small, DEMO)
    console.print(table(chosen))
    console.print(chosen.draw(console.width))

    compressed = evaluate(small, test, reference=model)
    metrics = _tune(small, model)
    tuned = evaluate(small, test, reference=model)

    original = {"top1": compressed.reference_top1, "images": compressed.images}
    evaluations = {"original": original, "compressed": asdict(compressed), "tuned": asdict(tuned)}
    save(small, output, card=CardDetails(evaluations, {"finetune": asdict(TUNING)}))
    measured.save(measured_file(output, measured.config))
    write_text(output / METRICS, metrics)
    name = CLASSES[int(demo_images("test", 1)[1][0])]
    photo = Photo(name, test[0][0][0], InputImages(small))
    figure = draw_blocks(photo, blocks_of(small), chosen.reconstruct, describe_model(small))
    figure.save(output / "blocks.png", "png")
    page = report(output, output / "report.html", data=DEMO, original=model)

    rows = (Measurements.read(page.with_suffix(".json")).speed or {})["rows"]
    speeds = {row["variant"]: Estimate(*row["speedup"]) for row in rows if row["batch"] == BATCHES[-1]}
    costs = flops(model).gflops, flops(small).gflops
    _summarize(console, compressed, tuned, costs, speeds)
    console.print(f"what each block keeps of a test image ({name}): {output / 'blocks.png'}")
    console.print(f"the fine-tuned model: {output}")
    console.print(f"all of it on a page to open in a browser: {page}")
    return {
        "model": output,
        "picture": output / "blocks.png",
        "report": page,
        "evaluations": evaluations,
        "gflops": {"original": costs[0], "compressed": costs[1], "tuned": costs[1]},
        "speedups": {
            variant: {"median": ratio.value, "low": ratio.low, "high": ratio.high} for variant, ratio in speeds.items()
        },
    }


def _summarize(
    console: Console,
    compressed: Evaluation,
    tuned: Evaluation,
    costs: tuple[float, float],
    speeds: dict[str, Estimate],
) -> None:
    """Print accuracy, cost and speed before and after."""
    title = f"Fashion-MNIST, {compressed.images} test images, {TUNING.epochs} short epochs"
    summary = Table(title=title, pad_edge=False)
    for name in ("", "original", "compressed", "fine-tuned"):
        summary.add_column(name, justify="right" if name else "left")
    accuracies = (compressed.reference_top1, compressed.top1, tuned.top1)
    summary.add_row(MEASURES["top1"].title, *(format_number(value, ".1%") for value in accuracies))
    agreements = (compressed.agreement, tuned.agreement)
    summary.add_row(MEASURES["agreement"].full_title, "", *(format_number(value, ".1%") for value in agreements))
    summary.add_row("GFLOPs (MACs)", *(format_number(cost, ".3f") for cost in costs), "")
    summary.add_row(f"speed, batch of {BATCHES[-1]}, eager", "1.00x", str(speeds["compressed"]), "")
    summary.add_row("  optimised for inference", "", str(speeds["optimized"]), "")
    console.print(summary)


def _tune(small: nn.Module, model: nn.Module) -> str:
    """Fine-tune; return the lines that the run left of itself."""
    train, val = demo_loader("train", TUNING_BATCH), demo_loader("test")[:1]  # a batch is enough for a curve
    with tempfile.TemporaryDirectory() as folder:
        finetune(small, teacher=model, train=train, val=val, config=TUNING, output=folder)
        return (Path(folder) / METRICS).read_text(encoding="utf-8")
