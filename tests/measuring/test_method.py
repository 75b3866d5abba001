"""`measure`: which of metric, merge costs and scores it measures, on how many images, and what it refuses."""

from pathlib import Path

import pytest
import torch

import pmvit
from pmvit.config import MergeCostConfig, MetricConfig, ScoreConfig
from pmvit.measuring import MergeCosts, TokenMetric, measure_config, read_measured
from pmvit.measuring.scores import Scores
from tests.helpers import small_vit
from tests.swins import small_swin


def batches(sizes: tuple[int, ...] = (4, 4, 3)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(size, 3, 96, 96), torch.arange(size) % 7) for size in sizes]


def test_a_metric_unless_something_asks_for_another() -> None:
    vit, swin = small_vit(), small_swin()
    assert measure_config(vit, None, {}) == MetricConfig()
    assert measure_config(vit, None, {"limit": 5}) == MetricConfig(limit=5)
    assert measure_config(vit, None, {"rank": 32}) == MetricConfig(rank=32)
    assert measure_config(vit, None, {"groups": "any"}) == MergeCostConfig(groups="any")
    assert measure_config(vit, None, {"loss": "entropy"}) == ScoreConfig(loss="entropy")
    assert measure_config(swin, None, {}) == ScoreConfig()
    assert measure_config(swin, None, {"limit": 5}) == ScoreConfig(limit=5)
    assert measure_config(vit, "paper", {}) == ScoreConfig(abs_per_sample=False)
    assert measure_config(vit, "paper", {"abs_per_sample": True}) == ScoreConfig()
    with pytest.raises(pmvit.PmvitError, match="loss: expected with the method scored alone; got it with measured"):
        measure_config(vit, "measured", {"loss": "entropy"})
    with pytest.raises(pmvit.PmvitError, match="loss: expected with the method scored alone"):
        measure_config(vit, "measured", {"loss": "entropy", "groups": "any"})
    with pytest.raises(pmvit.PmvitError, match="groups: expected with the method measured alone"):
        measure_config(vit, "scored", {"groups": "any"})
    with pytest.raises(TypeError, match="los"):
        pmvit.measure(vit, [], los="entropy")  # type: ignore[call-overload]  # the mistake


def test_what_is_measured_is_what_was_asked_for(tmp_path: Path) -> None:
    model = small_vit()
    metric = pmvit.measure(model, batches(), progress=False)
    assert isinstance(metric, TokenMetric)
    same = pmvit.measure(model, batches(), method="adaptive", progress=False)
    assert torch.equal(metric.projections, same.projections)
    costs = pmvit.measure(model, batches(), groups="neighbours", progress=False)
    assert costs == pmvit.measure(model, batches(), method="measured", progress=False)
    assert isinstance(costs, MergeCosts)
    scores = pmvit.measure(model, batches(), method="scored", progress=False)
    for name, measured in (("costs", costs), ("scores", scores), ("metric.safetensors", metric)):
        measured.save(tmp_path / name)
        assert type(read_measured(tmp_path / name)) is type(measured)
    with pytest.raises(pmvit.PmvitError, match="checkpoint: expected for scores alone"):
        pmvit.measure(model, batches(), checkpoint=tmp_path / "x")
    (tmp_path / "other").write_text("[]")
    with pytest.raises(pmvit.PmvitError, match='expected a JSON object with "format": "pmvit-scores"'):
        read_measured(tmp_path / "other")


def test_no_more_images_than_the_limit() -> None:
    model = small_vit()
    for limit, expected in ((11, 11), (6, 6), (4, 4), (99, 11)):
        scores = pmvit.measure(model, batches(), method="scored", limit=limit, progress=False)
        costs = pmvit.measure(model, batches(), method="measured", limit=limit, progress=False)
        assert (scores.images, costs.images) == (expected, expected)
    some = pmvit.measure(model, batches(), method="scored", limit=6, progress=False)
    (first, labels), (second, more), _ = batches()
    cut: Scores = pmvit.measure(model, [(first, labels), (second[:2], more[:2])], method="scored", progress=False)
    assert torch.equal(some.values, cut.values)
