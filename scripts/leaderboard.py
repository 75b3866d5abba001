"""The leaderboard: every method at every budget on both models, from what `experiments.comparison` and others kept.

    python -m scripts.results

writes it. A method has a row as soon as one of its budgets was measured; what was not measured is a dash.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments import pets_methods
from experiments.common import ORIGINAL, numbers, percent, read_rows
from experiments.comparison import BUDGETS, MIDDLE, MODELS
from pmvit.comparison.making import WEIGHTS
from pmvit.methods import METHODS
from pmvit.numbers.tables import NOT_MEASURED, format_number, markdown_table

ROOT = Path(__file__).parents[1]
OURS = {
    "adaptive": "**adaptive plans**, ours",
    "measured": "**measured plans**, ours, fixed",
    "prune-merge": "**Prune and Merge**, as in the paper",
}
EXPORTS = {True: "yes", False: "no", None: NOT_MEASURED}
RUNTIMES = {"eager": "eager", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
HEAD = f"""# Leaderboard

Token reducers at equal cost, made by `python -m scripts.results` from what
[`experiments.comparison`](results_classification.md#comparison) measured: 1,000 ImageNet validation images, one a
class, nothing tuned. Points lost are those of top-1, each budget is in GFLOPs of all that runs, and a method has
the strength at which it comes nearest; a dash is a budget that it does not reach, or that was not measured. Rows
are sorted by the divergence from the original's predictions at {MIDDLE} GFLOPs, which says more on so few images
than top-1 does: its 95 % interval is about one point wide on either side (the page has all of them). The last column
says whether one static graph serves any batch size (`torch.export`).

Methods whose papers train them (EViT, Evo-ViT, PS-ViT, eTPS) are shown as they are before that, which is not what
their papers report. DiffRate's numbers of tokens were learned by its authors, on labelled images, for DeiT-Tiny.
DynamicViT and IA-RED2 choose at random before they are trained, and have no row in these tables.
"""
SPEED = f"""\
Times as fast as the original at {MIDDLE} GFLOPs, batch 1 / batch 16, measured in turns on two CPU threads. Ours are
as `optimize_for_inference` leaves them."""
TUNED = """## Tuned

On Oxford Pets, ViT-Tiny, all by the same recipe and from the same original, the mean of the seeds
([page](../experiments/pets_methods.md), with intervals)."""
ADD = """## Add a method

One file, as [the guide](methods.md#adding-a-method-and-its-row) shows, and two commands:
`python -m experiments.comparison` measures the rows that are not there yet, `python -m scripts.results` writes this
page."""

Row = dict[str, Any]


def page(root: Path = ROOT) -> str:
    """The text of the page, from what was kept below `root`."""
    rows = read_rows(root / "experiments/comparison.json")
    exports = {row["method"]: row["exports"] for row in rows if row.get("exports") is not None}
    parts = [HEAD.strip()]
    for model in MODELS:
        own = [row for row in rows if row["model"] == model]
        quality = {(row["method"], row["wanted"]): row for row in own if row.get("evaluation")}
        if not quality:
            continue
        original = next(iter(quality.values()))["evaluation"]["reference_top1"]
        parts += [f"## {model}: original {percent(original)}", _quality(quality, exports)]
        timed = {row["method"]: row for row in own if "environment" in row}
        if timed:
            parts += [SPEED, _speed(timed)]
    tuned = root / "experiments/pets_methods.json"
    if tuned.exists():
        titles = ("", "GFLOPs", "top-1, not tuned", "top-1, tuned", "agreement", "KL", "exports")
        parts += [TUNED, markdown_table(titles, list(_tuned(read_rows(tuned), exports)))]
    parts.append(ADD)
    return "\n\n".join(parts) + "\n"


def title_of(method: str) -> str:
    """A method as its paper writes it."""
    if method in METHODS:
        return METHODS[method].title
    return OURS.get(method) or f"{WEIGHTS[method]} pruning of weights"


def _quality(quality: dict[tuple[str, float], Row], exports: dict[str, bool]) -> str:
    budgets = sorted(BUDGETS, reverse=True)

    def kl(method: str) -> float:
        known = [quality[method, budget] for budget in (MIDDLE, *budgets) if (method, budget) in quality]
        return float(known[0]["evaluation"]["kl"])

    def cells(method: str) -> Sequence[str]:
        found = [quality.get((method, budget)) for budget in budgets]
        lost = [_lost(row) for row in found]
        divergence = [NOT_MEASURED if row is None else format_number(row["evaluation"]["kl"], ".3f") for row in found]
        return title_of(method), " / ".join(lost), " / ".join(divergence), EXPORTS[exports.get(method)]

    head = " / ".join(map(str, budgets))
    methods = sorted({method for method, _ in quality}, key=kl)
    return markdown_table((f"at {head} GFLOPs", "points lost", "KL", "exports"), [cells(method) for method in methods])


def _lost(row: Row | None) -> str:
    if row is None:
        return NOT_MEASURED
    found = row["evaluation"]
    return format_number(100 * (found["reference_top1"] - found["top1"]), ".1f")


def _speed(timed: dict[str, Row]) -> str:
    runtimes = list(dict.fromkeys(speed["runtime"] for row in timed.values() for speed in row["speeds"]))
    lines = []
    for method in timed:
        base = method.partition(",")[0]
        if f"{method}, optimized" in timed:
            continue  # its other row has it as it is deployed
        speeds = timed[method]["speeds"]
        lines.append((title_of(base), *(_times(speeds, runtime) for runtime in runtimes)))
    return markdown_table(("", *(RUNTIMES[runtime] for runtime in runtimes)), lines)


def _times(speeds: list[Row], runtime: str) -> str:
    found = [speed["speedup"] for speed in speeds if speed["runtime"] == runtime]
    return " / ".join("does not run" if each is None else f"{format_number(each[0], '.2f')}x" for each in found)


def _tuned(rows: list[Row], exports: dict[str, bool]) -> Iterator[Sequence[str]]:
    (original,) = pets_methods.of_seeds(rows, ORIGINAL, None).values()
    cost = format_number(original["gflops"], ".2f")
    yield "original", cost, NOT_MEASURED, percent(_mean([original], "correct")), *[NOT_MEASURED] * 3
    for gflops in sorted(pets_methods.BUDGETS, reverse=True):
        for method in pets_methods.tuned_methods(rows, gflops):
            name = {"scored": "prune-merge"}.get(method, method)
            (before,) = pets_methods.of_seeds(rows, method, gflops, pets_methods.COMPRESSED).values()
            after = list(pets_methods.of_seeds(rows, method, gflops).values())
            yield (
                title_of(name),
                format_number(before["gflops"], ".2f"),
                percent(_mean([before], "correct")),
                percent(_mean(after, "correct")),
                percent(_mean(after, "agrees")),
                format_number(_mean(after, "kl"), ".3f"),
                EXPORTS[exports.get(name)],
            )


def _mean(rows: Sequence[Row], name: str) -> float:
    """Over images and seeds."""
    return float(numbers(rows, name).mean())
