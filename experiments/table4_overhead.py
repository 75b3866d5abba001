"""What the operations cost where nothing is compressed: the paper's Table IV.

    python -m experiments.table4_overhead

The same as `pmvit benchmark --overhead` on DeiT-Tiny.
"""

from experiments.common import Row, Rows, Settings, page, run
from pmvit.numbers.tables import format_number, markdown_table
from pmvit.runtime.bench.run import overhead

import timm  # isort: skip  # after pmvit, which lets torchvision import

NAME = "table4_overhead"
MODEL = "deit_tiny_patch16_224"
BATCH, ROUNDS, THREADS = 16, 31, 2
PAPER = {
    "prune and merge": "-1.9 %",
    "prune and merge, all kept": "-",
    "prune and merge, optimized": "-",
    "tome, matching but not merging": "-4.2 %",
    "evit, fusing one token a stage": "-5.1 %",
    "direct": "-6.8 %",
}
TEXT = f"""DeiT-Tiny in eager PyTorch on {THREADS} CPU threads, batch {BATCH}: throughput with the operations of each
method in place and as many tokens as without, to that of the original in the same rounds; median of {ROUNDS} rounds
with its 95 % bootstrap interval. Ours run on all tokens in another order, so that none of them is an identity; *all
kept* is a plan that keeps every token where it is, whose blocks are left as they are. *Optimised* is after
`optimize_for_inference`, which also speeds up what the method leaves alone. The paper measures on a V100 with batch
256."""


def measure(rows: Rows, settings: Settings) -> None:
    def time() -> Row:
        result = overhead(timm.create_model(MODEL), batch=BATCH, rounds=ROUNDS, threads=THREADS)
        return {"speedup": {row.variant: row.speedup for row in result.rows}}

    rows.add({"model": MODEL, "batch": BATCH, "rounds": ROUNDS, "threads": THREADS}, time)


def markdown(rows: list[Row]) -> str:
    found = rows[0]["speedup"]
    lines = []
    for name, printed in PAPER.items():
        change, low, high = (format_number(100 * (value - 1), "+.1f") for value in found[name])
        lines.append([name, printed, f"{change} % [{low}, {high}]"])
    titles = ["operations in place", "the paper's", "ours"]
    return page(NAME, "Overhead of the operations (Table IV)", rows, TEXT, markdown_table(titles, lines))


if __name__ == "__main__":
    run(NAME, measure, markdown)
