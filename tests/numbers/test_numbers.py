"""Intervals, titles and rounding, against numbers worked out by hand."""

import statistics
import subprocess
import sys

import numpy as np
import pytest
import torch

from pmvit.evaluation.classification import Evaluation
from pmvit.numbers.bootstrap import RESAMPLES, bootstrap, median
from pmvit.numbers.colours import LINES, distances, to_oklab
from pmvit.numbers.estimates import Estimate, wilson
from pmvit.numbers.measures import MEASURES, WithQuality, main_measure
from pmvit.numbers.tables import format_number, markdown_table


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (67.25, ".1f", "67.3"),
        (-0.05, ".1f", "-0.1"),
        (2.675, ".2f", "2.68"),
        (0.6725, ".1%", "67.3%"),
        (100 * (0.6725 - 0.6), ".1f", "7.3"),  # 7.250000000000001 or 7.249999999999996: a half all the same
        (100 * (0.6 - 0.6725), "+.1f", "-7.3"),
        (0.0449999, ".1f", "0.0"),
        (12345.65, ",.1f", "12,345.7"),
        (None, ".1f", "-"),
    ],
)
def test_halves_are_rounded_away_from_zero(value: float | None, form: str, text: str) -> None:
    assert format_number(value, form) == text


def test_numbers_that_are_no_halves_are_rounded_as_python_does() -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0)).tolist()
    assert [format_number(value, "+.3f") for value in values] == [f"{value:+.3f}" for value in values]


def test_estimates_and_tables_as_text() -> None:
    assert str(Estimate(1.235, 1.2, 1.3)) == "1.24x [1.20, 1.30]"
    assert Estimate(-0.0725, -0.1, 0.0).text("+.1f", 100) == "-7.3 [-10.0, +0.0]"
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_wilson_by_hand() -> None:
    """The interval of 8 of 10, worked out from the formula: (0.4902, 0.9433)."""
    value, low, high = wilson(0.8, 10)
    assert (value, round(low, 4), round(high, 4)) == (0.8, 0.4902, 0.9433)
    assert wilson(1.0, 50).high == 1.0
    assert wilson(0.0, 50)[:2] == (0.0, 0.0)


def test_the_bootstrap_covers_what_it_should() -> None:
    values = torch.arange(100.0)
    mean, low, high = bootstrap(values)
    half = 1.96 * values.std().item() / 10
    assert mean == 49.5
    assert low == pytest.approx(49.5 - half, abs=0.7)
    assert high == pytest.approx(49.5 + half, abs=0.7)
    assert bootstrap(torch.ones(3000)) == (1.0, 1.0, 1.0)


def test_draws_in_parts_are_those_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.rand(90, generator=torch.Generator().manual_seed(1))
    whole = bootstrap(values)
    monkeypatch.setattr("pmvit.numbers.bootstrap.LARGEST_DRAW", 7 * 90)
    assert bootstrap(values) == pytest.approx(whole)


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_medians_of_what_is_drawn(count: int) -> None:
    values = torch.rand(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    drawn = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(3))
    times = torch.stack([torch.bincount(row, minlength=count) for row in drawn]).double()
    expected = [statistics.median(values[row].tolist()) for row in drawn]
    assert median(times, values).tolist() == pytest.approx(expected)
    assert bootstrap(values, median).value == pytest.approx(statistics.median(values.tolist()))


def quality_of(**measured: float) -> float | None:
    evaluation = WithQuality()
    vars(evaluation).update(measured)
    return evaluation.quality


def test_one_measure_says_how_good_a_model_is() -> None:
    """Accuracy where there are labels; without, nearness to the original, which a divergence measures finest."""
    assert main_measure({"top1": 0.7, "kl": 0.1, "agreement": 0.9}) == "top1"
    assert main_measure({"top1": None, "kl": 0.1, "agreement": 0.9}) == "kl"
    near, far = quality_of(kl=0.1), quality_of(kl=0.2)
    assert near is not None
    assert far is not None
    assert near > far
    assert quality_of(miou=0.4, agreement=0.9) == 0.4
    assert quality_of() is None
    evaluation = Evaluation(10, 0, 0.70125, 0.0, None, None, 0.9, 0.1, None)
    assert (evaluation.quality, evaluation.headline) == (0.70125, "top-1 70.13%")
    assert MEASURES["kl"].text(0.12345) == "0.1235"


def test_titles_and_tables_need_no_torch() -> None:
    code = "import pmvit.numbers.measures, pmvit.numbers.estimates, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_lines_of_charts_are_told_apart_by_all_eyes() -> None:
    """On white, too; the last colours least, which are for more lines than most charts have."""
    colours = np.array([list(bytes.fromhex(line.removeprefix("#"))) for line in (*LINES, "#ffffff")], dtype=np.float64)
    eyes = to_oklab(colours)
    for number in range(len(colours)):
        others = np.delete(eyes, number, axis=1)
        assert distances(others, eyes[:, number]).min() > 0.06
