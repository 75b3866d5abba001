"""M and R frozen, learnable, and learnable then frozen: the paper's Table VII.

python -m experiments.table7_matrices
"""

from experiments.common import INTERVALS, Row, Rows, Settings, comparisons, page, run
from experiments.pets import measured_before
from experiments.subjects import AT, tuned_subject

NAME = "table7_matrices"
OURS = "learnable, then frozen"
SCHEDULES = {"frozen": "frozen", "learnable": "learnable", OURS: "learnable+frozen"}
PAPER = {  # to the original: DeiT-Tiny (72.2), DeiT-Small (79.8), tuned for 60 epochs
    "frozen": "71.3 (-0.9), 79.3 (-0.5)",
    "learnable": "71.5 (-0.7), 79.4 (-0.4)",
    OURS: "71.6 (-0.6), 79.6 (-0.2)",
}
TEXT = f"""The default plan, keep 0.6, prune 0.1, **tuned on the package's small demo**; M and R learn in no epoch, in
all, or in the first two thirds. The paper's figures are those of DeiT-Tiny and DeiT-Small after 60 epochs on
ImageNet. {INTERVALS}"""


def measure(rows: Rows, settings: Settings) -> None:
    subject = tuned_subject(settings)
    subject.add_original(rows)
    for seed in range(settings.seeds):
        for variant, schedule in SCHEDULES.items():
            subject.add_tuned(rows, variant, AT, {"matrices": schedule}, seed)


def markdown(rows: list[Row]) -> str:
    pets = measured_before({"frozen": "frozen matrices", OURS: "residual"})
    return page(NAME, "Learnable and frozen matrices (Table VII)", rows, TEXT, *comparisons(rows, PAPER, OURS), pets)


if __name__ == "__main__":
    run(NAME, measure, markdown)
