"""AugReg's ViTs compressed and not tuned: the paper's Table III.

    python -m experiments.table3_augreg

Accuracy is that of `python -m experiments.figure4_threshold` for ViT-Tiny, whose weights are AugReg's too.
"""

from experiments.common import INTERVALS, Row, Rows, Settings, page, run
from experiments.costs import COUNTED, accuracy, add_cost, add_speed, cost_table, speed_table

NAME = "table3_augreg"
CELLS = (("vit_small_patch16_224", 0.8, 3.6), ("vit_base_patch16_224", 0.8, 13.6))
LOST = {"keep 0.8, prune 0.1": "80.7 (-0.7) ViT-S, 83.7 (-0.8) ViT-B", "keep 0.6, prune 0.1": "-"}
TEXT = f"""{COUNTED} Speed: eager PyTorch on one CPU thread, random weights, in turns, other work beside, medians of
the rounds with 95 % bootstrap intervals; the paper prints 1,435 and 391 images a second on a V100, and none of the
originals. Accuracy: **nothing tuned**, here as in the paper, but of ViT-Tiny, a third of ViT-S's width, with the
paper's plan; from [Fig. 4](figure4_threshold.md). {INTERVALS}"""


def measure(rows: Rows, settings: Settings) -> None:
    for name, keep, _ in CELLS:
        add_cost(rows, name, keep, settings)
        add_speed(rows, name, keep, settings)


def markdown(rows: list[Row]) -> str:
    speeds = [(row["key"]["speed of"], row["key"]["keep"], "-", row) for row in rows if "speed of" in row["key"]]
    tables = [cost_table(rows, CELLS), speed_table(speeds), *accuracy(LOST, "keep 0.8, prune 0.1", "vit_tiny")]
    return page(NAME, "AugReg, not tuned (Table III)", rows, TEXT, *tables)


if __name__ == "__main__":
    run(NAME, measure, markdown)
