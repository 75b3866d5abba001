"""Accuracy against the share of tokens that are pruned instead of merged, the paper's Fig. 4.

    python -m experiments.figure4_threshold

Draws `figure4_threshold.png` beside the tables.
"""

from pathlib import Path

from experiments.common import INTERVALS, ORIGINAL, Row, Rows, Settings, comparisons, interval, numbers, page, run
from experiments.subjects import untuned_subjects
from pmvit.config import PAPER as PAPERS_PLAN
from pmvit.files import write_atomically

NAME = "figure4_threshold"
SHARES = {0.8: (0.0, 0.1, 0.2), 0.7: (0.0, 0.1, 0.2, 0.3), 0.6: (0.0, 0.1, 0.2, 0.3, 0.4)}
VARIANTS = {f"keep {keep}, prune {prune}": (keep, prune) for keep, prunes in SHARES.items() for prune in prunes}
PAPER = dict.fromkeys(VARIANTS, "-") | {"keep 0.7, prune 0.1": "72.0 (-0.2)", "keep 0.6, prune 0.1": "71.6 (-0.6)"}
TEXT = f"""The paper's plan at several keeps, with a share of the tokens pruned from none (all that is not kept is
merged) to all (nothing is merged), **nothing tuned**. The paper prints no figures beside its curves, which are of tuned
models; it says that pruning 0.1 or 0.2 is better than merging all, and that accuracy falls sharply above 0.3. Its two
figures here are those of DeiT-Tiny in Table I. {INTERVALS}"""


def measure(rows: Rows, settings: Settings) -> None:
    for subject in untuned_subjects(settings):
        subject.add_original(rows)
        for variant, (keep, prune) in VARIANTS.items():
            subject.add(rows, variant, {**PAPERS_PLAN, "keep": keep, "prune": prune})
    draw(rows.rows, rows.path.with_suffix(".png"))


def markdown(rows: list[Row]) -> str:
    picture = f"![Top-1 against the share that is pruned]({NAME}.png)"
    tables = comparisons(rows, PAPER, "keep 0.6, prune 0.1")
    return page(NAME, "The PM-threshold (Fig. 4)", rows, TEXT, picture, *tables)


def draw(rows: list[Row], path: Path) -> None:
    """One panel a subject, one curve a keep, the intervals as bands."""
    from matplotlib.figure import Figure

    subjects = list(dict.fromkeys(row["key"]["subject"] for row in rows))
    figure = Figure(figsize=(5 * len(subjects), 4.2), layout="constrained")
    for axis, subject in zip(figure.subplots(1, len(subjects), squeeze=False)[0], subjects, strict=True):
        own = {row["key"]["variant"]: row for row in rows if row["key"]["subject"] == subject}
        axis.axhline(100 * numbers([own[ORIGINAL]], "correct").mean(), color="black", linestyle=":", label="original")
        for keep, prunes in SHARES.items():
            there = [prune for prune in prunes if f"keep {keep}, prune {prune}" in own]
            found = [interval(numbers([own[f"keep {keep}, prune {prune}"]], "correct")) for prune in there]
            axis.plot(there, [100 * one.value for one in found], marker="o", markersize=4, label=f"keep {keep}")
            axis.fill_between(there, [100 * one.low for one in found], [100 * one.high for one in found], alpha=0.15)
        axis.set(title=subject.split(",")[0], xlabel="share that is pruned", ylabel="top-1 (%), not tuned")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=110))


if __name__ == "__main__":
    run(NAME, measure, markdown)
