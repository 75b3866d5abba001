"""Random crops while tuning, against which plans with fixed places might not be robust: the paper's Table IX.

python -m experiments.table9_random_crop
"""

from experiments.common import INTERVALS, Row, Rows, Settings, comparisons, page, run
from experiments.subjects import AT, CROP_SCALE, tuned_subject

NAME = "table9_random_crop"
WHOLE, CROPPED = "whole images", "random crops"
PAPER = {  # DeiT-Tiny (original 72.2), Segmenter ViT-L (51.8)
    WHOLE: "72.0 (-0.2), mIoU 51.6 (-0.2)",
    CROPPED: "71.9 (-0.3), mIoU 51.6 (-0.2)",
}
TEXT = f"""The default plan, keep 0.6, prune 0.1, **tuned on the package's small demo** with whole images, and with
squares of {CROP_SCALE[0]:.0%} to all of each image at random places, resized. The paper's figures are those of
DeiT-Tiny on ImageNet and of Segmenter ViT-L/16 on ADE20K. {INTERVALS}"""


def measure(rows: Rows, settings: Settings) -> None:
    subject = tuned_subject(settings)
    subject.add_original(rows)
    for seed in range(settings.seeds):
        for variant in PAPER:
            subject.add_tuned(rows, variant, AT, {}, seed, crop=variant == CROPPED)


def markdown(rows: list[Row]) -> str:
    return page(NAME, "Random crops (Table IX)", rows, TEXT, *comparisons(rows, PAPER, WHOLE))


if __name__ == "__main__":
    run(NAME, measure, markdown)
