"""The tables of results that come first: one in the README, more on the page of results, ToMe's beside ours in each.

    python -m scripts.results

writes them anew. Nothing in them is typed by hand, and each budget is named by its GFLOPs, as the commands name it.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments import equal_speed, pets_masks, pets_methods
from experiments.adaptive import ADAPTIVE, FIXED
from experiments.common import ORIGINAL, read_rows
from experiments.measured_planner import TOME
from experiments.paired import numbers
from pmvit.errors import PmvitError
from pmvit.numbers.tables import format_number, markdown_table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "README.md"
START, END = "<!-- made by python -m scripts.results -->\n", "<!-- until here -->\n"
MODELS = {"DeiT-Tiny": "deit_tiny_patch16_224", "ViT-Tiny": "vit_tiny_patch16_224"}
SHARES = (0.79, 0.68, 0.58)  # of the FLOPs of the blocks: what experiments call their budgets
RUNTIMES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO", "eager": "eager"}
SPEEDS = {"": "optimized", "fixed plan, ": "fixed", "nothing merged, optimised alike, ": "original-optimized"}
EQUAL_SPEED = "experiments/equal_speed.json"
COMPARED = (ADAPTIVE, TOME, FIXED)
STAGES = {pets_masks.UNTUNED: "not tuned", pets_masks.TUNED: f"tuned for {pets_masks.TUNING_EPOCHS} epoch"}
Row = dict[str, Any]


def front(root: Path = ROOT) -> str:
    """The one table of the README: what is kept at equal speed, and what tuning gives back."""
    titles = ("", "at", *(equal_speed.LOOKS[method].label for method in COMPARED), "original", "how to measure it")
    alone = (
        f"{format_number(speed, '.1f')}x in {_place(runtime, batch)}"
        for runtime, batch, _ in equal_speed.PLACES
        for speed in [_passes_alone(read_rows(root / EQUAL_SPEED), runtime)]
    )
    table = markdown_table(titles, [*_kept(root), *_tuned(root), *_least_masks(root)])
    return f"{table}\n\nOf these speeds, what the passes of an export reach without merging: {', '.join(alone)}.\n"


def tables(root: Path = ROOT) -> str:
    """Quality at equal speed, at equal cost, and speed, each beside ToMe's."""
    methods = equal_speed.shown(read_rows(root / EQUAL_SPEED))
    names = [equal_speed.LOOKS[method].label for method in methods]
    equal = markdown_table(
        ("top-1 at equal speed, not tuned", "speed", *names, "original"), list(_equal_speed(root, methods))
    )
    quality = markdown_table(
        ("", "GFLOPs", "ours", "ToMe", "its GFLOPs", "original", "how to measure it"),
        [*_classification(root), *_segmentation(root)],
    )
    speed = markdown_table(
        ("times as fast", "GFLOPs", "ours", "ToMe", "its GFLOPs", "how to measure it"), list(_speeds(root))
    )
    return f"{equal}\n\n{quality}\n\n{speed}\n"


def filled(text: str, root: Path = ROOT) -> str:
    """The text of the README with its table as it has to be."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise PmvitError(f"expected the lines {START.strip()} and {END.strip()} in the README; one is missing")
    return f"{before}{START}\n{front(root)}\n{END}{after}"


def _kept(root: Path) -> Iterable[Sequence[str]]:
    """Top-1 at speeds beyond what the passes alone make of the original, in the order of `COMPARED`."""
    rows = read_rows(root / EQUAL_SPEED)
    for title, model in MODELS.items():
        original = numbers(next(iter(equal_speed.kept(model).values())), "original")
        for runtime, batch, _ in equal_speed.PLACES:
            for speed in (each for each in equal_speed.SPEEDS if each > _passes_alone(rows, runtime)):
                found = [equal_speed.at(equal_speed.curve(rows, model, each, runtime), speed) for each in COMPARED]
                if found[0] is not None:
                    yield (
                        f"{title}, ImageNet, not tuned, top-1",
                        f"{format_number(speed, '.1f')}x in {_place(runtime, batch)}",
                        *("-" if each is None else _percent(100 * original - each[0]) for each in found),
                        _percent(100 * original),
                        _made_by("experiments.equal_speed"),
                    )


def _passes_alone(rows: list[Row], runtime: str) -> float:
    """Times as fast as the original, of the same after the passes."""
    return max(float(row[equal_speed.PASSES][0]) for row in rows if row["key"]["runtime"] == runtime)


def _place(runtime: str, batch: int) -> str:
    return f"{equal_speed.RUNTIMES[runtime]}, batch {batch}"


def _tuned(root: Path) -> Iterable[Sequence[str]]:
    """Top-1 on Oxford Pets after tuning, the mean of the seeds, at the budgets at which ours were tuned."""
    rows = _read(root, "experiments/pets_methods.json")

    def of(method: str, gflops: float | None) -> list[Row]:
        wanted = {"method": method, "gflops": gflops, "stage": pets_methods.TUNED}
        return [row for row in rows if wanted.items() <= row["key"].items()]

    whole = of(ORIGINAL, None)
    for gflops in pets_methods.BUDGETS:
        found = [of(method, gflops) for method in ("adaptive", "tome", "measured")]
        if found[0]:
            yield (
                "ViT-Tiny, Oxford Pets, tuned, top-1",
                f"{gflops} of {format_number(whole[0]['gflops'], '.2f')} GFLOPs",
                *(_mean(each) if each else "-" for each in found),
                _mean(whole),
                _made_by("experiments.pets_methods"),
            )


def _mean(rows: Sequence[Row]) -> str:
    return format_number(sum(map(_top1, rows)) / len(rows), ".1f")


def _equal_speed(root: Path, methods: Sequence[str]) -> Iterable[Sequence[str]]:
    """Points that no budget reaches are left empty; speeds that only one method reaches are left out."""
    rows = read_rows(root / EQUAL_SPEED)
    for title, model in MODELS.items():
        original = numbers(next(iter(equal_speed.kept(model).values())), "original")
        for runtime, batch, _ in equal_speed.PLACES:
            for speed in equal_speed.SPEEDS:
                curves = [equal_speed.curve(rows, model, method, runtime) for method in methods]
                found = [equal_speed.at(points, speed) for points in curves]
                if sum(each is not None for each in found) > 1:
                    yield (
                        f"{title}, {_place(runtime, batch)}",
                        f"{format_number(speed, '.1f')}x",
                        *("-" if each is None else _percent(100 * original - each[0]) for each in found),
                        _percent(100 * original),
                    )


def _percent(values: Tensor) -> str:
    return format_number(float(values.mean()), ".1f")


def _classification(root: Path) -> Iterable[Sequence[str]]:
    planned, adaptive, calibrated = (
        _by_key(root, f"experiments/{name}.json") for name in ("measured_planner", "adaptive", "calibration")
    )
    kinds = {
        "not tuned": ("adaptive", adaptive, "adaptive", "adaptive"),
        "not tuned, fixed plan": ("measured_planner", planned, "measured", "measured"),
        "fixed plan, calibrated: 4 CPU minutes, no labels": ("calibration", calibrated, "before", "calibrated"),
    }
    for kind, (name, rows, costing, judged) in kinds.items():
        for title, model in MODELS.items():
            costs, ours = ([rows[model, share, stage] for share in SHARES] for stage in (costing, judged))
            theirs = [planned[model, share, TOME] for share in SHARES]
            yield (
                f"{title}, ImageNet, {kind}",
                _list(row["gflops"] for row in costs),
                f"{_list(map(_top1, ours), '.1f')} top-1",
                _list(map(_top1, theirs), ".1f"),
                _list(row["gflops"] for row in theirs),
                f"1.25, {format_number(100 * _share(ours[0]['original']), '.1f')}",
                _made_by(f"experiments.{name}"),
            )


def _segmentation(root: Path) -> Iterable[Sequence[str]]:
    """At the budgets that both have, not tuned and tuned."""
    whole = _masks(root, ORIGINAL, ORIGINAL)[0]
    for stage, said in STAGES.items():
        ours, theirs = (_masks(root, method, stage) for method in (pets_masks.ADAPTIVE, pets_masks.TOME))
        both = {row["keep"] for row in ours} & {row["keep"] for row in theirs}
        ours, theirs = ([row for row in rows if row["keep"] in both] for rows in (ours, theirs))
        if both:
            yield (
                f"Segmenter on ViT-Tiny, Pets masks, {said}",
                _list(row["gflops"] for row in ours),
                f"{_list((100 * row['miou'] for row in ours), '.1f')} mIoU",
                _list((100 * row["miou"] for row in theirs), ".1f"),
                _list(row["gflops"] for row in theirs),
                f"{format_number(whole['gflops'], '.2f')}, {_miou([whole])}",
                _made_by("experiments.pets_masks"),
            )


def _least_masks(root: Path) -> Iterable[Sequence[str]]:
    """mIoU at the smallest budget of a Segmenter."""
    whole = _masks(root, ORIGINAL, ORIGINAL)
    for stage, said in STAGES.items():
        found = [
            [row for row in _masks(root, method, stage) if row["keep"] == min(pets_masks.BUDGETS)]
            for method in (pets_masks.ADAPTIVE, pets_masks.TOME, pets_masks.MEASURED)
        ]
        if found[0]:
            yield (
                f"Segmenter on ViT-Tiny, Pets masks, {said}, mIoU",
                f"{format_number(found[0][0]['gflops'], '.2f')} of {format_number(whole[0]['gflops'], '.2f')} GFLOPs",
                *(_miou(each) if each else "-" for each in found),
                _miou(whole),
                _made_by("experiments.pets_masks"),
            )


def _masks(root: Path, method: str, stage: str) -> list[Row]:
    """Rows of a Segmenter, those of the largest budget first."""
    rows = pets_masks.of_models(_read(root, "experiments/pets_masks.json"))
    found = [row for row in rows if (row["name"], row["stage"]) == (method, stage)]
    return sorted(found, key=lambda row: -row["gflops"])


def _miou(rows: Sequence[Row]) -> str:
    return format_number(100 * rows[0]["miou"], ".1f")


def _speeds(root: Path) -> Iterable[Sequence[str]]:
    """Every runtime, all of one run; ToMe at its own GFLOPs."""
    rows = _read(root, "benchmarks/adaptive_speed.json")["rows"]
    for batch in (1, 16):
        for kind, variant in SPEEDS.items():
            ours = [_speed(rows, variant, runtime, batch) for runtime in RUNTIMES]
            theirs = [_speed(rows, "tome", runtime, batch) for runtime in RUNTIMES]
            yield (
                f"DeiT-Small (4.60 GFLOPs), {kind}batch {batch}",
                format_number(ours[0]["gflops"], ".2f"),
                _named(ours),
                _named(theirs),
                format_number(theirs[0]["gflops"], ".2f"),
                _made_by("benchmarks.adaptive_speed"),
            )


def _speed(rows: list[Row], variant: str, runtime: str, batch: int) -> Row:
    wanted = ("DeiT-Small", variant, runtime, batch)
    found = [row for row in rows if (row["model"], row["variant"], row["runtime"], row["batch"]) == wanted]
    return found[0]  # of several runs the main one comes first


def _named(rows: list[Row]) -> str:
    return ", ".join(f"{RUNTIMES[row['runtime']]} {format_number(row['speedup'][0], '.2f')}x" for row in rows)


def _read(root: Path, path: str) -> Any:
    return json.loads((root / path).read_text(encoding="utf-8"))


def _by_key(root: Path, path: str) -> dict[tuple[str, float, str], Row]:
    """Rows by model, share of the blocks' FLOPs, and kind."""
    return {(row["key"][0], row["key"][1], row["key"][2]): row for row in _read(root, path)}


def _top1(row: Row) -> float:
    return 100 * _share(row["correct"])


def _share(judged: str) -> float:
    """Of images that are right, each a 1 or a 0."""
    return judged.count("1") / len(judged)


def _list(values: Iterable[float], form: str = ".2f") -> str:
    return " / ".join(format_number(value, form) for value in values)


def _made_by(module: str) -> str:
    page = f"{module.replace('.', '/')}.md"
    return f"`python -m {module}` ([page]({page}))"
