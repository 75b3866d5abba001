"""The curves of the paper's Fig. 3 for a segmenter of one's own: mIoU against GFLOPs and against images a second.

    python -m experiments.figure3 [ROWS.json]

Draws what was measured before, by `python -m experiments.pets_masks` if nothing else is named, to `figure3.png` and
`figure3.md`. Rows are objects with `name` ("original", "adaptive", "tome"), `keep`, `stage` ("original",
"compressed", "tuned"), `gflops`, `miou`, `pixel_accuracy`, `fps`, `agreement`, and intervals (`miou_low`, `miou_high`).
"""

import sys
from pathlib import Path

import pmvit
from experiments import pets_masks
from experiments.common import Row, read_rows
from pmvit.files import write_text
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.measures import MEASURES
from pmvit.numbers.tables import format_number
from pmvit.reporting.pictures.tradeoff import draw_tradeoff

PAGE = Path(__file__).with_suffix(".md")
MEASURED = pets_masks.RESULTS
# keep, GFLOPs, mIoU of Segmenter ViT-L/16 on ADE20K; the original's mIoU is also in the paper's Table IX
PAPER = ((None, None, 51.8), (0.8, 528, 51.9), (0.7, 456, 51.7), (0.5, 364, 50.2))


def cell(row: Row, key: str, form: str) -> str:
    """A measured number and its interval, as far as there are any."""
    if row.get(key) is None:
        return "-"
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    if low is None or high is None:
        return format_number(row[key], form)
    return Estimate(row[key], low, high).text(form)


COLUMNS = {
    "gflops": ("GFLOPs", ".2f"),
    "miou": (MEASURES["miou"].title, ".1%"),
    "pixel_accuracy": (MEASURES["pixel_accuracy"].title, ".1%"),
    "fps": ("images a second", ".1f"),
    "agreement": (MEASURES["agreement"].title, ".1%"),
}


def markdown(rows: list[Row], source: str) -> str:
    lines = [
        "# mIoU against GFLOPs and images a second (Fig. 3)",
        "",
        f"`python -m experiments.figure3` made this page from `{source}`. Intervals, where there are any, are at 95 %.",
        "",
        "![mIoU against GFLOPs and images a second](figure3.png)",
        "",
        f"| method | keep | stage | {' | '.join(title for title, _ in COLUMNS.values())} |",
        "|---|---|---|" + "---|" * len(COLUMNS),
    ]
    for row in rows:
        cells = [row["name"], "-" if row.get("keep") is None else f"{row['keep']:g}", row.get("stage") or "-"]
        cells += [cell(row, key, form) for key, (_, form) in COLUMNS.items()]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## The paper's figures",
        "",
        "Segmenter ViT-L/16 on ADE20K at 640 x 640, fine-tuned for 40 epochs (Section IV-C and Fig. 3): another model, "
        "other images and other classes than above. Fig. 3 measures images a second on a V100; its text prints none. "
        "What the model costs when we count: [segmenter_cost.md](segmenter_cost.md).",
        "",
        "| keep | GFLOPs | mIoU |",
        "|---|---|---|",
    ]
    for keep, gflops, miou in PAPER:
        lines.append(f"| {'original' if keep is None else keep} | {'-' if gflops is None else gflops} | {miou} |")
    return "\n".join(lines) + "\n"


def rows_of(path: Path) -> list[Row]:
    """The rows of models in a file."""
    rows = read_rows(path)
    return pets_masks.of_models(rows) if path == MEASURED else rows


def main(path: Path) -> None:
    rows = rows_of(path)
    draw_tradeoff(rows, PAGE.with_suffix(".png"))
    write_text(PAGE, markdown(rows, path.name))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else MEASURED)
    except pmvit.PmvitError as error:
        sys.exit(str(error))
