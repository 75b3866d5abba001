"""The scorers of the paper's Table V, side by side.

    python -m experiments.table5_scorers

The paper's plan (`pinv`, L2 weights, grouping by row) at keep 0.6 and prune 0.1, nothing tuned.
"""

from experiments.common import INTERVALS, Row, Rows, Settings, comparisons, page, run
from experiments.subjects import AT, untuned_subjects
from pmvit.config import PAPER as PAPERS_PLAN

NAME = "table5_scorers"
OURS = "`grad_attn`"
PAPER = {  # top-1 and to the original, DeiT-Tiny tuned for 60 epochs
    "`attn`": "69.8 (-2.4)",
    "`grad`": "70.5 (-1.7)",
    "`class_attn`": "70.8 (-1.4)",
    "`grad_class_attn`": "71.1 (-1.1)",
    "`random`": "69.3 (-2.9)",
    OURS: "71.6 (-0.6)",
}
TEXT = f"""The paper's plan with scores of each kind, keep 0.6, prune 0.1, **nothing tuned**; the absolute value of
gradients is taken by image, the default. The paper's figures are those of DeiT-Tiny after 60 epochs on ImageNet, to
which one can compare the order, not the size. `grad_attn` is Eq. 9, `grad` Eq. 8. {INTERVALS}"""


def measure(rows: Rows, settings: Settings) -> None:
    for subject in untuned_subjects(settings):
        subject.add_original(rows)
        for variant in PAPER:
            score = {} if variant == OURS else {"scorer": variant.strip("`")}
            subject.add(rows, variant, {**AT, **PAPERS_PLAN}, score)


def markdown(rows: list[Row]) -> str:
    return page(NAME, "Scorers (Table V)", rows, TEXT, *comparisons(rows, PAPER, OURS))


if __name__ == "__main__":
    run(NAME, measure, markdown)
