"""The demo: the whole of pmvit on a small ViT, in about two minutes."""

import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import nn

from pmvit.compress import compress, save
from pmvit.cost import flops
from pmvit.data.demo import CLASSES, demo_images, demo_loader, demo_model
from pmvit.evaluation import Evaluation, evaluate
from pmvit.files import write_atomically, write_text
from pmvit.planning import plan
from pmvit.planning.drawing import table
from pmvit.report.gallery import DEMO
from pmvit.report.measured import BATCHES, Measured
from pmvit.report.page import report
from pmvit.report.pictures import plan_picture
from pmvit.runtime.timing import Ratio
from pmvit.scoring import score
from pmvit.training import FinetuneConfig, finetune
from pmvit.training.metrics import FILE as METRICS

KEEP, PRUNE = 0.6, 0.1
TUNING = FinetuneConfig(epochs=4, lr=3e-4, alpha=1.0, warmup_epochs=0.25)
TUNING_BATCH = 25


def run(output: Path, console: Console) -> None:
    """Score, plan, compress, fine-tune, evaluate, time, picture and report; what is left of it goes to `output`."""
    model = demo_model()
    test = demo_loader("test")
    scores = score(model, demo_loader("train"))
    chosen = plan(scores, keep=KEEP, prune=PRUNE)
    small = compress(model, chosen)
    console.print(table(chosen))
    console.print(chosen.draw(console.width))

    compressed = evaluate(small, test, reference=model)
    metrics = _tune(small, model)

    save(small, output)
    scores.save(output / "scores.json")
    write_text(output / METRICS, metrics)
    test_images, test_labels = demo_images("test", 1)
    picture = plan_picture(test_images.float() / 255, chosen)
    write_atomically(output / "blocks.png", lambda temporary: picture.save(temporary, format="PNG"))

    page = report(output, output / "report.html", data=DEMO, original=model)
    measured = Measured.read(page.with_suffix(".json"))
    _summarize(console, compressed, measured, (flops(model).gflops, flops(small).gflops))
    name = CLASSES[int(test_labels[0])]
    console.print(f"what each block keeps of a test image ({name}): {output / 'blocks.png'}")
    console.print(f"the fine-tuned model: {output}")
    console.print(f"all of it on a page to open in a browser: {page}")


def _summarize(console: Console, compressed: Evaluation, measured: Measured, costs: tuple[float, float]) -> None:
    """Print accuracy, cost and speed before and after."""
    tuned = {one["name"]: one for one in (measured.evaluation or {})["measures"]}
    title = f"Fashion-MNIST, {compressed.images} test images, {TUNING.epochs} short epochs"
    summary = Table(title=title, pad_edge=False)
    for name in ("", "original", "compressed", "fine-tuned"):
        summary.add_column(name, justify="right" if name else "left")
    top1 = (tuned["top1"]["original"][0], compressed.top1, tuned["top1"]["compressed"][0])
    summary.add_row("top-1", *(f"{value:.1%}" for value in top1))
    agreements = (compressed.agreement, tuned["agreement"]["compressed"][0])
    summary.add_row("agreement with the original", "", *(f"{value:.1%}" for value in agreements))
    summary.add_row("GFLOPs (MACs)", f"{costs[0]:.3f}", f"{costs[1]:.3f}", "")
    rows = (measured.speed or {})["rows"]
    speeds = {row["contender"]: Ratio(*row["speedup"]) for row in rows if row["batch"] == BATCHES[-1]}
    summary.add_row(f"speed, batch of {BATCHES[-1]}, eager", "1.00x", str(speeds["compressed"]), "")
    summary.add_row("  optimised for inference", "", str(speeds["optimized"]), "")
    console.print(summary)


def _tune(small: nn.Module, model: nn.Module) -> str:
    """Fine-tune; return the lines that the run left of itself."""
    train, val = demo_loader("train", TUNING_BATCH), demo_loader("test")[:1]  # a batch is enough for a curve
    with tempfile.TemporaryDirectory() as folder:
        finetune(small, teacher=model, train=train, val=val, config=TUNING, output=folder)
        return (Path(folder) / METRICS).read_text(encoding="utf-8")
