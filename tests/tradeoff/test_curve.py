"""The curve: every point is what the other verbs measure, the chosen one is the one that was asked for."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch import nn

import pmvit
from pmvit.compression import compression_of
from pmvit.data.demo import demo_images, demo_loader, demo_model
from pmvit.errors import PmvitError
from pmvit.measuring import TokenMetric
from pmvit.numbers.estimates import Estimate
from pmvit.planning.adaptive import AdaptivePlan
from pmvit.tradeoff import Curve, CurvePoint
from pmvit.tradeoff import search as search_room
from tests.helpers import pmvit_here

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo() -> tuple[nn.Module, Any, Any]:
    model = demo_model()
    return model, pmvit.measure(model, demo_loader("train", 32, 32), progress=False), demo_loader("test", 32, 64)


@pytest.fixture(scope="module")
def curve(demo: Any) -> Curve:
    model, costs, data = demo
    return pmvit.curve(model, data, costs, keep=[0.3, 0.9, 0.6], max_drop=4.0, batch=4, rounds=5, progress=False)


def test_points_are_what_the_other_verbs_measure(curve: Curve, demo: Any) -> None:
    model, costs, data = demo
    original, *points = curve.rows
    assert original.name == "original"
    assert original.speedup == (1.0, 1.0, 1.0)
    assert original.gflops == pytest.approx(pmvit.flops(model).gflops)
    assert {point.name for point in points} == {"keep 0.9", "keep 0.6", "keep 0.3"}
    assert [point.milliseconds for point in points] == sorted((point.milliseconds for point in points), reverse=True)
    for point in points:
        small = pmvit.compress(model, pmvit.plan(costs, **point.budget))
        found = pmvit.evaluate(small, data, reference=model, progress=False)
        assert point.quality.value == pytest.approx(found.top1)
        assert original.quality.value == pytest.approx(found.reference_top1)
        assert point.drop.value == pytest.approx(100 * (original.quality.value - point.quality.value))
        assert point.throughput == pytest.approx(4 / point.milliseconds * 1e3)
        assert point.gflops < original.gflops


def test_the_chosen_point_is_the_fastest_that_keeps_enough_and_is_marked(curve: Curve, tmp_path: Path) -> None:
    fitting = [row for row in curve.rows[1:] if row.drop.value <= 4.0]
    assert curve.chosen == max(fitting, key=lambda row: row.speedup.value)
    assert sum(row.is_chosen for row in curve.rows) == 1
    curve.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"curve.json", "curve.md", "curve.png"}
    document = json.loads((tmp_path / "curve.json").read_text())
    assert [row["budget"] for row in document["rows"] if row["is_chosen"]] == [curve.chosen.budget]
    assert document["measure"] == "top1"
    assert document["environment"]["runtime"] == "eager"
    assert document["environment"]["chosen by"] == "at most 4 points lost"
    (line,) = [line for line in (tmp_path / "curve.md").read_text().splitlines() if "(chosen)" in line]
    assert curve.chosen.name in line
    with Image.open(tmp_path / "curve.png") as picture:
        ring = sum(count for count, colour in picture.convert("RGB").getcolors(1 << 24) or () if colour == (213, 94, 0))
    assert ring > 20


def test_a_speed_chooses_the_best_that_is_fast_enough(demo: Any) -> None:
    model, costs, data = demo
    result = pmvit.curve(model, data[:1], costs, keep=[0.9, 0.5], speedup=0.1, rounds=3, progress=False)
    assert result.chosen is not None
    assert result.chosen.drop.value == min(row.drop.value for row in result.rows[1:])
    none = pmvit.curve(model, data[:1], costs, keep=[0.9], speedup=1000.0, rounds=3, progress=False)
    assert none.chosen is None


def test_a_model_with_an_adaptive_plan_brings_what_its_curve_is_made_from(demo: Any) -> None:
    model, _, data = demo
    metric = pmvit.measure(model, data[:1], method="adaptive", rank=16, progress=False)
    small = pmvit.compress(model, pmvit.plan(metric, keep=0.8))
    result = pmvit.curve(small, data[:1], gflops=[0.2, 0.15], rounds=3, progress=False)
    for point in result.rows[1:]:
        assert pmvit.flops(pmvit.set_budget(small, **point.budget)).gflops <= (point.budget["gflops"] or 0)
    assert result.rows[0].keep == 1.0
    with pytest.raises(PmvitError, match=r"only adaptive plans bring it"):
        pmvit.curve(model, data[:1])


def test_a_curve_of_embeddings_is_drawn_on_its_own_scale(tmp_path: Path) -> None:
    one = Estimate(1.0, 1.0, 1.0)
    rows = [
        CurvePoint({}, 1.0, 2.0, 10.0, 100.0, one, one, Estimate(0.0, 0.0, 0.0)),
        CurvePoint({"keep": 0.5}, 0.5, 1.0, 6.0, 160.0, one, Estimate(0.97, 0.96, 0.98), Estimate(3.0, 2.0, 4.0)),
    ]
    curve = Curve(rows, {"runtime": "eager", "batch": 8}, "cosine")
    curve.write(tmp_path)
    assert "| 0.9700 | 3.00 [2.00, 4.00] |" in (tmp_path / "curve.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speedup": 2.0, "max_drop": 1.0}, "one of speedup and max_drop"),
        ({"keep": [0.5], "gflops": [0.1]}, "one of keep and gflops"),
        ({"keep": []}, "keep, gflops: expected at least one budget"),
        ({"keep": [1.5]}, "keep: expected a share above 0 and up to 1, got 1.5"),
        ({"runtime": "abacus"}, "runtime: expected one of eager"),
    ],
)
def test_wrong_options_are_named(demo: Any, options: Any, message: str) -> None:
    model, costs, data = demo
    with pytest.raises(PmvitError, match=message):
        pmvit.curve(model, data, costs, progress=False, **options)


def test_the_page_of_budgets_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands and its Python, as they stand, with fewer plans to try."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(search_room, "TIMES", 1)
    model = demo_model()
    pmvit.save(model, tmp_path / "original")
    for half in ("train", "test"):
        images, labels = demo_images(half, 64)
        for number, (image, label) in enumerate(zip(images.numpy(), labels.tolist(), strict=True)):
            folder = tmp_path / "fashion" / half / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number}.png")
    text = (ROOT / "docs/budgets.md").read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()]
    assert len(commands) == 4
    for command in commands:
        monkeypatch.setattr(search_room, "AT_A_TIME", 1 if "--speedup" in command else 3)
        words = [*command.split()[1:], "--json"]
        words += ["--workers", "0"] if "--plan" not in command else []
        words += ["--rounds", "5"] if "--speedup" in command or " curve " in command else []
        result = pmvit_here(*words, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        document = json.loads(result.stdout)
        if "--speedup" in command:
            assert document["reached"]["speedup"] >= 1.1
            assert document["reached"]["runtime"] == "onnxruntime"
            assert (
                "as fast as the original (onnxruntime, batch 1, 1 threads, cpu)"
                in pmvit_here("info", "fast", cwd=tmp_path).stdout
            )
        elif "--max-drop" in command and "curve" not in command:
            assert document["reached"]["drop"] <= 2
    chosen = next(row for row in json.loads((tmp_path / "curve/curve.json").read_text())["rows"] if row["is_chosen"])
    metric = TokenMetric.load(tmp_path / "fast/metric.safetensors")
    compression = compression_of(pmvit.load(tmp_path / "chosen"))
    assert compression is not None
    assert isinstance(compression.what, AdaptivePlan)
    assert compression.what.merges == pmvit.plan(metric, **chosen["budget"]).merges
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"pmvit": pmvit, "model": model, "loader": demo_loader("train", 32, 64)}
    names["validation"] = demo_loader("test", 64, 64)
    exec(code.replace("onnxruntime", "eager"), names)  # noqa: S102  # the text that users are shown, but quick
    assert names["good"].made_by["reached"]["drop"] <= 2
    assert (tmp_path / "curve/curve.png").stat().st_size > 1000


def test_the_command_line_says_what_is_missing(demo: Any, tmp_path: Path) -> None:
    model, costs, _ = demo
    pmvit.save(model, tmp_path / "original")
    costs.save(tmp_path / "metric.safetensors")
    base = ("compress", "original", "--measured", "metric.safetensors", "-o", "out")
    for words, message in (
        ((*base, "--max-drop", 1), "--max-drop: expected --val"),
        ((*base, "--keep", 0.5, "--val", "original"), "--val: expected with --max-drop alone"),
        ((*base, "--keep", 0.5, "--runtime", "eager"), "expected with speedup alone"),
        (("curve", "original", "-o", "out"), "expected --val"),
        (("curve", "original", "--val", "original", "-o", "out"), "expected --data to measure on, or --measured"),
        (("curve", "original", "--val", "x", "--keep", "a", "-o", "out", "--measured", "metric.safetensors"), "x"),
    ):
        result = pmvit_here(*words, cwd=tmp_path)
        assert result.returncode == 1
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
