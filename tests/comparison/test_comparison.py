"""Methods side by side: at equal cost, and no better than they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pmvit
from pmvit.comparison import Comparison, ComparisonRow
from pmvit.config.measuring import OURS
from pmvit.data.demo import demo_loader, demo_model
from pmvit.evaluation.classification import Evaluation
from pmvit.evaluation.reference import Reference
from pmvit.methods import METHODS, make_method
from tests.helpers import method_at, small_vit
from tests.segmenters import small_segmenter


def half_a_model() -> nn.Module:
    """The first half of the trained demonstration model, and its head."""
    model = demo_model()
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.Sequential)
    model.blocks = blocks[:3]
    return model


@pytest.fixture(scope="module")
def found() -> Comparison:
    """Our plans and two methods on real images."""
    model = half_a_model()
    images = demo_loader("train", count=64)
    return pmvit.compare(
        model,
        demo_loader("test", count=128),
        gflops=0.6 * pmvit.flops(model).gflops,
        methods=[*OURS, "tome"],
        scores=pmvit.measure(model, images, method="scored", progress=False),
        merge_costs=pmvit.measure(model, images, method="measured", progress=False),
        metric=pmvit.measure(model, images, method="adaptive", progress=False),
        others={"mine": pmvit.compress(model, make_method("random", r=(18, 18, 18)))},
        exports=False,
        batches=[2],
        rounds=3,
        progress=False,
    )


def test_methods_cost_the_same_and_are_told_apart(found: Comparison) -> None:
    rows = {row.name: row for row in found.rows}
    of_ours = [name for ours in OURS for name in (ours, f"{ours}, optimized")]
    assert list(rows) == ["original", *of_ours, "tome", "mine"]
    whole = rows["original"]
    assert whole.evaluation is not None
    assert whole.evaluation.agreement == 1.0
    for name in (*OURS, "tome"):
        assert rows[name].gflops == pytest.approx(rows[name].wanted, rel=0.01)
        assert [(speed.runtime, speed.batch) for speed in rows[name].speeds] == [("eager", 2)]
    divergences = {}
    for name in ("measured", "adaptive", "tome", "mine"):
        evaluation = rows[name].evaluation
        assert isinstance(evaluation, Evaluation)
        assert evaluation.kl is not None
        divergences[name] = evaluation.kl
    assert divergences["measured"] < divergences["mine"]
    assert divergences["adaptive"] < divergences["mine"]
    assert rows["adaptive"].options["method"] == "adaptive"
    assert divergences["tome"] < divergences["mine"]
    assert rows["mine"].options["name"] == "random"
    again = pmvit.compress(half_a_model(), make_method("tome", **rows["tome"].options))
    reference = Reference(half_a_model(), "original")
    alone = pmvit.evaluate(again, demo_loader("test", count=128), reference=reference, progress=False)
    assert alone == rows["tome"].evaluation


def test_a_comparison_is_written(found: Comparison, tmp_path: Path) -> None:
    found.write(tmp_path)
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["name"] for row in document["rows"]] == [row.name for row in found.rows]
    lines = (tmp_path / "comparison.md").read_text().splitlines()
    assert lines[2] == "| method | GFLOPs | top-1 | agreement | KL | eager, batch 2 | exports |"
    assert len(lines) == 4 + len(found.rows)
    assert (tmp_path / "comparison.png").stat().st_size > 5000


def evaluated(top1: float) -> Evaluation:
    return Evaluation(100, 0, top1, 0.0, None, None, None, None, None)


def test_the_front_is_what_nothing_beats() -> None:
    points = {"a": (1.0, 0.7), "b": (2.0, 0.6), "c": (2.0, 0.8), "d": (3.0, 0.8), "e": (0.5, 0.1)}
    rows = [ComparisonRow(n, "x", gflops=cost, evaluation=evaluated(top1)) for n, (cost, top1) in points.items()]
    rows.append(ComparisonRow("f", "x", failure="it cannot"))
    assert [row.name for row in Comparison(rows).front()] == ["e", "a", "c"]


def test_what_cannot_be_is_said() -> None:
    model = small_segmenter(depth=1, decoder="linear")
    images = [torch.randn(1, 3, 64, 96)]
    wanted = 0.8 * pmvit.flops(model).gflops
    names = ["evit", *OURS]
    found = pmvit.compare(model, images, gflops=wanted, methods=names, runtimes=[], progress=False)
    original, evit, *ours = found.cells()
    assert original == ["original", f"{pmvit.flops(model).gflops:.3f}", "100.00%", "yes"]
    assert "reads every token" in evit[2]
    for row, missing in zip(ours, ("scores", "merge costs", "a metric"), strict=True):
        assert f"needs {missing}" in row[2]
    with pytest.raises(pmvit.PmvitError, match="one of the methods"):
        pmvit.compare(model, images, gflops=wanted, methods=["tomato"])
    with pytest.raises(pmvit.PmvitError, match="use the original"):
        pmvit.compare(pmvit.compress(small_vit(), make_method("tome", r=2)), images, gflops=wanted)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_a_graph(name: str) -> None:
    """For any batch size, and with the same outputs."""
    vit: Any = small_vit(depth=2)
    model = pmvit.compress(vit, method_at(name, 0.5, vit)).requires_grad_(False)
    batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
    graph = torch.export.export(model, (torch.randn(2, 3, 96, 96),), dynamic_shapes=batch).module()
    images = torch.randn(3, 3, 96, 96)
    with torch.inference_mode():
        assert torch.allclose(graph(images), model(images), atol=1e-5)
