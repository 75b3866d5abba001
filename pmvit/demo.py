"""The demo: the whole of pmvit on a small ViT, in about two minutes."""

import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import nn

from pmvit.compress import compress, save
from pmvit.cost import flops
from pmvit.data.demo import CLASSES, demo_images, demo_loader, demo_model
from pmvit.evaluation import evaluate
from pmvit.files import write_atomically, write_text
from pmvit.planning import plan
from pmvit.planning.drawing import table
from pmvit.report.gallery import DEMO
from pmvit.report.page import report
from pmvit.report.pictures import plan_picture
from pmvit.runtime.optimize import optimize_for_inference
from pmvit.runtime.timing import compare, speedup
from pmvit.scoring import score
from pmvit.training import FinetuneConfig, finetune
from pmvit.training.metrics import FILE as METRICS

KEEP, PRUNE = 0.6, 0.1
TUNING = FinetuneConfig(epochs=4, lr=3e-4, alpha=1.0, warmup_epochs=0.25)
TUNING_BATCH = 25
ROUNDS = 15
VALIDATION = 250  # test images that the learning curve shows


def run(output: Path, console: Console) -> None:
    """Score, plan, compress, fine-tune, evaluate, time, picture and report; what is left of it goes to `output`."""
    model = demo_model()
    test = demo_loader("test")
    scores = score(model, demo_loader("train"))
    chosen = plan(scores, keep=KEEP, prune=PRUNE)
    small = compress(model, chosen)
    console.print(table(chosen))
    console.print(chosen.draw(console.width))

    evaluations = [evaluate(model, test), evaluate(small, test, reference=model)]
    metrics = _tune(small, model)
    evaluations.append(evaluate(small, test, reference=model))
    images = test[0][0][:64]
    times = compare({"original": model, "as it is": small, "optimised": optimize_for_inference(small)}, images, ROUNDS)

    save(small, output)
    write_text(output / METRICS, metrics)
    test_images, test_labels = demo_images("test", 1)
    picture = plan_picture(test_images.float() / 255, chosen)
    write_atomically(output / "blocks.png", lambda temporary: picture.save(temporary, format="PNG"))

    images_seen = evaluations[0].images
    summary = Table(title=f"Fashion-MNIST, {images_seen} test images, {TUNING.epochs} short epochs", pad_edge=False)
    for name in ("", "original", "compressed", "fine-tuned"):
        summary.add_column(name, justify="right" if name else "left")
    summary.add_row("top-1", *(f"{result.top1:.1%}" for result in evaluations))
    agreements = (f"{result.agreement:.1%}" for result in evaluations[1:])
    summary.add_row("agreement with the original", "", *agreements)
    costs = flops(model).gflops, flops(small).gflops
    summary.add_row("GFLOPs (MACs)", f"{costs[0]:.3f}", f"{costs[1]:.3f}", "")
    summary.add_row("speed, batch of 64, eager", "1.00x", str(speedup(times, "as it is", "original")), "")
    summary.add_row("  optimised for inference", "", str(speedup(times, "optimised", "original")), "")
    console.print(summary)
    name = CLASSES[int(test_labels[0])]
    console.print(f"what each block keeps of a test image ({name}): {output / 'blocks.png'}")
    console.print(f"the fine-tuned model: {output}")
    page = report(output, output / "report.html", data=DEMO, original=model)
    console.print(f"a report to open in a browser: {page}")


def _tune(small: nn.Module, model: nn.Module) -> str:
    """Fine-tune; return the lines that the run left of itself."""
    train, val = demo_loader("train", TUNING_BATCH), demo_loader("test", count=VALIDATION)
    with tempfile.TemporaryDirectory() as folder:
        finetune(small, teacher=model, train=train, val=val, config=TUNING, output=folder)
        return (Path(folder) / METRICS).read_text(encoding="utf-8")
