"""SAM, SAM-HQ and ViTDet: MLPs beside windows, attention over the grid at group centres, masks behind it."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmvit
from pmvit.compression import plan_of
from pmvit.hosts import host_of
from pmvit.hosts.outputs import predict
from pmvit.measuring import MergeCosts, measure_config
from pmvit.measuring.listener import EffectRecorder
from pmvit.planning import LayerPlan, Plan
from pmvit.planning.budget import predicted_macs
from scripts.sweep import randomise, try_model
from scripts.sweep_models import Candidate
from scripts.sweep_sam import create_sam, makers

pytest.importorskip("transformers")

FOUND = {name: make for _, name, make in makers()}


def make(name: str) -> Any:
    torch.manual_seed(0)
    model = FOUND[name]()
    randomise(model)
    return model


def images_for(model: nn.Module, count: int = 2) -> Tensor:
    return torch.randn(count, *host_of(model).input_size(), generator=torch.Generator().manual_seed(1))


def costs_of(model: nn.Module, **options: Any) -> MergeCosts:
    found = pmvit.measure(model, [images_for(model)], progress=False, **options)
    assert isinstance(found, MergeCosts)  # the default for these
    return found


def small_of(model: nn.Module, keep: float = 0.6) -> Any:
    return pmvit.compress(model, pmvit.plan(costs_of(model), keep=keep))


def masks_of(model: Any, images: Tensor) -> Tensor:
    points = torch.tensor([[[[30.0, 40.0]], [[70.0, 20.0]]]]).expand(len(images), -1, -1, -1)
    with torch.no_grad():
        found: Tensor = model(images, input_points=points).pred_masks
    return found


@pytest.mark.parametrize("name", ["SamModel", "SamHQVisionModel", "VitDetBackbone", "VitDetModel residual"])
def test_what_the_sweep_checks(name: str) -> None:
    assert try_model(Candidate("hf sam", name, FOUND[name])).reason == ""


@pytest.mark.parametrize("name", ["SamHQModel", "VitDetModel", "VitDetModel residual"])
def test_windows_keep_all_tokens_and_budgets_are_met(name: str) -> None:
    """Attention inside windows has no groups, MLPs and attention over the grid have; what is predicted is counted."""
    model = make(name)
    costs, layouts = costs_of(model), host_of(model).layouts()
    is_residual = name.endswith("residual")
    assert [layout.only_mlp for layout in layouts] == [True, is_residual, True]
    assert costs.parts == (("mlp",), ("mlp",) if is_residual else ("attention", "mlp"), ("mlp",))
    whole, share = pmvit.flops(model), 0.85 if is_residual else 0.75
    plan = pmvit.plan(costs, gflops=share * whole.gflops)
    assert abs(plan.keep - pmvit.plan(costs, keep=plan.keep).keep) < 0.01
    counted = pmvit.flops(pmvit.compress(model, plan))
    assert counted.macs == predicted_macs(costs, plan) <= share * whole.macs
    assert all(plan.layers[index].is_identity == layout.only_mlp for index, layout in enumerate(layouts))
    assert all(layer.mlp is not None for layer in plan.layers.values())
    least = pmvit.plan(costs, keep=0.01)  # one token in each part that merges
    assert [layer.mlp.num_kept for layer in least.layers.values() if layer.mlp is not None] == [1] * (2 + is_residual)


def test_what_is_merged_stays_merged_inside_a_block_alone() -> None:
    """Windows read every token anew: an MLP is not bound by what the blocks around it merge."""
    merges = costs_of(make("SamVisionModel"), early=1.0).merges
    groups: dict[Any, list[set[int]]] = {}
    for block, part, first, second, _ in merges:
        known = groups.setdefault((block, part), [{token} for token in range(36)])
        joined = [group for group in known if group & {first, second}]
        known[:] = [group for group in known if group not in joined] + [set.union(*joined)]
        if (block, part) == (1, "attention"):
            mlp = groups.get((1, "mlp"), [])
            assert any(joined[0] | joined[1] <= group for group in mlp)


@pytest.mark.parametrize("name", ["SamVisionModel", "VitDetModel residual"])
def test_the_effect_of_an_mlp_alone_is_what_the_output_moves_by(name: str) -> None:
    model = make(name).double()
    images, host = images_for(model, 1).double(), host_of(model)
    blocks = [model.get_submodule(each) for each in host.block_names()]
    mlps = [tuple(block.get_submodule(path) for path in host.part_names(block).mlp or ()) for block in blocks]
    recorder = EffectRecorder(blocks, host.layouts(), mlps)  # type: ignore[arg-type]  # pairs
    with host.observed(), recorder:
        output = predict(model, images)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (direction * output).sum().backward()
    effects = dict(zip(recorder.block_parts, recorder.collect(), strict=True))[2, "mlp"][0, 0]
    recorder.remove_hooks()
    step, token, other = 1e-6, 4, 15

    def moved(_: nn.Module, __: Any, update: Tensor) -> Tensor:
        rows = update.flatten(1, -2).clone()
        rows[:, token] += step * (rows[:, other] - rows[:, token])
        return rows.view(update.shape)

    mlps[2][1].register_forward_hook(moved)
    with torch.no_grad():
        change = (direction * (predict(model, images) - output)).sum() / step
    assert torch.allclose(change, effects[token, other] - effects[token, token], rtol=1e-3)


def test_masks_are_the_originals_as_far_as_tokens_are_kept() -> None:
    model = make("SamModel")
    images = images_for(model)
    expected = masks_of(model, images)
    assert torch.equal(masks_of(pmvit.compress(model, Plan.keep_all((6, 6), 3)), images), expected)
    order = LayerPlan(tuple(range(35, -1, -1)), tuple(range(35, -1, -1)), (1.0,) * 36)
    plan = Plan((6, 6), 3, {1: order, 2: replace(LayerPlan.keep_all(36), mlp=order)}, attention_bias=True)
    assert torch.allclose(masks_of(pmvit.compress(model, plan), images), expected, rtol=1e-4, atol=1e-4)
    small = small_of(model)
    masks = masks_of(small, images)
    assert masks.shape == expected.shape
    assert torch.isfinite(masks).all()
    assert not torch.allclose(masks, expected, atol=1e-2)
    hq = make("SamHQModel")  # its decoder also reads what comes out of the block that attends over the grid
    assert masks_of(small_of(hq), images).shape == masks_of(hq, images).shape


@pytest.mark.parametrize("name", ["SamModel", "VitDetBackbone"])
def test_saved_models_come_back_to_the_bit(name: str, tmp_path: Path) -> None:
    model = make(name)
    parts = list(model.modules())
    small = small_of(model)
    pmvit.save(small, tmp_path / "saved")
    loaded: Any = pmvit.load(tmp_path / "saved")
    with torch.inference_mode():
        assert torch.equal(predict(loaded, images_for(small)), predict(small, images_for(small)))
    if name == "SamModel":
        assert torch.equal(masks_of(loaded, images_for(model)), masks_of(small, images_for(model)))
        shared = loaded.prompt_encoder.shared_embedding.positional_embedding
        assert loaded.shared_image_embedding.positional_embedding is shared
    plan = plan_of(small)
    assert plan is not None
    again = pmvit.decompress(pmvit.compress(model, plan, inplace=True))
    assert all(one is other for one, other in zip(again.modules(), parts, strict=True))


@pytest.mark.parametrize("name", ["SamHQVisionModel", "VitDetBackbone", "VitDetModel residual"])
def test_passes_are_exact(name: str) -> None:
    small = small_of(make(name))
    images = images_for(small)
    with torch.inference_mode():
        expected = predict(small, images)
        for target in ("eager", "graph", "onnx"):
            got = predict(pmvit.optimize_for_inference(small, target=target), images)
            assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5


def test_export(tmp_path: Path) -> None:
    model = create_sam("SamVisionModel", num_hidden_layers=2)
    randomise(model)
    assert pmvit.export(small_of(model), tmp_path / "sam.onnx").max_error < 1e-3


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs/sam.md").read_text(encoding="utf-8")
    exec(re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)[0], {})  # noqa: S102  # what users see
    expected = re.findall(r"^```text\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)[0]
    assert re.findall("(.*) GFLOPs", capsys.readouterr().out) == re.findall("(.*) GFLOPs", expected)


def test_hidden_states_have_the_grid() -> None:
    model = make("SamVisionModel")
    small = small_of(model)
    with torch.no_grad():
        expected, got = (each(images_for(model), output_hidden_states=True).hidden_states for each in (model, small))
    assert [state.shape for state in got] == [state.shape for state in expected] == [(2, 6, 6, 48)] * 4
    assert torch.equal(got[0], expected[0])
    assert not torch.allclose(got[2], expected[2], atol=1e-3)


def test_gradients_reach_relative_positions_through_groups() -> None:
    small = small_of(make("VitDetModel")).train()
    predict(small, images_for(small)).sum().backward()
    tables = [value for name, value in small.named_parameters() if "rel_pos" in name]
    assert len(tables) == 6
    assert all(table.grad is not None and table.grad.any() for table in tables)


def test_other_plans_are_refused_in_one_line() -> None:
    model = make("SamVisionModel")
    assert measure_config(model, None, {"limit": 5}) == pmvit.config.MergeCostConfig(limit=5)
    for method in ("adaptive", "scored"):
        with pytest.raises(pmvit.PmvitError, match=r"attends inside windows: make a fixed plan, method=\"measured\""):
            pmvit.measure(model, [images_for(model)], method=method, progress=False)
    order = LayerPlan(tuple(range(35, -1, -1)), tuple(range(35, -1, -1)), (1.0,) * 36)
    with pytest.raises(pmvit.PmvitError, match="block 0: expected a plan with groups for its MLP alone"):
        pmvit.compress(model, Plan((6, 6), 3, {0: order}))
