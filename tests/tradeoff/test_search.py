"""Plans for a speed or a loss: the best that fits is found, and what it reached is written down."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmvit
from pmvit.data.demo import demo_loader, demo_model
from pmvit.errors import PmvitError
from pmvit.measuring import Scores
from pmvit.numbers.estimates import Estimate
from pmvit.planning import Plan
from pmvit.planning.adaptive import AdaptivePlan
from pmvit.planning.budget import reached_text
from pmvit.planning.planner import read_plan
from pmvit.tradeoff import search as search_room
from pmvit.tradeoff.measured import Quality, sharing
from pmvit.tradeoff.search import search
from tests.helpers import small_vit


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return small_vit(depth=4)


@pytest.fixture(scope="module")
def scores(model: nn.Module) -> Scores:
    return pmvit.measure(model, [], method="scored", scorer="random")


class Judge:
    """Says `1 / keep` of a plan, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, plans: Any) -> list[float]:
        self.asked.append(len(plans))
        return [1 / made.keep for made in plans]


@pytest.mark.parametrize("wanted", [1.2, 1.6, 3.0])
def test_the_search_comes_within_a_64th_of_where_plans_cease_to_fit(scores: Scores, wanted: float) -> None:
    judge = Judge()
    for fitting in (0.0, 1.0):

        def fits(found: float, least: bool = fitting == 0) -> bool:
            return found >= wanted if least else found <= wanted

        best, tried = search(
            lambda keep: pmvit.plan(scores, keep=keep), judge, fits, fitting=fitting, failing=1 - fitting
        )
        assert best is not None
        assert fits(best.found)
        assert best.plan.keep == pytest.approx(1 / wanted, abs=1 / 64 + 0.005)
        assert len(tried) == 9
    assert judge.asked == [3] * 6


def test_shares_of_which_there_is_no_plan_are_passed_over(scores: Scores) -> None:
    def make(keep: float) -> Plan:
        if keep < 0.4:
            raise PmvitError("expected a budget that leaves a token in every block")
        return pmvit.plan(scores, keep=keep)

    best, _ = search(make, Judge(), lambda found: found >= 1.5, fitting=0.0, failing=1.0)
    assert best is not None
    assert best.plan.keep == pytest.approx(1 / 1.5, abs=0.02)
    best, _ = search(make, Judge(), lambda found: found <= 9, fitting=1.0, failing=0.0)
    assert best is not None
    assert best.plan.keep == pytest.approx(0.4, abs=0.02)  # the least that there is
    best, tried = search(make, Judge(), lambda found: found >= 3, fitting=0.0, failing=1.0)
    assert best is None
    assert tried
    with pytest.raises(PmvitError, match="leaves a token"):
        search(lambda keep: make(keep / 9), Judge(), lambda found: found >= 3, fitting=0.0, failing=1.0)


def test_copies_that_share_their_weights_leave_the_model_alone(model: nn.Module, scores: Scores) -> None:
    images = torch.randn(2, 3, 96, 96)
    with torch.inference_mode():
        before = model(images)
        small = sharing(model, pmvit.plan(scores, keep=0.5))
        assert torch.equal(small(images), pmvit.compress(model, pmvit.plan(scores, keep=0.5))(images))
        assert torch.equal(model(images), before)
    own = {id(parameter) for parameter in model.parameters()}
    assert own <= {id(parameter) for parameter in small.parameters()}


def test_a_speed_is_for_the_runtime_batch_and_threads_that_are_asked_for(tmp_path: Path) -> None:
    model = small_vit(img_size=224, depth=4)
    scores = pmvit.measure(model, [], method="scored", scorer="random")
    made = pmvit.plan(scores, speedup=1.25, model=model, batch=2, threads=1, rounds=9, progress=False)
    reached = made.made_by["reached"]
    assert reached["speedup"] >= 1.25
    assert reached["interval"][0] <= reached["speedup"] <= reached["interval"][1]
    assert [reached[name] for name in ("runtime", "batch", "threads", "device")] == ["eager", 2, 1, "cpu"]
    assert reached["original_milliseconds"] == pytest.approx(reached["milliseconds"] * reached["speedup"])
    made.save(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == made
    pmvit.save(pmvit.compress(model, made), tmp_path / "out")
    text = reached_text(made.made_by)
    assert text is not None
    assert f"{reached['speedup']:.2f}x" in text
    assert "as fast as the original (eager, batch 2, 1 threads, cpu)" in (tmp_path / "out/README.md").read_text()
    with pytest.raises(PmvitError, match=r"speedup: expected at most \d+\.\d\d, which .* in eager with batches of 2"):
        pmvit.plan(scores, speedup=1000.0, model=model, batch=2, rounds=3, progress=False)


def test_an_exported_runtime_is_measured_where_it_runs(
    model: nn.Module, scores: Scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(search_room, "AT_A_TIME", 1)
    monkeypatch.setattr(search_room, "TIMES", 1)
    made = pmvit.plan(scores, speedup=0.2, model=model, runtime="onnxruntime", rounds=3, progress=False)
    assert made.made_by["reached"]["runtime"] == "onnxruntime"
    assert made.keep == pytest.approx(0.5, abs=0.02)


@pytest.fixture(scope="module")
def demo() -> tuple[nn.Module, Any, list[tuple[Tensor, Tensor]]]:
    """The demo's ViT, merge costs of it, and labelled images that it was not measured on."""
    model = demo_model()
    return model, pmvit.measure(model, demo_loader("train", 32, 32), progress=False), demo_loader("test", 64, 64)


def test_a_loss_is_counted_as_evaluate_counts_it(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_room, "TIMES", 1)
    model, costs, data = demo
    made = pmvit.plan(costs, max_drop=3.0, model=model, data=data, progress=False)
    reached = made.made_by["reached"]
    found = pmvit.evaluate(pmvit.compress(model, made), data, reference=model, progress=False)
    assert found.top1 is not None
    assert found.reference_top1 is not None
    assert reached["measure"] == "top1"
    assert reached["drop"] == pytest.approx(100 * (found.reference_top1 - found.top1))
    assert reached["drop"] <= 3.0
    assert reached["images"] == 64
    assert reached["interval"][0] <= reached["drop"] <= reached["interval"][1]
    assert "points of top-1 lost on 64 images" in (reached_text(made.made_by) or "")
    unlabelled = [images for images, _ in data]
    near = pmvit.plan(costs, max_drop=2.0, model=model, data=unlabelled, progress=False)
    agreement = pmvit.evaluate(pmvit.compress(model, near), unlabelled, reference=model, progress=False).agreement
    assert near.made_by["reached"]["measure"] == "agreement"
    assert near.made_by["reached"]["drop"] == pytest.approx(100 * (1 - (agreement or 0)))
    assert near.made_by["reached"]["drop"] <= 2.0
    looser = pmvit.plan(costs, max_drop=90.0, model=model, data=unlabelled, progress=False)
    assert looser.keep == pytest.approx(0.25, abs=0.01)  # the least that was tried
    assert looser.keep < near.keep


def test_adaptive_plans_have_these_budgets_too(demo: Any) -> None:
    model, _, data = demo
    metric = pmvit.measure(model, data[:1], method="adaptive", rank=16, progress=False)
    made = pmvit.plan(metric, max_drop=5.0, model=model, data=data[:1], progress=False)
    assert isinstance(made, AdaptivePlan)
    assert made.made_by["reached"]["drop"] <= 5.0
    fast = pmvit.plan(metric, speedup=0.2, model=model, rounds=3, progress=False)
    assert isinstance(fast, AdaptivePlan)
    assert fast.keep > 0.9
    with pytest.raises(PmvitError, match=r"max_drop: it is measured on a model"):
        made.at(max_drop=1.0)


def test_a_loss_that_no_plan_keeps_is_said(model: nn.Module, scores: Scores, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(_model: Any, _original: Any, plans: Any, _data: Any, _progress: bool) -> list[Quality]:
        lost = [100 * (1 - made.keep) + 0.3 for made in plans]
        return [Quality("top1", one, one, Estimate(each, each, each), 50) for each in lost]

    one = Estimate(1.0, 1.0, 1.0)
    monkeypatch.setattr(search_room, "measure_qualities", judge)
    with pytest.raises(PmvitError, match=r"at least 1\.\d+ points of top-1, which 98\.\d% of the tokens lose on 50"):
        pmvit.plan(scores, max_drop=0.1, model=model, data=[], progress=False)
    made = pmvit.plan(scores, max_drop=10.0, model=model, data=[], progress=False)
    assert 0.903 <= made.keep < 0.93


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speedup": 2.0}, "speedup: it is measured, not computed: pass model="),
        ({"max_drop": 1.0, "with_model": True}, "max_drop: it is measured on validation images: pass data="),
        ({"keep": 0.5, "runtime": "eager"}, "runtime, batch, threads, rounds: expected with speedup alone"),
        ({"keep": 0.5, "data": []}, "data: expected with max_drop alone"),
        ({"speedup": 2.0, "runtime": "abacus"}, "runtime: expected one of eager, compile"),
        ({"speedup": 2.0, "batch": 0}, "batch: expected 1 or more, got 0"),
    ],
)
def test_wrong_options_are_named(model: nn.Module, scores: Scores, options: dict[str, Any], message: str) -> None:
    if options.pop("with_model", False):
        options["model"] = model
    with pytest.raises(PmvitError, match=message):
        pmvit.plan(scores, progress=False, **options)
