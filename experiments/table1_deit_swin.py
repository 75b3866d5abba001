"""DeiT and Swin, compressed: the paper's rows of Table I.

    python -m experiments.table1_deit_swin

FLOPs are counted here; speed was measured by `python -m benchmarks.deployment`, accuracy without tuning by
`python -m experiments.figure4_threshold`.
"""

from experiments.common import INTERVALS, Row, Rows, Settings, page, run
from experiments.costs import COUNTED, accuracy, add_cost, cost_table, measured_speed, speed_table

NAME = "table1_deit_swin"
CELLS = (  # model, keep, the paper's GFLOPs
    ("deit_tiny_patch16_224", 1.0, 1.3),
    ("deit_tiny_patch16_224", 0.7, 0.8),
    ("deit_tiny_patch16_224", 0.6, 0.7),
    ("deit_small_patch16_224", 1.0, 4.6),
    ("deit_small_patch16_224", 0.7, 3.0),
    ("deit_small_patch16_224", 0.6, 2.7),
    ("swin_tiny_patch4_window7_224", 1.0, 4.5),
    ("swin_tiny_patch4_window7_224", 0.7, 3.1),
)
SPEEDS = (
    ("DeiT-Tiny", 0.7, "1.51x"),
    ("DeiT-Tiny", 0.6, "1.67x"),
    ("DeiT-Small", 0.7, "1.55x"),
    ("DeiT-Small", 0.6, "1.64x"),
    ("Swin-Tiny", 0.7, "1.34x"),
)
TUNED = {"keep 0.7, prune 0.1": "72.0 (-0.2)", "keep 0.6, prune 0.1": "71.6 (-0.6)"}
TEXT = f"""{COUNTED} Speed: eager PyTorch on two CPU threads, as [measured](../benchmarks/deployment.md) before; the
paper's is that of a V100. Accuracy: the paper's figures are after 60 epochs on ImageNet (DeiT-Small 79.8 -> 79.8 at
0.7, 79.6 at 0.6; Swin-Tiny 81.2 -> 80.2); ours are of DeiT-Tiny with the paper's plan, **nothing tuned**, from
[Fig. 4](figure4_threshold.md). {INTERVALS}"""


def measure(rows: Rows, settings: Settings) -> None:
    for name, keep, _ in CELLS:
        add_cost(rows, name, keep, settings)


def markdown(rows: list[Row]) -> str:
    speeds = [(model, keep, printed, measured_speed(model, keep)) for model, keep, printed in SPEEDS]
    tables = [cost_table(rows, CELLS), speed_table(speeds), *accuracy(TUNED, "keep 0.6, prune 0.1", "deit_tiny")]
    return page(NAME, "DeiT and Swin (Table I)", rows, TEXT, *tables)


if __name__ == "__main__":
    run(NAME, measure, markdown)
