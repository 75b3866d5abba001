"""What experiments share: intervals worked out by hand, runs that are killed, pages that say what was measured."""

import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from experiments import figure3, pets_methods, segmenter_cost
from experiments.__main__ import NAMES
from experiments.common import FOLDER, Row, Rows, comparisons, interval, read_rows, read_settings
from experiments.costs import agreement
from experiments.subjects import TRAINED, ShuffledDemo
from pmvit.errors import PmvitError
from scripts import results

ROOT = FOLDER.parent
OTHERS = (
    *("adaptive", "adaptive_features", "any_size", "calibration", "comparison", "equal_speed", "int8"),
    *("measured_planner", "measured_tuned", "pets", "pets_masks", "pets_methods", "scale", "token_distillation"),
    *("without_images", "without_tuning"),
)
WITHOUT_ROWS = {"experiments/feature_maps.md"}  # whose command keeps the page alone


def page_of(experiment: str) -> str:
    return str(import_module(f"experiments.{experiment}").markdown(read_rows(FOLDER / f"{experiment}.json")))


def page_of_segmenter() -> str:
    return segmenter_cost.markdown(json.loads(segmenter_cost.RESULTS.read_text(encoding="utf-8")))


def page_of_speeds(name: str) -> str:
    kept = json.loads((ROOT / f"benchmarks/{name}.json").read_text(encoding="utf-8"))
    return str(import_module(f"benchmarks.{name}").markdown(kept["rows"], kept["environment"]))


def page_of_targets() -> str:
    """Its first lines say what runs here, of which the rows do not know."""
    module, start = import_module("benchmarks.__main__"), "\n| what |"
    head = (ROOT / "benchmarks/results.md").read_text(encoding="utf-8").partition(start)[0]
    return head + start + str(module.markdown(read_rows(ROOT / "benchmarks/results.json"))).partition(start)[2]


PAGES: dict[str, Callable[[], str]] = {
    **{f"experiments/{name}.md": partial(page_of, name) for name in (*NAMES, *OTHERS)},
    "experiments/figure3.md": lambda: figure3.markdown(figure3.rows_of(figure3.MEASURED), figure3.MEASURED.name),
    "experiments/segmenter_cost.md": page_of_segmenter,
    "benchmarks/adaptive_speed.md": partial(page_of_speeds, "adaptive_speed"),
    "benchmarks/deployment.md": partial(page_of_speeds, "deployment"),
    "benchmarks/results.md": page_of_targets,
}


def test_an_interval_of_few_numbers_can_be_worked_out() -> None:
    """Of two numbers, resampling gives 0 and 1 a quarter of the time each, so that 95 % need both."""
    assert interval(torch.tensor([0.0, 1.0])) == (0.5, 0.0, 1.0)
    mean, low, high = interval(torch.arange(400) % 2)
    assert mean == 0.5
    assert (low, high) == pytest.approx((0.451, 0.549), abs=0.006)  # 1.96 standard errors of 0.025


def test_a_paired_difference_is_surer_than_what_it_is_between() -> None:
    spread = torch.randn(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert interval(spread).high - interval(spread).low > 0.2
    assert interval((spread + 0.25) - spread) == pytest.approx((0.25, 0.25, 0.25))


def test_seeds_are_resampled_beside_images() -> None:
    """Two seeds that always fail and always succeed: however many images, nothing is known."""
    assert interval(torch.stack([torch.zeros(500), torch.ones(500)])) == (0.5, 0.0, 1.0)


def test_a_comparison_takes_differences_image_by_image() -> None:
    def row(variant: str, correct: str, kl: list[float], seed: int = 0) -> Row:
        key = {"subject": "a model", "variant": variant, "seed": seed}
        return {"key": key, "commit": "-", "gflops": 1.0, "correct": correct, "kl": kl}

    rows = [
        row("original", "1111", [0.0] * 4),
        row("ours", "1100", [0.1, 0.2, 0.3, 0.4]),
        row("other", "1100", [0.2, 0.3, 0.4, 0.5]),
        row("other", "0000", [9.0, 9.0, 9.0, 9.0], seed=1),  # waits for that seed of ours
    ]
    (text,) = comparisons(rows, {"ours": "70.1", "other": "70.0"}, "ours")
    assert "## a model: original 100.0" in text
    cells = [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]]
    assert cells[:4] == ["other", "70.0", "1.000", "50.0 [0.0, 100.0]"]
    assert cells[4:6] == ["-50.0 [-100.0, +0.0]", "+0.0 [+0.0, +0.0]"]
    assert cells[7] == "+0.100 [+0.100, +0.100]"


def test_the_page_of_tuned_methods_takes_differences_by_image_and_seed_and_says_what_is_missing() -> None:
    def row(run: pets_methods.Run, correct: str, kl: list[float], stage: str = "tuned") -> Row:
        found = {"correct": correct, "agrees": correct, "kl": kl}
        return {"key": run.key(stage), "commit": "-", "gflops": run.gflops or 1.25, "curve": [0.5], **found}

    ours, again, tome = (pets_methods.Run(*key) for key in (("adaptive", 0.73), ("adaptive", 0.73, 1), ("tome", 0.73)))
    rows = [
        row(pets_methods.ORIGINAL_RUN, "1111", [0.0] * 4),
        row(ours, "1000", [0.9] * 4, "compressed"),
        row(ours, "1110", [0.1, 0.2, 0.3, 0.4]),
        row(again, "1111", [0.1] * 4),  # ToMe has no such seed
        row(tome, "0000", [0.9] * 4, "compressed"),
        row(tome, "1110", [0.2, 0.3, 0.4, 0.5]),
    ]
    text = pets_methods.markdown(rows)
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [line[1:5] for line in lines[1:]] == [["2", "0.730", "25.0%", "87.5%"], ["1", "0.730", "0.0%", "75.0%"]]
    assert lines[1][-2:] == ["-", "- |"]
    assert lines[2][-2:] == ["+0.0 [+0.0, +0.0]", "+0.100 [+0.100, +0.100] |"]
    (missing,) = re.findall(r"^Not measured: (.*)\.$", text, flags=re.MULTILINE)
    assert len(missing.split("; ")) == len(pets_methods.RUNS) - 3
    assert "ToMe at 0.73 (seed 1)" in missing
    assert "0.86 GFLOPs" not in text


def measure_three(path: Path, third: Callable[[], Row]) -> None:
    rows = Rows(path)
    for number in range(2):
        rows.add({"number": number}, lambda: {"by": os.getpid()})
    rows.add({"number": 2}, third)


def die() -> Row:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    process = multiprocessing.get_context("fork").Process(target=measure_three, args=(path, die))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [row["by"] for row in read_rows(path)] == [process.pid] * 2
    measure_three(path, lambda: {"by": os.getpid()})
    rows = read_rows(path)
    assert [row["by"] for row in rows] == [process.pid, process.pid, os.getpid()]
    assert len({row["commit"] for row in rows}) == 1


def test_rows_that_are_none_are_said(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"key": ')
    with pytest.raises(PmvitError, match="expected a JSON list of measured rows"):
        Rows(path)
    path.write_text("{}")
    with pytest.raises(PmvitError, match="got a dict"):
        Rows(path)


@pytest.mark.parametrize("path", PAGES)
def test_pages_are_what_their_rows_say(path: str) -> None:
    if not (ROOT / path).exists():
        pytest.skip(f"not measured yet: {path}")
    assert (ROOT / path).read_text(encoding="utf-8") == PAGES[path]()


def test_no_page_is_left_out() -> None:
    there = {str(path.relative_to(ROOT)) for folder in results.FOLDERS for path in (ROOT / folder).glob("*.md")}
    assert there <= set(PAGES) | WITHOUT_ROWS
    assert there >= WITHOUT_ROWS


def test_every_experiment_takes_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMVIT_DATA", "somewhere")
    assert read_settings([]).data == Path("somewhere")
    asked = read_settings(["--data", "imagenet", "--model", "deit_small_patch16_224", "--images", "50000"])
    assert (asked.data, asked.models, asked.images) == (Path("imagenet"), ("deit_small_patch16_224",), 50000)
    assert asked.output == FOLDER


def test_the_demo_is_shown_once_an_epoch_in_an_order_of_the_seed() -> None:
    orders = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        orders.append(torch.cat([labels for _, labels in ShuffledDemo(crop=False)]))
    assert len(orders[0]) == TRAINED
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert torch.equal(orders[0].sort().values, orders[2].sort().values)


@pytest.mark.parametrize(
    ("counted", "formula", "said"),
    [
        (0.728, 0.7, "yes"),
        (0.86, 0.8, "if cut, not rounded"),
        (3.167, 3.06, "no: the formula gives more"),
        (2.0, 1.0, "no"),
    ],
)
def test_printed_flops_are_compared_as_printed(counted: float, formula: float, said: str) -> None:
    printed = {0.728: 0.7, 0.86: 0.8, 3.167: 3.0, 2.0: 1.5}[counted]
    assert agreement({"local": counted, "global": counted, "formula": formula}, printed) == said
