"""Measured plans after fine-tuning: measured merges and plans from scores on the demo's ViT, at the same FLOPs.

    python -m experiments.measured_tuned [--seeds 3]

Everything is inside the package: the model, 2,000 images to measure and to tune on, 2,000 to test on. Rows are kept in
`measured_tuned.json` as they are measured; the table goes to `measured_tuned.md`. A few minutes on two cores.
"""

import argparse
import json
from pathlib import Path

import torch

import pmvit
from experiments.common import Row, percent
from experiments.paired import answers, logits, lost, numbers, with_interval
from pmvit.cli.demo_run import KEEP, TUNING, TUNING_BATCH
from pmvit.data.demo import demo_loader, demo_model
from pmvit.files import write_text
from pmvit.numbers.tables import format_number

RESULTS = Path(__file__).with_suffix(".json")
PRUNE = 0.1  # of a plan from scores
METHODS = ("scored", "measured")
STAGES = ("compressed", "tuned")


def measure(rows: list[Row], seeds: int) -> None:
    """Measure the rows that are not there yet and write them one by one."""
    model, test = demo_model(), demo_loader("test")
    reference, labels = logits(model, test), torch.cat([labels for _, labels in test])
    plans = {"scored": pmvit.plan(pmvit.measure(model, demo_loader("train"), method="scored"), keep=KEEP, prune=PRUNE)}
    cost = pmvit.flops(pmvit.compress(model, plans["scored"])).gflops
    plans["measured"] = pmvit.plan(pmvit.measure(model, demo_loader("train"), method="measured"), gflops=cost)
    for seed in range(seeds):
        for method in METHODS:
            if any(row["key"] == [method, STAGES[-1], seed] for row in rows):
                continue
            small = pmvit.compress(model, plans[method])
            for stage in STAGES:
                if stage == "tuned":
                    options = {**vars(TUNING), "seed": seed}
                    pmvit.finetune(small, teacher=model, train=demo_loader("train", TUNING_BATCH), **options)
                found = answers(logits(small, test), labels, reference)
                rows.append({"key": [method, stage, seed], "gflops": pmvit.flops(small).gflops, **found})
            write_text(RESULTS, json.dumps(rows) + "\n")
            print(rows[-1]["key"], f"{numbers(rows[-1], 'correct').mean():.2%}", flush=True)


def markdown(rows: list[Row]) -> str:
    """The table, from the measured rows alone: means over the seeds, intervals over the images."""
    seeds = 1 + max(row["key"][2] for row in rows)
    lines = [
        "# Measured plans after fine-tuning",
        "",
        f"`python -m experiments.measured_tuned` made this page: the demo's ViT, keep {KEEP} and prune {PRUNE} from "
        f"scores, a measured plan of the same FLOPs, {TUNING.epochs} short epochs with {seeds} seeds, "
        f"{len(rows[0]['correct']):,} test images. In brackets 95 % intervals over the images; the last lines are "
        "measured less scored, image by image: fewer points lost and less KL are better.",
        "",
        "| plan | stage | GFLOPs | points lost | agreement | KL |",
        "|---|---|---|---|---|---|",
    ]
    of = {
        key: [row for row in rows if row["key"][:2] == list(key)] for key in ((m, s) for s in STAGES for m in METHODS)
    }
    for (method, stage), own in of.items():
        each = [torch.stack([part(row) for row in own]).mean(0) for part in (lost, _agrees, _kl)]
        lines.append(
            f"| {method} | {stage} | {format_number(own[0]['gflops'], '.3f')} | {with_interval(each[0], '.2f')} | "
            f"{percent(each[1].mean())} | {with_interval(each[2], '.4f')} |"
        )
    for stage in STAGES:
        pairs = list(zip(of["measured", stage], of["scored", stage], strict=True))
        points, kl = (torch.stack([part(a) - part(b) for a, b in pairs]).mean(0) for part in (lost, _kl))
        lines.append(f"| difference | {stage} | | {with_interval(points, '+.2f')} | | {with_interval(kl, '+.4f')} |")
    return "\n".join(lines) + "\n"


def _agrees(row: Row) -> torch.Tensor:
    return numbers(row, "agrees")


def _kl(row: Row) -> torch.Tensor:
    return numbers(row, "kl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3, help="fine-tunings of each plan")
    rows: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    measure(rows, parser.parse_args().seeds)
    write_text(RESULTS.with_suffix(".md"), markdown(rows))


if __name__ == "__main__":
    main()
