"""Swin: windows, shifts, masks, padding, several grids; each property on v1 and v2, from scores to exported files."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import pmvit
from pmvit.cli import app
from pmvit.methods.tome import tome
from pmvit.models import adapter_for
from pmvit.models.swin_windows import WindowBlock
from pmvit.planning import LayerPlan, Plan, predicted_macs
from pmvit.prune_merge import PRUNED, PruneMerge
from pmvit.report.pictures import plan_picture
from pmvit.runtime.contenders import contender, in_place_plan, with_operations_in_place
from pmvit.windows import PADDING, Budget, Windows

import timm  # isort: skip  # after pmvit, which lets torchvision import
from timm.models.swin_transformer import window_reverse
from torchvision.models import swin_transformer

V1, V2 = "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"
HOSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v1": (V1, {"img_size": 112}),
    "v1 padded": (V1, {"img_size": (84, 100)}),
    "v1 always partitioned": (V1, {"img_size": 60, "always_partition": True, "strict_img_size": False}),
    "v2": (V2, {"img_size": 128}),
    "v2 padded": (V2, {"img_size": (88, 100), "strict_img_size": False}),
    "torchvision v1": ("torchvision", {"image_size": (112, 112)}),
    "torchvision v1 padded": ("torchvision", {"image_size": (84, 100)}),
    "torchvision v2 padded": ("torchvision v2", {"image_size": (100, 112)}),
}


def small_swin(host: str = "v1", **arguments: Any) -> Any:
    """Two stages of two narrow blocks each, the second shifted; real windows; random weights, none of them zero."""
    name, size = HOSTS[host]
    torch.manual_seed(0)
    model: Any
    defaults = {"embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4), "num_classes": 7}
    if name.startswith("torchvision"):
        is_v2 = name.endswith("v2")
        parts = {"block": swin_transformer.SwinTransformerBlockV2, "downsample_layer": swin_transformer.PatchMergingV2}
        made_of = {**defaults, "patch_size": [4, 4], "window_size": [7, 7], **(parts if is_v2 else {}), **arguments}
        model = swin_transformer.SwinTransformer(**made_of)
        model.image_size = size["image_size"]
    else:
        model = timm.create_model(name, **{**defaults, **size, **arguments})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def images(model: nn.Module, count: int = 2) -> Tensor:
    size = adapter_for(model).input_size(model)
    return torch.randn(count, *size, generator=torch.Generator().manual_seed(0))


def scored(model: nn.Module, **options: Any) -> pmvit.Scores:
    return pmvit.score(model, [(images(model), torch.tensor([1, 2]))], progress=False, **options)


def compressed(host: str = "v1", learn: Any = "group", depths: Any = (2, 2), **options: Any) -> tuple[Any, Any]:
    model = small_swin(host, depths=depths, num_heads=(2, 4)[: len(depths)])
    made = pmvit.plan(pmvit.score(model, [], scorer="random"), **{"keep": 0.6, "prune": 0.1, **options})
    return model, pmvit.compress(model, made, learn=learn)


def grids_of(model: nn.Module) -> tuple[tuple[int, int], ...]:
    return tuple(layout.grid for layout in adapter_for(model).layouts(model))


def difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def test_windows_are_those_of_the_host() -> None:
    windows = Windows((2, 2), (1, 1))
    assert windows.slots((4, 4))[0].tolist() == [5, 6, 9, 10]
    assert windows.slots((4, 4))[3].tolist() == [15, 12, 3, 0]
    assert len(windows.regions((4, 4))[3].unique()) == 4
    assert windows.regions((4, 4))[0].unique().numel() == 1
    rolled_then_padded, padded_then_rolled = Windows((2, 2), (1, 1)), Windows((2, 2), (1, 1), pad_first=True)
    assert rolled_then_padded.slots((3, 3)).tolist() == [[4, 5, 7, 8], [3, -1, 6, -1], [1, 2, -1, -1], [0, -1, -1, -1]]
    assert padded_then_rolled.slots((3, 3)).tolist() == [[4, 5, 7, 8], [-1, 3, -1, 6], [-1, -1, 1, 2], [-1, -1, -1, 0]]
    for each in (windows, rolled_then_padded, padded_then_rolled):
        slots = each.slots((3, 3))
        assert torch.equal(each.to_grid(slots, (3, 3)), torch.arange(9)[None])
    budget = Budget.of(rolled_then_padded, (3, 3))
    assert budget.kept(3).tolist() == [3, 2, 2, 1]
    assert [budget.places(budget.kept(count)) for count in (2, 3, 4)] == [2, 3, 4]
    assert budget.places(torch.tensor([4, 2, 0, 1])) is None


@pytest.mark.parametrize("host", HOSTS)
def test_all_kept_is_the_original(host: str) -> None:
    """With every operation in place: tokens go through all windows in an order of their own."""
    model = small_swin(host)
    grids = grids_of(model)
    same = pmvit.compress(model, Plan.keep_all(grids[0], 4, grids=grids))
    moved = pmvit.compress(model, in_place_plan(grids[0], 4, grids))
    assert sum(isinstance(module, WindowBlock) for module in moved.modules()) == 4
    everything = pmvit.compress(model, pmvit.plan(pmvit.score(model, [], scorer="random"), keep=1.0, prune=0.0))
    with torch.inference_mode():
        expected = model(images(model))
        assert torch.equal(same(images(model)), expected)
        assert torch.equal(everything(images(model)), expected)
        assert difference(moved(images(model)), expected) < 1e-5


@pytest.mark.parametrize("host", ["v1", "v2"])
def test_what_is_not_narrowed_would_show(host: str) -> None:
    """The test above can fail: with the bias, the mask or the windows of other places, logits differ."""
    model = small_swin(host)
    moved: Any = pmvit.compress(model, _moved_plan(model))
    blocks = [module for module in moved.modules() if isinstance(module, WindowBlock)]
    with torch.inference_mode():
        expected = model(images(model))
        assert difference(moved(images(model)), expected) < 1e-5
        for name in ("bias_index", "extra_bias", "sources"):
            original = [getattr(block, name) for block in blocks]
            for block in blocks:
                if getattr(block, name) is not None:
                    setattr(block, name, getattr(block, name).roll(1, 1 if name == "bias_index" else 0))
            assert difference(moved(images(model)), expected) > 1e-3, name
            for block, value in zip(blocks, original, strict=True):
                setattr(block, name, value)


def _moved_plan(model: nn.Module) -> Plan:
    grids = grids_of(model)
    return in_place_plan(grids[0], len(grids), grids)


@pytest.mark.parametrize("host", HOSTS)
def test_the_order_of_the_groups_does_not_matter(host: str) -> None:
    model, small = compressed(host)
    plan = small.compression.plan
    layers = {}
    for index, layer in plan.layers.items():
        order = torch.randperm(layer.num_kept, generator=torch.Generator().manual_seed(index))
        number = torch.argsort(order)
        groups = [PRUNED if group == PRUNED else int(number[group]) for group in layer.groups]
        layers[index] = LayerPlan(tuple(groups), tuple(layer.centres[i] for i in order), layer.weights)
    other = pmvit.compress(model, replace(plan, layers=layers))
    with torch.inference_mode():
        assert difference(other(images(model)), small(images(model))) < 1e-5
        assert difference(small(images(model)), model(images(model))) > 1e-3


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    "options", [{}, {"grouping": "row"}, {"grouping": "segment", "scope": "local"}, {"keep": 0.02}]
)
def test_groups_stay_in_their_region_and_windows_keep_as_many(host: str, options: dict[str, Any]) -> None:
    model = small_swin(host)
    plan = pmvit.plan(pmvit.score(model, [], scorer="random"), **{"keep": 0.6, "prune": 0.1, **options})
    for layout, layer in zip(adapter_for(model).layouts(model), plan.layers.values(), strict=True):
        windows = layout.windows
        assert windows is not None
        regions = windows.regions(layout.grid).flatten()[windows.places(layout.grid)]
        for members in layer.members():
            assert len(regions[members].unique()) == 1
        slots = windows.slots(layout.grid)
        kept = torch.isin(slots, torch.tensor(layer.centres)).sum(1)
        is_whole = (slots != PADDING).all(1)
        assert len(kept[is_whole].unique()) <= 1
        assert Budget.of(windows, layout.grid).places(kept) is not None
    assert pmvit.compress(model, plan)(images(model)).isfinite().all()


@pytest.mark.parametrize("host", ["v1", "v1 padded", "v2", "v2 padded"])
def test_values_give_equation_9(host: str) -> None:
    """Against `A * dL/dA` of the host's own attention maps, put back on the grid by the host's own functions."""
    model = small_swin(host)
    batch, labels = images(model), torch.tensor([1, 2])
    maps: list[Tensor] = []

    def keep(_module: nn.Module, _arguments: Any, output: Tensor) -> None:
        output.retain_grad()
        maps.append(output)

    blocks = [block for stage in model.layers for block in stage.blocks]
    hooks = [block.attn.softmax.register_forward_hook(keep) for block in blocks]
    for block in blocks:
        block.attn.fused_attn = False
    torch.nn.functional.cross_entropy(model(batch), labels, reduction="sum").backward()
    for hook in hooks:
        hook.remove()
    scores = scored(model)
    for index, (block, attention) in enumerate(zip(blocks, maps, strict=True)):
        assert attention.grad is not None
        signed = (attention * attention.grad).sum(2).mean(1)
        height, width = scores.grids[index]
        rows, columns = (-(-side // size) * size for side, size in zip((height, width), block.window_size, strict=True))
        windows = signed.view(-1, *block.window_size, 1)
        extent = (rows, columns) if host.startswith("v1") else ((rows, columns),)
        reverse = window_reverse if host.startswith("v1") else timm.models.swin_transformer_v2.window_reverse
        grid = reverse(windows, block.window_size, *extent)[:, :height, :width, 0]
        grid = grid.roll(block.shift_size, (1, 2)).flatten(1)
        assert torch.allclose(scores.of(index).float(), grid.abs().mean(0), rtol=1e-3, atol=1e-7), index


@pytest.mark.parametrize("scorer", ["attn", "grad"])
def test_other_scorers_reach_every_token(scorer: Any) -> None:
    scores = scored(small_swin(), scorer=scorer)
    assert scores.values.shape == (4, 28 * 28)
    for layer in range(4):
        assert (scores.of(layer) > 0).all()
        assert not scores.values[layer, scores.num_patches(layer) :].any()


def test_swin_tiny_at_keep_seven_tenths_costs_what_the_paper_says() -> None:
    model = timm.create_model(V1).eval()
    for scores in (pmvit.score(model, [], scorer="random"), scored(model)):
        plan = pmvit.plan(scores, keep=0.7, prune=0.1)
        cost = pmvit.flops(pmvit.compress(model, plan))
        assert round(pmvit.flops(model).gflops, 1) == 4.5
        assert round(cost.gflops, 1) == 3.1
        assert 0.68 < plan.keep <= 0.7
        assert len({layer.num_kept / layer.num_tokens for layer in plan.layers.values()}) > 1  # pooled over layers


@pytest.mark.parametrize("host", HOSTS)
def test_predicted_cost_is_what_is_counted(host: str) -> None:
    model = small_swin(host)
    scores = pmvit.score(model, [], scorer="random")
    for budget in ({"keep": 0.5}, {"flops_share": 0.7}):
        plan = pmvit.plan(scores, **budget)
        counted = pmvit.flops(pmvit.compress(model, plan)).macs
        assert counted == pytest.approx(predicted_macs(scores, plan), rel=1e-9)
    assert counted <= 0.7 * pmvit.flops(model).macs


@pytest.mark.parametrize("host", ["v1 padded", "v2"])
def test_the_attention_bias_counts_members_and_padding(host: str) -> None:
    """Without position bias, merging tokens that are all alike changes nothing if attention counts them."""
    model = small_swin(host)
    for block in (block for stage in model.layers for block in stage.blocks):
        for table in (getattr(block.attn, "relative_position_bias_table", None), *_cpb(block)):
            if table is not None:
                nn.init.zeros_(table)
    patch = torch.randn(1, 3, 4, 4)
    _, height, width = adapter_for(model).input_size(model)
    batch = patch.tile(1, 1, height // 4, width // 4)
    scores = pmvit.score(model, [], scorer="random")
    with torch.inference_mode():
        expected = model(batch)
        for bias in (True, False):
            plan = pmvit.plan(scores, keep=0.6, prune=0.0, weights="average", attention_bias=bias)
            one_stage = replace(plan, layers={0: plan.layers[0]})  # later, tokens beside padding are no longer alike
            error = difference(pmvit.compress(model, one_stage)(batch), expected)
            assert (error < 1e-5) == (bias or "padded" not in host), error


def _cpb(block: Any) -> list[Tensor]:
    return [block.attn.cpb_mlp[2].weight] if hasattr(block.attn, "cpb_mlp") else []


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
    assert loaded.compression.plan == small.compression.plan
    assert Plan.from_json(small.compression.plan.to_json()) == small.compression.plan
    scores = scored(model)
    scores.save(tmp_path / "scores.json")
    again = pmvit.Scores.load(tmp_path / "scores.json")
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
            attention = module.block.host.attn
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
    plan = small.compression.plan
    text = str(plan)
    assert "28 x 28, 14 x 14 patch tokens" in text
    lines = plan.draw().splitlines()
    assert sum("block" in line for line in lines) == 2
    assert len(lines) == (1 + 28) + 1 + (1 + 14) + 1 + 1
    picture = plan_picture(torch.rand(3, 112, 112), plan)
    assert picture.width > 200
    odd = compressed("v1 padded")[1].compression.plan
    assert plan_picture(torch.rand(3, 84, 100), odd).width > 200


def test_plans_for_other_windows_are_refused() -> None:
    model, small = compressed()
    plan = small.compression.plan
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
    with pytest.raises(pmvit.PmvitError, match="expected a timm VisionTransformer with plain blocks for ToMe; got a"):
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
                made = contender(name, small, cast("Any", target))
                assert made(images(model)).isfinite().all(), (name, target)
        assert difference(with_operations_in_place(small)(images(model)), model(images(model))) < 1e-5


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
