"""Deployment passes: each exact, alone and together, on every kind of model they meet."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmvit
from pmvit.config import InferenceConfig
from pmvit.hosts.parts import Gelu
from pmvit.prune_merge import PruneMerge
from pmvit.runtime.blocks import packed
from pmvit.runtime.blocks.eager import FlatBlock
from pmvit.runtime.blocks.graph import FewQueries, PartialBlock, SplitAttention
from pmvit.runtime.chain import BlockMaps, chain, factor, identity, identity_maps, maps_of
from pmvit.runtime.optimize import optimize_for_inference
from pmvit.runtime.transitions import FORMS, Gather, Matmul, Segment, Stage, TokenBuffer, form_of
from tests.helpers import small_plan, small_vit

from timm.models.vision_transformer import LayerScale  # isort: skip  # after pmvit, which lets torchvision import

HOSTS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "vit_small_patch14_reg4_dinov2": {"patch_size": 16},
    "vit_base_patch16_siglip_224": {},
    "beit_base_patch16_224": {},
    "eva02_tiny_patch14_224": {"patch_size": 16},
    "vit_relpos_small_patch16_224": {},
}
PASSES: dict[str, dict[str, Any]] = {
    "all": {},
    "graph": {"target": "graph"},
    "onnx": {"target": "onnx"},
    "matmul": {"form": "matmul"},
    "gather": {"form": "gather"},
    "last-block shortcut alone": {"drop_dead": False, "fuse": False},
    "dead-token removal alone": {"shortcut": False, "fuse": False},
    "fused transition alone": {"shortcut": False, "drop_dead": False},
    "rewritten blocks alone": {"shortcut": False, "drop_dead": False, "fuse": False},
    "none": {"rewrite": False, "shortcut": False, "drop_dead": False, "fuse": False},
}


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 96, 96, generator=torch.Generator().manual_seed(0))


def check(model: nn.Module, **options: Any) -> nn.Module:
    """Optimise, compare logits on two batch sizes, return the optimised model."""
    fast = optimize_for_inference(model, **options)
    with torch.inference_mode():
        for count in (2, 3, 2):
            assert torch.allclose(fast(images(count)), model(images(count)), rtol=0, atol=1e-4)
    return fast


@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("reconstruct", ["residual", "pinv"])
@pytest.mark.parametrize("learn", ["group", "dense"])
def test_each_pass_is_exact(passes: dict[str, Any], reconstruct: str, learn: Any) -> None:
    model = small_vit(depth=5)
    small = pmvit.compress(model, small_plan(model, reconstruct=reconstruct), learn=learn)
    check(small, **passes)
    with torch.no_grad():  # as after fine-tuning: nothing about the weights can be taken for granted
        for module in small.modules():
            if isinstance(module, PruneMerge):
                module.merge_weights.add_(0.1 * torch.randn_like(module.merge_weights))
                module.reconstruct_weights.add_(0.1 * torch.randn_like(module.reconstruct_weights))
    check(small, **passes)


def test_each_pass_does_something_alone() -> None:
    model = small_vit(depth=5)
    small = pmvit.compress(model, small_plan(model, keep=0.3))

    def counts(**options: Any) -> tuple[list[int], list[list[int]]]:
        fast: Any = optimize_for_inference(small, **options)
        rows = [[h.num_tokens + h.num_carried for h in stage.transition] for stage in fast.blocks]
        return [stage.block.num_outputs for stage in fast.blocks], rows

    outputs, rows = counts(**PASSES["rewritten blocks alone"])
    shortcut, same_rows = counts(**PASSES["last-block shortcut alone"])
    assert (shortcut[:-1], same_rows) == (outputs[:-1], rows)
    assert shortcut[-1] == 1 < outputs[-1]
    living, fewer_rows = counts(**PASSES["dead-token removal alone"])
    assert living[-1] == outputs[-1]
    assert sum(map(sum, fewer_rows)) < sum(map(sum, rows))
    fused = counts(**PASSES["fused transition alone"])
    assert fused[0] == outputs
    assert [len(row) for row in rows[1:]] == [2] * 4
    assert [len(row) for row in fused[1]] == [1] * 5


@pytest.mark.parametrize("host", HOSTS)
def test_every_host(host: str) -> None:
    model = small_vit(host, **HOSTS[host])
    check(model)
    for target in ("eager", "graph", "onnx"):
        check(pmvit.compress(model, small_plan(model)), target=target)


def test_each_hand_over_has_the_form_that_costs_least() -> None:
    eager, graph = InferenceConfig(target="eager"), InferenceConfig(target="graph")
    permutation = torch.eye(60)[torch.randperm(60)].to_sparse()
    assert form_of(permutation, eager) is Segment
    assert form_of(permutation, graph) is Gather
    for config in (eager, graph):
        assert form_of(torch.rand(60, 60).to_sparse(), config) is Matmul
    model: Any = small_vit()
    small: Any = pmvit.compress(model, small_plan(model), learn="dense")
    nn.init.normal_(small.blocks[-1].merge_weights)
    fast: Any = optimize_for_inference(small)
    assert isinstance(fast.blocks[-1].transition[0], Matmul)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_product(form: Any) -> None:
    """Rows of every size: none, copies, one entry with a weight, up to all; with and without anything carried."""
    torch.manual_seed(0)
    matrix = torch.rand(24, 18) * (torch.rand(24, 18) < torch.linspace(0, 1, 24)[:, None])
    matrix[1:6] = torch.eye(18)[torch.tensor([3, 3, 17, 0, 9])]
    matrix[6] = 0.5 * torch.eye(18)[4]
    assert not matrix[0].any()
    rows = torch.randn(3, 18, 5)
    for num_outputs, num_tokens in ((18, 24), (11, 20), (1, 1)):
        transition = FORMS[form](matrix.double().to_sparse(), num_outputs, num_tokens)
        carried = rows[:, num_outputs:] if num_outputs < 18 else None
        result = transition(TokenBuffer(rows[:, :num_outputs], carried))
        assert result.tokens.shape[1] == num_tokens
        assert (result.carried is None) == (num_tokens == 24)
        assert torch.allclose(result.rows(), matrix @ rows, atol=1e-6)


def test_another_image_size_is_refused() -> None:
    model = small_vit(dynamic_img_size=True)
    fast = optimize_for_inference(pmvit.compress(model, small_plan(model)))
    for size in (80, 112):
        with pytest.raises(ValueError, match="a model that is optimised for inference is for one image size"):
            fast(torch.randn(1, 3, size, size))


def test_masks_are_refused() -> None:
    fast: Any = optimize_for_inference(pmvit.compress(small_vit(), small_plan(small_vit())))
    with pytest.raises(pmvit.PmvitError, match="images alone"):
        fast(images(), attn_mask=torch.zeros(37, 37))


@pytest.mark.parametrize("pool", ["token", "avg", "map"])
def test_what_the_head_reads_is_there(pool: str) -> None:
    model = small_vit(global_pool=pool)
    small = pmvit.compress(model, small_plan(model))
    fast: Any = check(small)
    with torch.inference_mode():
        assert fast.forward_features(images()).shape[1] == (1 if pool == "token" else 37)


def test_all_tokens_stay_where_they_are_read() -> None:
    small: Any = pmvit.compress(small_vit(), small_plan(small_vit()))
    fast: Any = optimize_for_inference(small, tokens="all")
    with torch.inference_mode():
        assert torch.allclose(fast.forward_features(images()), small.forward_features(images()), rtol=0, atol=1e-4)


def test_only_what_is_read_is_computed() -> None:
    small: Any = pmvit.compress(small_vit(depth=6), small_plan(small_vit(depth=6), keep=0.3))
    fast: Any = optimize_for_inference(small)
    counts = [stage.block.num_outputs for stage in fast.blocks]
    assert counts[-1] == 1
    assert all(count <= wrapper.centres.numel() for count, wrapper in zip(counts, small.blocks, strict=True))
    all_read = optimize_for_inference(small, tokens="all")
    assert pmvit.flops(fast).macs < min(pmvit.flops(all_read).macs, pmvit.flops(small).macs)
    assert all(len(stage.transition) == 1 for stage in fast.blocks)


def test_an_uncompressed_model_profits_too() -> None:
    model: Any = small_vit()
    fast: Any = check(model)
    assert [len(stage.transition) for stage in fast.blocks] == [0, 0, 0]
    assert isinstance(fast.blocks[2].block, PartialBlock)
    assert pmvit.flops(fast).macs < pmvit.flops(model).macs


def test_groups_and_remainder_are_no_more_than_the_tokens() -> None:
    """Groups and remainder are another basis of the tokens as long as M and R fit together."""
    model: Any = small_vit()
    for reconstruct in ("residual", "pinv"):
        small: Any = pmvit.compress(model, small_plan(model, reconstruct=reconstruct))
        for wrapper in small.blocks:
            assert maps_of(wrapper).enter.shape[0] <= 37
    tokens = torch.randn(37, 4, dtype=torch.float64)
    wrapper = pmvit.compress(model, small_plan(model)).blocks[1]
    maps = maps_of(wrapper)
    rows = maps.enter @ tokens
    update = torch.randn_like(rows[: maps.num_groups])
    expected = tokens + torch.block_diag(torch.eye(1), wrapper.reconstruct_matrix().detach()).double() @ update
    rows[: maps.num_groups] += update
    assert torch.allclose(maps.leave @ rows, expected, atol=1e-5)


def test_factor_keeps_the_product() -> None:
    merge = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.7, 0.0]], dtype=torch.float64)
    back = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.3], [0.0, 0.0]], dtype=torch.float64)
    kept = torch.eye(4, dtype=torch.float64) - back @ merge
    expand, remainder = factor(kept.to_sparse(), merge.to_sparse())
    assert torch.allclose(expand.to_dense() @ remainder.to_dense(), kept)
    assert len(remainder) == 3  # one for the pair, one for the scaled token, one for the pruned token


@pytest.mark.parametrize("reconstruct", ["residual", "pinv"])
def test_maps_of_full_matrices_keep_what_tokens_keep(reconstruct: str) -> None:
    model: Any = small_vit()
    small: Any = pmvit.compress(model, small_plan(model, reconstruct=reconstruct), learn="dense")
    wrapper = small.blocks[1]
    nn.init.normal_(wrapper.merge_weights, std=0.1)
    nn.init.normal_(wrapper.reconstruct_weights, std=0.1)
    maps = maps_of(wrapper)
    enter, leave = maps.enter.to_dense().float(), maps.leave.to_dense().float()
    kept = torch.eye(37) - leave[:, : maps.num_groups] @ enter[: maps.num_groups]
    if reconstruct == "pinv":
        kept = torch.diag(1 - wrapper.token_mask)
    assert torch.allclose(leave[:, maps.num_groups :] @ enter[maps.num_groups :], kept, atol=1e-5)
    assert len(enter) - maps.num_groups <= 37


def test_a_token_that_is_never_read_again_is_dropped() -> None:
    all_kept = identity_maps(4)._replace(skips_outputs=True)
    without_3 = BlockMaps(identity(4), identity(4), 3, skips_outputs=True)  # token 3 is carried past
    blocks, _ = chain([all_kept, without_3, without_3], 1, InferenceConfig())
    assert [block.num_outputs for block in blocks] == [3, 3, 1]  # token 3 only lends its key to the first block
    assert [len(block.transition[0]) for block in blocks] == [4, 3, 3]


@pytest.mark.parametrize(("count", "num_outputs"), [(99, 100), (97, 97)])
def test_all_are_computed_where_nearly_all_are_read(count: int, num_outputs: int) -> None:
    some = torch.arange(count)
    first = identity_maps(100)._replace(skips_outputs=True)
    last = BlockMaps(identity(100).index_select(0, some), identity(100).index_select(1, some), count, True)
    blocks, _ = chain([first, last], 1, InferenceConfig())
    assert [(len(block.order), block.num_outputs) for block in blocks] == [(100, num_outputs), (count, 1)]
    assert blocks[1].transition[0].to_dense().equal(torch.eye(num_outputs, dtype=torch.float64)[:count])


def test_an_optimised_model_is_not_taken_for_another() -> None:
    model = small_vit()
    small = pmvit.compress(model, small_plan(model))
    fast = pmvit.optimize_for_inference(small)
    assert any(isinstance(module, Stage) for module in fast.modules())
    for wrong in (
        lambda: pmvit.optimize_for_inference(fast),
        lambda: pmvit.save(fast, "nowhere"),
        lambda: pmvit.compress(fast, small_plan(model)),
        lambda: pmvit.export(fast, "nowhere.onnx"),
        lambda: pmvit.finetune(fast, train=[(images(), torch.zeros(2, dtype=torch.long))]),
        lambda: pmvit.measure(fast, [(images(), torch.zeros(2, dtype=torch.long))], method="scored"),
    ):
        with pytest.raises(pmvit.PmvitError, match="is optimised for inference"):
            wrong()
    with pytest.raises(pmvit.PmvitError, match="form: expected one of segment, gather, matmul, auto; got 'magic'"):
        pmvit.optimize_for_inference(small, form="magic")  # type: ignore[arg-type]  # the mistake


def test_packed_weights_follow_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "is_faster", lambda *_: True)
    small = pmvit.compress(small_vit(), small_plan(small_vit()))
    fast: Any = check(small)
    block = next(module for module in fast.modules() if isinstance(module, FlatBlock))
    if not packed.can_pack(block.output_weight):
        pytest.skip("this PyTorch has no oneDNN")
    assert block.qkv_weight.is_mkldnn
    rows = torch.linspace(-4, 4, 48).expand(3, -1).contiguous()
    gelus: tuple[Gelu | None, ...] = (None, "none", "tanh")
    for gelu in gelus:
        hidden = block.linear(rows, block.expand_weight, block.expand_bias, gelu)
        plain = packed.linear(rows, block.expand_weight.to_dense(), block.expand_bias, gelu)
        assert torch.allclose(hidden, plain, rtol=0, atol=1e-5)
    assert "qkv_weight" not in dict(block.named_parameters())  # held once
    with torch.inference_mode():
        expected = small(images())
        twin = copy.deepcopy(fast)
        assert torch.allclose(twin(images()), expected, rtol=0, atol=1e-4)
        twin.double()
        assert torch.allclose(twin(images().double()), small.double()(images().double()), rtol=0, atol=1e-6)
        assert torch.allclose(fast(images()), expected, rtol=0, atol=1e-4)
    monkeypatch.setattr(packed, "is_faster", lambda *_: False)
    as_they_are: Any = optimize_for_inference(small.float())
    assert not any(
        value.is_mkldnn
        for module in as_they_are.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor)
    )
    assert pmvit.flops(fast).macs == pmvit.flops(as_they_are).macs


def test_packing_is_tried_out_once_for_all_blocks_of_a_shape() -> None:
    shapes = ((144, 48), (192, 48), (48, 192))
    packed.is_faster.cache_clear()
    state = torch.random.get_rng_state()
    found = packed.is_faster(shapes, 1)
    assert packed.is_faster(shapes, 1) is found
    assert packed.is_faster.cache_info().hits == 1
    assert torch.equal(torch.random.get_rng_state(), state)


def test_each_block_has_the_attention_that_suits_it() -> None:
    small = pmvit.compress(small_vit(), small_plan(small_vit()))

    def inside(model: Any) -> list[type]:
        return [type(getattr(stage.block, "attention", stage.block)) for stage in model.blocks]

    assert inside(check(small, drop_dead=False)) == [FlatBlock, FlatBlock, FewQueries]
    assert inside(check(small, target="onnx")) == [SplitAttention, SplitAttention, FewQueries]
    normed = small_vit(qk_norm=True)  # keys that are normalised have to be computed
    assert inside(check(pmvit.compress(normed, small_plan(normed)))) == [SplitAttention] * 3
    distilled = small_vit("deit_tiny_distilled_patch16_224", num_heads=24)  # too many rows to ask with
    assert inside(check(pmvit.compress(distilled, small_plan(distilled))))[-1] is SplitAttention


def test_layer_scales_are_folded() -> None:
    model = small_vit(init_values=0.3)
    for target in ("eager", "graph"):
        fast = check(pmvit.compress(model, small_plan(model)), target=target)
        assert not any(isinstance(module, LayerScale) for module in fast.modules())
