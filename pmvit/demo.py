"""The demo: the whole of pmvit on a small ViT, in about a minute."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from pmvit.compress import compress, save
from pmvit.cost import flops
from pmvit.data.demo import CLASSES, demo_images, demo_loader, demo_model
from pmvit.evaluation import evaluate
from pmvit.files import write_atomically
from pmvit.planning import plan
from pmvit.planning.drawing import table
from pmvit.report.pictures import plan_picture
from pmvit.runtime.timing import compare, speedup
from pmvit.scoring import score

KEEP, PRUNE = 0.6, 0.1
ROUNDS = 15


def run(output: Path, console: Console) -> None:
    """Score, plan, compress, evaluate, time and picture; the compressed model and the picture go to `output`."""
    model = demo_model()
    test = demo_loader("test")
    scores = score(model, demo_loader("train"))
    chosen = plan(scores, keep=KEEP, prune=PRUNE)
    small = compress(model, chosen)
    console.print(table(chosen))
    console.print(chosen.draw(console.width))

    before = evaluate(model, test)
    after = evaluate(small, test, reference=model)
    images = test[0][0][:64]
    ratio = speedup(compare({"original": model, "compressed": small}, images, ROUNDS), "compressed", "original")

    save(small, output)
    test_images, test_labels = demo_images("test", 1)
    picture = plan_picture(test_images.float() / 255, chosen)
    write_atomically(output / "blocks.png", lambda temporary: picture.save(temporary, format="PNG"))

    summary = Table(title=f"Fashion-MNIST, {after.images} test images, no fine-tuning", pad_edge=False)
    for name in ("", "original", "compressed"):
        summary.add_column(name, justify="right" if name else "left")
    summary.add_row("top-1", f"{before.top1:.1%}", f"{after.top1:.1%}")
    summary.add_row("agreement with the original", "", f"{after.agreement:.1%}")
    costs = flops(model), flops(small)
    summary.add_row("GFLOPs (MACs)", *(f"{cost.gflops:.3f}" for cost in costs))
    summary.add_row("speed, batch of 64, eager", "1.00x", str(ratio))
    console.print(summary)
    name = CLASSES[int(test_labels[0])]
    console.print(f"what each block keeps of a test image ({name}): {output / 'blocks.png'}")
    console.print(f"the compressed model: {output}")
