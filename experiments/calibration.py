"""Calibration without labels: measured plans before it, with corrected biases, and after a few minutes of distillation.

    python -m experiments.calibration

Goes on from `measured_planner.json`: its rows of measured plans are what is calibrated, on the same 2,000 validation
images, so run that first. Biases and distillation see the 1,000 images of `imagenet/train`. Rows are kept in
`calibration.json` as they are measured; the table goes to `calibration.md`. Takes about an hour on two cores.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import pmvit
from experiments.common import Row
from experiments.measured_planner import RESULTS as PLANNED
from experiments.measured_planner import SHARES, Candidates
from experiments.paired import answers, logits, lost, numbers, with_interval
from experiments.without_tuning import DATA, MODELS
from pmvit.files import write_text
from pmvit.numbers.tables import format_number

RESULTS = Path(__file__).with_suffix(".json")
PLAN = "measured"
CHOSEN_ON = 500  # the first of the images: the settings of the distillation were chosen among eight on them
BEFORE, BIASES, DISTILLED = "before", "biases corrected", "calibrated"


def measure(rows: list[Row], count: int, shares: list[float], stages: list[str]) -> None:
    """Measure the rows that are not there yet and write them one by one."""
    before: list[Row] = json.loads(PLANNED.read_text())
    for share in shares:
        for name in MODELS:
            for stage in (BEFORE, *stages):
                key = [name, share, stage]
                if any(row["key"] == key for row in rows):
                    continue
                if stage == BEFORE:
                    (found,) = (row for row in before if row["key"] == [name, share, PLAN, count])
                    rows.append({**found, "key": key, "cpu_seconds": 0.0})
                else:
                    rows.append({"key": key, **_calibrated(name, share, count, distill=stage == DISTILLED)})
                write_text(RESULTS, json.dumps(rows) + "\n")
                print(key, f"KL {numbers(rows[-1], 'kl').mean():.3f}, {rows[-1]['cpu_seconds']:.0f} s", flush=True)


def _calibrated(name: str, share: float, count: int, distill: bool) -> Row:
    if name not in _CANDIDATES:
        _CANDIDATES[name] = Candidates(name, count)
    candidates = _CANDIDATES[name]
    small = candidates.make(PLAN, share)
    begun = time.process_time()
    pmvit.calibrate(small, DATA / "imagenet" / "train", teacher=candidates.model, distill=distill, workers=0)
    spent = time.process_time() - begun
    labels = torch.cat([labels for _, labels in candidates.batches])
    return {"cpu_seconds": spent, **answers(logits(small, candidates.batches), labels, candidates.reference)}


_CANDIDATES: dict[str, Candidates] = {}


def markdown(rows: list[Row]) -> str:
    """The table, from the measured rows alone."""
    lines = [
        "# Calibration without labels",
        "",
        "`python -m experiments.calibration` made this page: measured plans, no labels, 1,000 training images, "
        f"{len(rows[0]['correct']):,} validation images. Points lost and KL are to the original on the same images, in "
        "brackets 95 % intervals from 2,000 resamplings of the images. The last two columns are differences from the "
        "plan before calibration, image by image: below zero is better. CPU time is that of all threads. The settings "
        f"of the distillation were chosen among eight on the first {CHOSEN_ON} of these images; *others* are the rest.",
        "",
        "| model | share of block FLOPs | stage | CPU time | points lost | of others | KL | points lost, change "
        "| KL, change |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        for share in SHARES:
            own = {row["key"][2]: row for row in rows if row["key"][:2] == [name, share]}
            for stage, row in own.items():
                before, kl = own[BEFORE], numbers(row, "kl")
                changes = ("-", "-")
                if stage != BEFORE:
                    changes = (
                        with_interval(lost(row) - lost(before), "+.1f"),
                        with_interval(kl - numbers(before, "kl"), "+.3f"),
                    )
                spent = f"{format_number(row['cpu_seconds'] / 60, '.1f')} min" if row["cpu_seconds"] else "-"
                lines.append(
                    f"| {name} | {share} | {stage} | {spent} | {with_interval(lost(row), '.1f')} | "
                    f"{with_interval(lost(row)[CHOSEN_ON:], '.1f')} | "
                    f"{with_interval(kl, '.3f')} | {changes[0]} | {changes[1]} |"
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=2000, help="validation images, as in measured_planner")
    parser.add_argument("--share", type=float, action="append", help="only this share; may be repeated")
    parser.add_argument("--biases-only", action="store_true", help="without distillation")
    options = parser.parse_args()
    rows: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    stages = [BIASES] if options.biases_only else [BIASES, DISTILLED]
    measure(rows, options.images, options.share or list(SHARES), stages)
    write_text(RESULTS.with_suffix(".md"), markdown(rows))


if __name__ == "__main__":
    main()
