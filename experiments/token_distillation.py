"""Does matching the token maps help? The demo's ViT on Fashion-MNIST, with and without token-level distillation.

    python -m experiments.token_distillation

Keep 0.6, prune 0.1, four epochs on the 1,000 shipped training images, measured on the 2,000 test images: accuracy, and
the distance of the last block's tokens, all 196 of them back in place, from the original's (0: the same, 2: unrelated).
Rows are kept in `token_distillation.json` as they are measured. Takes about five minutes on two cores.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pmvit
from pmvit.cli.demo_run import KEEP, TUNING, TUNING_BATCH
from pmvit.data.demo import demo_loader, demo_model
from pmvit.files import write_text
from pmvit.numbers.tables import format_number
from pmvit.training.loss import tapped_tokens, token_distance

RESULTS = Path(__file__).with_suffix(".json")
PRUNE = 0.1
VARIANTS: dict[str, dict[str, Any]] = {
    "no token term": {},
    "tokens of blocks 1, 3, 5": {"token_alpha": 1.0, "token_blocks": (1, 3, 5)},
}

Row = dict[str, Any]


def distance(small: nn.Module, model: nn.Module) -> float:
    """Mean distance of the token maps that the last blocks put out, on 500 test images."""
    batches = demo_loader("test", count=500)
    with torch.inference_mode(), tapped_tokens(small, (-1,)) as own, tapped_tokens(model, (-1,)) as target:
        total = 0.0
        for images, _ in batches:
            small(images)
            model(images)
            total += token_distance(own[-1], target[-1]).item()
    return total / len(batches)


def measure(rows: list[Row]) -> None:
    model = demo_model()
    test = demo_loader("test")
    plan = pmvit.plan(pmvit.measure(model, demo_loader("train"), method="scored"), keep=KEEP, prune=PRUNE)

    def add(name: str, small: nn.Module) -> None:
        result = asdict(pmvit.evaluate(small, test, reference=model))
        rows.append({"name": name, "distance": distance(small, model), **result})
        write_text(RESULTS, json.dumps(rows, indent=1) + "\n")

    done = [row["name"] for row in rows]
    if "not tuned" not in done:
        add("not tuned", pmvit.compress(model, plan))
    for name, options in VARIANTS.items():
        if name not in done:
            small = pmvit.compress(model, plan)
            tuning = {**vars(TUNING), **options}
            pmvit.finetune(small, teacher=model, train=demo_loader("train", TUNING_BATCH), **tuning)
            add(name, small)


def markdown(rows: list[Row]) -> str:
    lines = [
        "# Token-level distillation",
        "",
        "`python -m experiments.token_distillation` made this page: the demo's ViT, keep 0.6, prune 0.1, four epochs "
        f"on 1,000 images, {rows[0]['images']:,} test images; nothing in these runs is random. The distance is that of "
        "the last block's tokens from the original's.",
        "",
        "| | top-1 | agreement | KL | token distance |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [format_number(row[key], form) for key, form in COLUMNS.items()]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


COLUMNS = {"top1": ".1%", "agreement": ".1%", "kl": ".3f", "distance": ".3f"}


def main() -> None:
    rows: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    measure(rows)
    write_text(RESULTS.with_suffix(".md"), markdown(rows))


if __name__ == "__main__":
    main()
