"""Deployment of blocks whose MLP runs on groups of its own: exact in every form, on as many tokens as planned."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmvit
from pmvit.config import InferenceConfig
from pmvit.hosts import host_of
from pmvit.hosts.outputs import predict
from pmvit.merged_mlp import MergedNorm
from pmvit.planning import Plan
from pmvit.runtime.bench.variants import variant
from pmvit.runtime.blocks.eager import FlatBlock
from pmvit.runtime.blocks.graph import FewQueries, PartialBlock
from pmvit.runtime.blocks.halves import AttentionHalf, MlpHalf
from pmvit.runtime.chain import BlockMaps, chain, halves_of, identity_maps, maps_of
from pmvit.runtime.export.targets import runtime_called
from pmvit.runtime.optimize import optimize_for_inference
from tests.helpers import small_vit
from tests.runtime.split_plans import COUNTS, perturb, split_plan
from tests.runtime.test_optimize import HOSTS, PASSES, check, images


def compressed(model: nn.Module, plan: Plan, learn: Any = "group") -> Any:
    """With M and R of other weights than planned, so that nothing can rely on means."""
    small = pmvit.compress(model, plan, learn=learn).requires_grad_(False)
    perturb(small)
    return small


@pytest.fixture(scope="module")
def vit() -> Any:
    return small_vit(depth=5)


@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "apart"])
@pytest.mark.parametrize("learn", ["group", "dense"])
def test_each_pass_is_exact(vit: Any, passes: dict[str, Any], nested: bool, learn: Any) -> None:
    plan = split_plan(nested=nested)
    for small in (pmvit.compress(vit, plan, learn=learn), compressed(vit, plan, learn)):
        fast: Any = check(small, **passes)
        with torch.inference_mode():
            assert not torch.allclose(fast(images()), vit(images()), rtol=0, atol=1e-2)
        whole: Any = optimize_for_inference(small, **{**passes, "tokens": "all"})
        with torch.inference_mode():
            assert torch.allclose(whole.forward_features(images()), small.forward_features(images()), atol=1e-4)


@pytest.mark.parametrize("pool", ["token", "avg", "map"])
@pytest.mark.parametrize("target", ["eager", "graph"])
def test_every_head(pool: str, target: str) -> None:
    check(compressed(small_vit(depth=5, global_pool=pool), split_plan()), target=target)


@pytest.mark.parametrize("host", HOSTS)
def test_every_host(host: str) -> None:
    """Those that are rewritten, and those that keep their own modules."""
    small = compressed(small_vit(host, depth=5, **HOSTS[host]), split_plan())
    for target in ("eager", "graph", "onnx"):
        check(small, target=target)


def test_unusual_parts_and_a_bias_on_attention() -> None:
    for options in ({"qk_norm": True}, {"init_values": 0.3}, {"act_layer": nn.ReLU}):
        for target in ("eager", "graph"):
            check(compressed(small_vit(depth=5, **options), split_plan()), target=target)
    for target in ("eager", "graph", "onnx"):
        check(compressed(small_vit(depth=5), split_plan(attention_bias=True)), target=target)


def seen(model: Any) -> list[tuple[int, int, int | None]]:
    """Of each stage: tokens of attention, those it computes, and tokens of an MLP of its own."""
    mlps = [stage.mlp.num_tokens if stage.mlp is not None else None for stage in model.blocks]
    return [(s.block.num_tokens, s.block.num_outputs, mlp) for s, mlp in zip(model.blocks, mlps, strict=True)]


def test_halves_run_on_as_many_tokens_as_planned(vit: Any) -> None:
    small = pmvit.compress(vit, split_plan())
    whole: Any = optimize_for_inference(small, shortcut=False, drop_dead=False)
    planned = [(1 + a, 1 + a, 1 + m if m < a else None) for a, m in COUNTS]
    assert seen(whole) == planned
    fast: Any = optimize_for_inference(small)
    assert seen(fast)[:-1] == planned[:-1]
    assert seen(fast)[-1] == (10, 1, 1)  # the head reads the class token alone
    kinds = [(type(stage.block), type(stage.mlp)) for stage in fast.blocks]
    none = type(None)
    halves = (FlatBlock, FlatBlock)
    assert kinds == [halves, (FlatBlock, none), halves, halves, (PartialBlock, FlatBlock)]
    assert [(stage.block.attends, stage.block.has_mlp) for stage in fast.blocks[:2]] == [(True, False), (True, True)]
    assert (fast.blocks[0].mlp.attends, fast.blocks[0].mlp.has_mlp) == (False, True)
    assert isinstance(fast.blocks[-1].block.attention, FewQueries)
    graph: Any = optimize_for_inference(small, target="graph")
    assert {type(stage.mlp) for stage in graph.blocks} == {PartialBlock, none}
    assert {stage.mlp.attention for stage in graph.blocks if stage.mlp is not None} == {None}
    assert pmvit.flops(fast).macs < pmvit.flops(whole).macs < pmvit.flops(small).macs


def test_the_shortcut_alone_reaches_attention_through_the_mlp(vit: Any) -> None:
    small = pmvit.compress(vit, split_plan())
    fast: Any = optimize_for_inference(small, **PASSES["last-block shortcut alone"])
    assert seen(fast)[-1] == (10, 1, 1)
    assert seen(fast)[0] == (37, 37, 34)


def test_nested_means_are_handed_over_once(vit: Any) -> None:
    """Groups that go on as they are need no transition, and nobody carries what nobody parts again."""
    counts = ((36, 30), (30, 20), (20, 12), (12, 12), (12, 5))
    fast: Any = check(pmvit.compress(vit, split_plan(counts=counts)))
    assert [len(stage.transition) for stage in fast.blocks] == [0] * 5
    between = [stage.halfway for stage in fast.blocks if stage.halfway is not None]
    assert [[transition.num_tokens for transition in each] for each in between] == [[31], [21], [13], []]
    assert all(transition.num_carried == 0 for each in between for transition in each)


def test_an_mlp_gets_no_token_that_it_need_not_compute() -> None:
    pairs = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]], dtype=torch.float64)
    differences = torch.tensor([[1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0]], dtype=torch.float64)
    leave = torch.cat([(pairs > 0).double().T, differences.T / 2], dim=1)
    mlp = BlockMaps(torch.cat([pairs, differences]).to_sparse(), leave.to_sparse(), 2)
    first_two = torch.eye(4, dtype=torch.float64)[:2]
    whole = identity_maps(4)._replace(skips_outputs=True)
    maps = [*halves_of(whole, mlp), BlockMaps(first_two.to_sparse(), first_two.T.to_sparse(), 2, skips_outputs=True)]
    assert [around.is_mlp for around in maps] == [False, True, False]
    (attention, once, last), _ = chain(maps, 1, InferenceConfig())
    assert (len(attention.order), attention.num_outputs) == (4, 2)
    assert (len(once.order), once.num_outputs) == (1, 1)  # the other pair is read by nobody
    # The pair, and what parts it again.
    assert once.transition[0].to_dense().tolist() == [[0.5, 0.5], [1.0, -1.0]]
    assert (len(last.order), last.num_outputs) == (2, 1)


@pytest.mark.parametrize("learn", ["group", "dense"])
def test_maps_of_halves_make_the_block(vit: Any, learn: Any) -> None:
    """With updates in place of attention and MLP, the chained maps leave the tokens that the two formulas leave."""
    wrapper = compressed(vit, split_plan(), learn).blocks[2]
    around, inside = maps_of(wrapper), maps_of(wrapper.block.norm2.matrices)
    attention, mlp = halves_of(around, inside)
    assert (attention.num_groups, mlp.num_groups) == (25, 21)
    tokens, first, second = (torch.randn(count, 3).double() for count in (37, 25, 21))
    merged = (around.enter @ tokens)[:25]
    done = merged + first + inside.leave.to_dense()[:, :21] @ second
    expected = tokens + around.leave.to_dense()[:, :25] @ (done - merged)
    rows = attention.enter @ tokens
    rows[:25] += first
    rows = mlp.enter @ (attention.leave @ rows)
    rows[:21] += second
    assert torch.allclose(mlp.leave @ rows, expected, rtol=0, atol=1e-4 if learn == "dense" else 1e-5)


@pytest.mark.parametrize("rewrite", [True, False])
def test_graphs_can_be_captured(vit: Any, rewrite: bool) -> None:
    small = compressed(vit, split_plan())
    graph = optimize_for_inference(small, target="graph", rewrite=rewrite)
    with torch.inference_mode():
        compiled: Callable[..., Tensor] = torch.compile(graph, fullgraph=True, backend="eager")
        assert torch.allclose(compiled(images()), small(images()), rtol=0, atol=1e-4)
    exported = torch.export.export(graph, (images(),)).module()
    assert torch.allclose(exported(images()), small(images()), rtol=0, atol=1e-4)
    assert not any("embedding_bag" in str(node.target) for node in exported.graph.nodes)


def exported_runs(model: nn.Module, to: str, folder: Path, shown: Tensor) -> Tensor:
    """What a runtime makes of images, with a model that is written as it is."""
    runtime = runtime_called(to)
    path = folder / f"model{runtime.suffix}"
    runtime.write(model, path, shown, any_batch=True)
    return runtime.open(path, 1)(shown)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_exports_give_the_same(vit: Any, to: str, tmp_path: Path) -> None:
    small = compressed(vit, split_plan())
    runtime = runtime_called(to)
    assert pmvit.export(small, tmp_path / f"m{runtime.suffix}", images=images(4)).max_error < 1e-4
    plain = variant("compressed", small, runtime.target)
    assert torch.allclose(exported_runs(plain, to, tmp_path, images()), small(images()), rtol=0, atol=1e-4)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_models_of_transformers(to: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 3, "intermediate_size": 96}
    config = transformers.ViTConfig(image_size=96, num_labels=7, initializer_range=0.2, **sizes)
    model = transformers.ViTForImageClassification(config).eval()
    small = compressed(model, split_plan())
    with torch.inference_mode():
        expected = predict(small, images())
        assert not torch.allclose(expected, predict(model, images()), atol=1e-2)
        for target in ("eager", "graph", "onnx"):
            assert torch.allclose(predict(optimize_for_inference(small, target=target), images()), expected, atol=1e-4)
    runtime = runtime_called(to)
    assert pmvit.export(small, tmp_path / f"m{runtime.suffix}", images=images(4)).max_error < 1e-4


def tokens_seen(model: Any) -> tuple[list[int], list[int]]:
    """How many tokens enter each attention and each MLP of a model with timm's own blocks, or halves like them."""
    attention: list[int] = []
    mlp: list[int] = []
    for name, module in model.named_modules():
        attends = name.endswith(".attn") or isinstance(module, AttentionHalf)
        for is_there, counts in ((attends, attention), (name.endswith((".fc1", ".expand")), mlp)):
            if is_there:
                module.register_forward_pre_hook(lambda _, given, counts=counts: counts.append(given[0].shape[1]))
    with torch.inference_mode():
        model(images(1))
    return attention, mlp


@pytest.mark.parametrize("name", ["compressed", "bound", "direct"])
def test_variants_run_each_half_on_its_tokens(vit: Any, name: str) -> None:
    small = pmvit.compress(vit, split_plan())
    attention, mlp = tokens_seen(variant(name, small, "eager"))
    assert attention == [1 + counts[0] for counts in COUNTS]
    assert mlp == [1 + counts[1] for counts in COUNTS]


def test_the_bound_costs_less_and_nothing_is_merged(vit: Any) -> None:
    small = pmvit.compress(vit, split_plan())
    bound = variant("bound", small, "eager")
    macs = {name: pmvit.flops(variant(name, small, "eager")).macs for name in ("compressed", "bound", "direct")}
    assert macs["bound"] == macs["direct"] < macs["compressed"]
    with torch.inference_mode():
        first = variant("direct", small, "eager").get_submodule("blocks.0")
        tokens = torch.randn(1, 37, 48)
        attended = tokens + vit.blocks[0].attn(vit.blocks[0].norm1(tokens))
        is_centre = torch.zeros(37, dtype=torch.bool)
        matrices = small.blocks[0].norm2.matrices
        is_centre[matrices.merge_columns[matrices.merge_offsets]] = True
        assert int(is_centre.sum()) == 34
        output = first(tokens)
        assert torch.allclose(output[:, ~is_centre], attended[:, ~is_centre], atol=1e-5)
        assert torch.allclose(output[:, is_centre], vit.blocks[0](tokens)[:, is_centre], atol=1e-5)
        assert bound(images()).shape == (2, 7)


def test_an_optimised_model_can_be_copied_and_cast(vit: Any) -> None:
    small = compressed(vit, split_plan())
    fast = copy.deepcopy(optimize_for_inference(small)).double()
    with torch.inference_mode():
        assert torch.allclose(fast(images().double()), small.double()(images().double()), rtol=0, atol=1e-5)


def test_full_matrices_around_an_mlp_are_left_alone_unless_only_the_head_reads(vit: Any) -> None:
    fast: Any = optimize_for_inference(compressed(vit, split_plan(), "dense"))
    assert [stage.mlp is not None for stage in fast.blocks] == [False, False, False, False, True]
    assert isinstance(fast.blocks[0].block.norm2, MergedNorm)  # its attention runs on all tokens


def test_what_the_model_gives_to_its_blocks_is_not_written_to(vit: Any) -> None:
    small = pmvit.compress(vit, split_plan())
    first: Any = optimize_for_inference(small).blocks[0]
    assert isinstance(first.block, FlatBlock)
    assert not first.block.has_mlp
    tokens = torch.randn(2, 37, 48)
    given = tokens.clone()
    with torch.inference_mode():
        first(tokens)
    assert torch.equal(tokens, given)


def test_the_halves_of_a_block_make_the_block(vit: Any) -> None:
    parts = host_of(vit).plain_parts(vit.blocks[1], {})
    tokens = torch.randn(2, 37, 48, generator=torch.Generator().manual_seed(31))
    assert parts is not None
    with torch.inference_mode():
        assert torch.equal(MlpHalf(parts)(AttentionHalf(parts)(tokens)), vit.blocks[1](tokens))
