"""The demo: the whole of pmvit on a small ViT, in about two minutes."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pmvit.card import Facts
from pmvit.compress import compress, save
from pmvit.cost import flops
from pmvit.data.demo import CLASSES, MEAN, STD, demo_images, demo_loader, demo_model
from pmvit.evaluation import evaluate
from pmvit.planning import plan
from pmvit.planning.drawing import table
from pmvit.report.blocks import blocks_of
from pmvit.report.sheets import Photo, about, blocks_sheet
from pmvit.runtime.optimize import optimize_for_inference
from pmvit.runtime.timing import compare, speedup
from pmvit.scoring import score
from pmvit.training import FinetuneConfig, finetune

KEEP, PRUNE = 0.6, 0.1
TUNING = FinetuneConfig(epochs=4, lr=3e-4, alpha=1.0, warmup_epochs=0.25)
TUNING_BATCH = 25
ROUNDS = 15
STAGES = ("original", "compressed", "tuned")


def run(output: Path, console: Console) -> dict[str, Any]:
    """Score, plan, compress, fine-tune, evaluate, time and picture; model and picture go to `output`.

    Returns:
        What the last table shows, as data.
    """
    model = demo_model()
    test = demo_loader("test")
    scores = score(model, demo_loader("train"))
    chosen = plan(scores, keep=KEEP, prune=PRUNE)
    small = compress(model, chosen)
    console.print(table(chosen))
    console.print(chosen.draw(console.width))

    evaluations = [evaluate(model, test), evaluate(small, test, reference=model)]
    finetune(small, teacher=model, train=demo_loader("train", TUNING_BATCH), config=TUNING)
    evaluations.append(evaluate(small, test, reference=model))
    images = test[0][0][:64]
    times = compare({"original": model, "as it is": small, "optimised": optimize_for_inference(small)}, images, ROUNDS)

    measured = dict(zip(STAGES, map(asdict, evaluations), strict=True))
    save(small, output, facts=Facts(measured, {"finetune": asdict(TUNING)}))
    name = CLASSES[int(demo_images("test", 1)[1][0])]
    photo = Photo(name, test[0][0][0], (MEAN,), (STD,))
    blocks_sheet(photo, blocks_of(small), chosen.reconstruct, about(small)).save(output / "blocks.png", "png")

    images_seen = evaluations[0].images
    summary = Table(title=f"Fashion-MNIST, {images_seen} test images, {TUNING.epochs} short epochs", pad_edge=False)
    for name in ("", "original", "compressed", "fine-tuned"):
        summary.add_column(name, justify="right" if name else "left")
    summary.add_row("top-1", *(f"{result.top1:.1%}" for result in evaluations))
    agreements = (f"{result.agreement:.1%}" for result in evaluations[1:])
    summary.add_row("agreement with the original", "", *agreements)
    costs = flops(model).gflops, flops(small).gflops
    summary.add_row("GFLOPs (MACs)", f"{costs[0]:.3f}", f"{costs[1]:.3f}", "")
    speeds = {name: speedup(times, name, "original") for name in ("as it is", "optimised")}
    summary.add_row("speed, batch of 64, eager", "1.00x", str(speeds["as it is"]), "")
    summary.add_row("  optimised for inference", "", str(speeds["optimised"]), "")
    console.print(summary)
    console.print(f"what each block keeps of a test image ({name}): {output / 'blocks.png'}")
    console.print(f"the fine-tuned model: {output}")
    return {
        "model": output,
        "picture": output / "blocks.png",
        "evaluations": measured,
        "gflops": dict(zip(STAGES, (*costs, costs[1]), strict=True)),
        "speedups": {name: ratio._asdict() for name, ratio in speeds.items()},
    }
