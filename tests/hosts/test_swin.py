"""Swin: windows, shifts, masks, padding, several grids; scores, plans and costs, each on v1 and v2."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmvit
from pmvit.config import PlanOptions
from pmvit.hosts import host_of
from pmvit.hosts.swin.blocks import WindowBlock
from pmvit.planning import LayerPlan, Plan
from pmvit.planning.budget import predicted_macs
from pmvit.prune_merge import PRUNED
from pmvit.runtime.bench.variants import in_place_plan
from pmvit.windows import PADDING, Budget, Windows
from tests.swins import HOSTS, V1, compressed, difference, grids_of, images, scored, small_swin

import timm  # isort: skip  # after pmvit, which lets torchvision import
from timm.models.swin_transformer import window_reverse


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
    everything = pmvit.compress(
        model, pmvit.plan(pmvit.measure(model, [], method="scored", scorer="random"), keep=1.0, prune=0.0)
    )
    with torch.inference_mode():
        expected = model(images(model))
        assert torch.equal(same(images(model)), expected)
        assert torch.equal(everything(images(model)), expected)
        assert difference(moved(images(model)), expected) < 1e-5


@pytest.mark.parametrize("host", ["v1", "v2"])
def test_what_is_not_at_the_centres_would_show(host: str) -> None:
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
    plan = small.compression.what
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
    plan = pmvit.plan(
        pmvit.measure(model, [], method="scored", scorer="random"), **{"keep": 0.6, "prune": 0.1, **options}
    )
    for layout, layer in zip(host_of(model).layouts(), plan.layers.values(), strict=True):
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
    for scores in (pmvit.measure(model, [], method="scored", scorer="random"), scored(model)):
        plan = pmvit.plan(scores, keep=0.7, prune=0.1)
        cost = pmvit.flops(pmvit.compress(model, plan))
        assert round(pmvit.flops(model).gflops, 1) == 4.5
        assert round(cost.gflops, 1) == 3.1
        assert 0.68 < plan.keep <= 0.7
        assert len({layer.num_kept / layer.num_tokens for layer in plan.layers.values()}) > 1  # pooled over layers


@pytest.mark.parametrize("host", HOSTS)
def test_predicted_cost_is_what_is_counted(host: str) -> None:
    model = small_swin(host)
    scores = pmvit.measure(model, [], method="scored", scorer="random")
    budgets: list[PlanOptions] = [{"keep": 0.5}, {"flops_share": 0.7}]
    for budget in budgets:
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
    _, height, width = host_of(model).input_size()
    batch = patch.tile(1, 1, height // 4, width // 4)
    scores = pmvit.measure(model, [], method="scored", scorer="random")
    with torch.inference_mode():
        expected = model(batch)
        for bias in (True, False):
            plan = pmvit.plan(scores, keep=0.6, prune=0.0, weights="average", attention_bias=bias)
            one_stage = replace(plan, layers={0: plan.layers[0]})  # later, tokens beside padding are no longer alike
            error = difference(pmvit.compress(model, one_stage)(batch), expected)
            assert (error < 1e-5) == (bias or "padded" not in host), error


def _cpb(block: Any) -> list[Tensor]:
    return [block.attn.cpb_mlp[2].weight] if hasattr(block.attn, "cpb_mlp") else []
