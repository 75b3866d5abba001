"""How many batches the scores need, the paper's Table VIII.

python -m experiments.table8_iterations
"""

from experiments.common import INTERVALS, Row, Rows, Settings, comparisons, page, run
from experiments.subjects import AT, BATCH_SIZE, untuned_subjects
from pmvit.planning import PAPER as PAPERS_PLAN

NAME = "table8_iterations"
OURS = "250 images, by image"
PAPER = {  # top-1, DeiT-Tiny at keep 0.7 tuned for 60 epochs, iterations of 256 images
    "random": "70.9",
    "50 images, by image": "71.1 (256 images)",
    "100 images, by image": "-",
    OURS: "71.6 (25,600), 71.9 (76,800), 72.0 (128,000 and 512,000)",
    "50 images, by batch": "as above",
    "100 images, by batch": "as above",
    "250 images, by batch": "as above",
}
TEXT = f"""The paper's plan, keep 0.6, prune 0.1, **nothing tuned**, with scores from few batches of {BATCH_SIZE}
training images. *By image*, our default, takes the absolute value of Eq. 9 for each image; *by batch*, as the paper's
code does, of the mean over a batch, in which images cancel each other. The paper's figures: DeiT-Tiny (original 72.2)
after 60 epochs on ImageNet, scores by batch, with 1, 100, 300, 500 and 2,000 batches of 256. {INTERVALS}"""


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
