"""ViT-Base as MAE has it, and what it is compared with: the paper's Table II.

python -m experiments.table2_mae
"""

from experiments.common import Row, Rows, Settings, page, run
from experiments.costs import COUNTED, add_cost, add_plain_cost, add_speed, cost_table, speed_table

NAME = "table2_mae"
VIT = "vit_base_patch16_224"
OTHERS = (  # those of the table that timm has
    ("tf_efficientnet_b5", 1.0, 9.9),
    ("swin_small_patch4_window7_224", 1.0, 8.7),
    ("mvitv2_small", 1.0, 7.0),
)
CELLS = ((VIT, 1.0, 17.6), (VIT, 0.6, 10.4))
TEXT = f"""{COUNTED} The other models are counted as timm has them (CSWin-S, 6.9 in the paper, it has not). Speed:
eager PyTorch on one CPU thread, random weights, in turns, other work beside, medians of the rounds with 95 %
bootstrap intervals. The paper's accuracy is 83.6 -> 83.4 after 60 epochs on ImageNet; MAE's weights are not at hand,
so that there is none of ours."""


def measure(rows: Rows, settings: Settings) -> None:
    for name, _, _ in OTHERS:
        add_plain_cost(rows, name)
    for name, keep, _ in CELLS:
        add_cost(rows, name, keep, settings)
    add_speed(rows, VIT, 0.6, settings)


def markdown(rows: list[Row]) -> str:
    speeds = [(VIT, 0.6, "1.67x", row) for row in rows if "speed of" in row["key"]]
    return page(
        NAME, "ViT-Base and others (Table II)", rows, TEXT, cost_table(rows, OTHERS + CELLS), speed_table(speeds)
    )


if __name__ == "__main__":
    run(NAME, measure, markdown)
