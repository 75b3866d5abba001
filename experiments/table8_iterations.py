"""How many batches the scores need, the paper's Table VIII.

python -m experiments.table8_iterations
"""

from experiments.common import INTERVALS, Row, Rows, Settings, comparisons, page, run
from experiments.subjects import AT, BATCH_SIZE, untuned_subjects
from pmvit.config import PAPER as PAPERS_PLAN

NAME = "table8_iterations"
OURS = "250 images, by image"
PAPER = {  # top-1, DeiT-Tiny tuned for 60 epochs
    "random": "70.9",
    "50 images, by image": "-",
    "100 images, by image": "-",
    OURS: "-",
    "50 images, by batch": "71.1 (256 images)",
    "100 images, by batch": "-",
    "250 images, by batch": "71.6 (25,600 images)",
}
TEXT = f"""The paper's plan, keep 0.6, prune 0.1, **nothing tuned**, with scores from few batches of {BATCH_SIZE}
training images. *By image*, our default, takes the absolute value of Eq. 9 for each image; *by batch*, as the paper's
code does, of the mean over a batch, in which images cancel each other. The paper's figures are those of DeiT-Tiny
(original 72.2) after 60 epochs on ImageNet, scores by batch: 70.9 with random ones, 71.1 with 1 batch of 256, 71.6
with 100, 71.9 with 300, 72.0 with 500 and with 2,000. {INTERVALS}"""


def measure(rows: Rows, settings: Settings) -> None:
    plan = {**AT, **PAPERS_PLAN}
    for subject in untuned_subjects(settings):
        subject.add_original(rows)
        for variant in PAPER:
            if variant == "random":
                subject.add(rows, variant, plan, {"scorer": "random"})
                continue
            count, _, _, how = variant.replace(",", "").split()
            batches = int(count) // BATCH_SIZE
            score = {} if variant == OURS else {"iterations": batches, "abs_per_sample": how == "image"}
            subject.add(rows, variant, plan, score)


def markdown(rows: list[Row]) -> str:
    return page(NAME, "Iterations of scoring (Table VIII)", rows, TEXT, *comparisons(rows, PAPER, OURS))


if __name__ == "__main__":
    run(NAME, measure, markdown)
