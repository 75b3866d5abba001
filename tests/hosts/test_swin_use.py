"""Swin, compressed: saved, restored, optimised, exported, tuned, shown and refused."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import pmvit
from pmvit.cli import app
from pmvit.compression import plan_of
from pmvit.hosts import host_of
from pmvit.measuring import Scores
from pmvit.planning import LayerPlan, Plan
from pmvit.prune_merge import PruneMerge
from pmvit.runtime.bench.variants import in_place_plan, variant
from tests.helpers import tome
from tests.swins import V1, compressed, difference, images, scored, small_swin


@pytest.mark.parametrize("host", ["v1 padded", "v2", "torchvision v1 padded", "torchvision v2 padded"])
def test_saved_models_come_back_to_the_bit(host: str, tmp_path: Path) -> None:
    model, small = compressed(host)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    pmvit.save(small, tmp_path / "saved")
    loaded = pmvit.load(tmp_path / "saved")
    with torch.inference_mode():
        assert torch.equal(loaded(images(model)), small(images(model)))
    assert plan_of(loaded) == small.compression.what
    assert Plan.from_json(small.compression.what.to_json()) == small.compression.what
    scores = scored(model)
    scores.save(tmp_path / "scores.json")
    again = Scores.load(tmp_path / "scores.json")
    assert torch.equal(again.values, scores.values)
    assert (again.grids, again.windows) == (scores.grids, scores.windows)


@pytest.mark.parametrize("host", ["v1", "v2", "torchvision v2 padded"])
def test_decompress_restores_the_very_objects(host: str) -> None:
    model = small_swin(host)
    before = dict(model.named_modules())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode():
        expected = model(images(model))
    scores = scored(model)
    small = pmvit.compress(model, pmvit.plan(scores, keep=0.5), inplace=True)
    assert small is model
    pmvit.decompress(model)
    after = dict(model.named_modules())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with torch.inference_mode():
        assert torch.equal(model(images(model)), expected)


@pytest.mark.parametrize("host", ["v1 padded", "v2", "torchvision v2 padded"])
@pytest.mark.parametrize("learn", ["group", "dense"])
@pytest.mark.parametrize("reconstruct", ["residual", "pinv"])
def test_passes_are_exact(host: str, learn: Any, reconstruct: str) -> None:
    model, small = compressed(host, learn, reconstruct=reconstruct, skip=(1,))
    with torch.no_grad():
        for module in small.modules():
            if isinstance(module, PruneMerge):
                module.merge_weights.mul_(1 + 0.1 * torch.randn_like(module.merge_weights))
    for options in ({}, {"target": "graph"}, {"target": "onnx"}, {"fuse": False}):
        for original in (model, small):
            fast = pmvit.optimize_for_inference(original, **options)
            assert not any(isinstance(module, PruneMerge) for module in fast.modules()) or learn == "dense"
            with torch.inference_mode():
                for count in (2, 3, 2):
                    batch = images(model, count)
                    assert difference(fast(batch), original(batch)) < 1e-4


def test_passes_leave_no_rolling() -> None:
    _, small = compressed()
    fast = pmvit.optimize_for_inference(small)
    with torch.inference_mode(), torch.profiler.profile() as profile:
        fast(images(small))
    called = {event.key for event in profile.key_averages()}
    assert "aten::embedding_bag" in called
    assert "aten::roll" not in called


@pytest.mark.parametrize("host", ["v1 padded", "v2"])
def test_export_to_onnx(host: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    _, small = compressed(host, depths=(2,))
    done = pmvit.export(small, tmp_path / "swin.onnx")
    assert done.max_error < 1e-4
    assert done.agreement == 1.0


@pytest.mark.parametrize("host", ["v1", "v2"])
def test_gradients_reach_the_matrices_and_the_bias(host: str) -> None:
    _, small = compressed(host)
    small.train()
    torch.nn.functional.cross_entropy(small(images(small)), torch.tensor([1, 2])).backward()
    for module in small.modules():
        if isinstance(module, PruneMerge):
            for weights, is_shared in (
                (module.merge_weights, module.merge_shared),
                (module.reconstruct_weights, module.reconstruct_shared),
            ):
                assert weights.grad is not None
                assert weights.grad[is_shared].any()
            block: Any = module.block
            attention = block.host.attn
            table = attention.cpb_mlp[2].weight if host == "v2" else attention.relative_position_bias_table
            assert table.grad.any()


def test_fine_tuning_moves_matrices_and_keeps_them_saved(tmp_path: Path) -> None:
    model, small = compressed()
    before = {name: value.clone() for name, value in small.state_dict().items()}
    batches = [(images(model, 4), torch.tensor([0, 1, 2, 3]))]
    pmvit.finetune(small, teacher=model, train=batches, epochs=1, lr=0.01, output=tmp_path, progress=False, workers=0)
    moved = [name for name, value in small.state_dict().items() if not torch.equal(value, before[name])]
    assert any(name.endswith("merge_weights") for name in moved)
    assert any("relative_position_bias_table" in name for name in moved)


def test_plans_of_several_grids_are_shown() -> None:
    _, small = compressed()
    plan = small.compression.what
    text = str(plan)
    assert "28 x 28, 14 x 14 patch tokens" in text
    lines = plan.draw().splitlines()
    assert sum("block" in line for line in lines) == 2
    assert len(lines) == (1 + 28) + 1 + (1 + 14) + 1 + 1


def test_plans_for_other_windows_are_refused() -> None:
    model, small = compressed()
    plan = small.compression.what
    other = small_swin(window_size=14)
    with pytest.raises(pmvit.PmvitError, match=r"keeps as many tokens in each of|inside one window"):
        pmvit.compress(other, replace(plan, layers={1: plan.layers[1]}))
    everything = LayerPlan.keep_all(784)
    groups = [0 if group == 783 else group for group in everything.groups]
    crossing = LayerPlan(tuple(groups), everything.centres[:-1], everything.weights)
    with pytest.raises(pmvit.PmvitError, match=r"group 0 lies in more"):
        pmvit.compress(model, replace(plan, layers={0: crossing}))
    with pytest.raises(pmvit.PmvitError, match="block 2: expected a plan for 14 x 14 tokens, got one for 28 x 28"):
        pmvit.compress(model, Plan.keep_all((28, 28), 4))


def test_what_does_not_serve_swin_says_so() -> None:
    model = small_swin()
    with pytest.raises(pmvit.PmvitError, match="expected a timm VisionTransformer with plain blocks, or a Segmenter"):
        tome(model, 8)
    with pytest.raises(pmvit.PmvitError, match="needs a class token"):
        scored(model, scorer="class_attn")


def test_half_precision() -> None:
    _, small = compressed("v2")
    with torch.inference_mode():
        expected = small(images(small))
        assert difference(small.half()(images(small).half()).float(), expected) < 0.05


def test_the_contenders_of_a_benchmark_run() -> None:
    model, small = compressed("v1 padded", skip=(1,))
    with torch.inference_mode():
        for name in ("original", "original-optimized", "compressed", "optimized", "bound", "direct"):
            for target in ("eager", "graph"):
                made = variant(name, small, cast("Any", target))
                assert made(images(model)).isfinite().all(), (name, target)
        grids = tuple(layout.grid for layout in host_of(model).layouts())
        placed = pmvit.compress(model, in_place_plan(grids[0], len(grids), grids))
        assert difference(placed(images(model)), model(images(model))) < 1e-5


def test_the_command_line(pictures: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    save_file(small_swin("v1").state_dict(), weights)
    arguments = ["img_size=112", "embed_dim=32", "depths=[2,2]", "num_heads=[2,4]"]
    given = [part for argument in arguments for part in ("--model-arg", argument)]
    run = partial(CliRunner().invoke, app)
    told = run(["compress", V1, "--weights", str(weights), *given, "--data", str(pictures), "--keep", "0.7",
                "--workers", "0", "-o", str(tmp_path / "out")])  # fmt: skip
    assert told.exit_code == 0, told.output
    for command in (["info", str(tmp_path / "out"), "--draw"], ["plan", str(tmp_path / "out/scores.json"), "--keep",
                    "0.5", "-o", str(tmp_path / "plan.json")]):  # fmt: skip
        told = run(command)
        assert told.exit_code == 0, told.output
        assert "block 3" in told.output
    told = run(["evaluate", str(tmp_path / "out"), "--data", str(pictures), "--workers", "0"])
    assert told.exit_code == 0, told.output
