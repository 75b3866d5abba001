"""Merge costs of merges: exact where they can be worked out, and plans made from them."""

import json
from dataclasses import asdict, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmvit
from pmvit.data.demo import demo_loader, demo_model
from pmvit.hosts import host_of
from pmvit.measuring import Merge, MergeCosts
from pmvit.measuring.cost_run import add_combinations
from pmvit.measuring.flops import BlockCost
from pmvit.measuring.listener import EffectRecorder
from pmvit.measuring.merging import BlockMerges, Clusters, mirrored, neighbours, order_merges
from pmvit.measuring.probe import probe
from pmvit.planning.budget import predicted_macs
from pmvit.planning.measured import merged_layer
from tests.helpers import small_vit
from tests.swins import small_swin


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(6, 3, 96, 96, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def merge_costs(images: Tensor) -> MergeCosts:
    return pmvit.measure(small_vit(), [images], method="measured", progress=False)


def squared_error(effects: Tensor, group: list[int]) -> float:
    """Half the squared error of a group, by its definition."""
    inside = effects[:, group][:, :, group]
    errors = inside.sum((1, 2)) / len(group) - inside.diagonal(dim1=1, dim2=2).sum(1)
    return float(errors.square().sum() / 2)


def ordered(*effects: Tensor, near: Tensor | None = None, early: float = 1.0, nested: bool = True) -> list[Merge]:
    """The merges of blocks with these effects, all of which cost the same a token."""
    near = torch.ones(effects[0].shape[1:], dtype=torch.bool) if near is None else near
    steps = [
        BlockMerges(number, "block", Clusters(each, near), BlockCost(1000, 0, 0, 1))
        for number, each in enumerate(effects)
    ]
    return list(order_merges(steps, 0, early=early, nested=nested))


@pytest.mark.parametrize("is_split", [False, True])
def test_an_effect_is_what_the_output_moves_by(is_split: bool) -> None:
    """A token's key, value or update is changed a little, towards another's: the probed output moves as E says."""
    model = small_vit().double()
    images = torch.randn(1, 3, 96, 96, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    direction = torch.randn(1, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    blocks = list(model.get_submodule("blocks").children())
    mlps = [(block.get_submodule("norm2"), block.get_submodule("mlp")) if is_split else None for block in blocks]
    recorder = EffectRecorder(blocks, host_of(model).layouts(), mlps)
    with recorder:
        output = model(images)
    (direction * output).sum().backward()
    effects = dict(zip(recorder.block_parts, recorder.collect(), strict=True))
    keys, others = effects[1, "attention" if is_split else "block"][:, 0]
    recorder.remove_hooks()
    step, token, other = 1e-6, 4, 9
    moved = {}
    attention = F.scaled_dot_product_attention
    with torch.no_grad():
        for name in ("key", "value", "update", "update of attention"):

            def shifted(query: Tensor, key: Tensor, value: Tensor, name: str = name, **options: Any) -> Tensor:
                changed = {"key": key, "value": value}
                if name in changed:
                    tensor = changed[name]
                    tensor[:, :, 1 + token] += step * (tensor[:, :, 1 + other] - tensor[:, :, 1 + token])
                return attention(query, key, value, **options)

            def updated(_: nn.Module, arguments: tuple[Tensor], tokens: Tensor, name: str = name) -> Tensor:
                update = tokens - arguments[0]
                if name == "update" and not is_split:
                    tokens[:, 1 + token] += step * (update[:, 1 + other] - update[:, 1 + token])
                return tokens

            def attended(_: nn.Module, __: tuple[Tensor], update: Tensor, name: str = name) -> Tensor:
                if name == "update of attention":
                    update[:, 1 + token] += step * (update[:, 1 + other] - update[:, 1 + token])
                return update

            def fed(_: nn.Module, __: tuple[Tensor], update: Tensor, name: str = name) -> Tensor:
                if name == "update" and is_split:
                    update[:, 1 + token] += step * (update[:, 1 + other] - update[:, 1 + token])
                return update

            with pytest.MonkeyPatch.context() as patch:
                hook = blocks[1].register_forward_hook(updated)
                of_parts = [
                    blocks[1].get_submodule("attn").register_forward_hook(attended),
                    blocks[1].get_submodule("mlp").register_forward_hook(fed),
                ]
                pre = blocks[1].register_forward_pre_hook(
                    lambda *_: patch.setattr(F, "scaled_dot_product_attention", shifted)
                )
                post = blocks[1].register_forward_hook(lambda *_: patch.undo())
                moved[name] = (direction * (model(images) - output)).sum()
                for each in (hook, pre, post, *of_parts):
                    each.remove()
    cases = [(keys, ["key"]), (others, ["value", "update of attention" if is_split else "update"])]
    if is_split:
        cases.append((effects[1, "mlp"][0, 0], ["update"]))
    for effect, names in cases:
        expected = step * (effect[token, other] - effect[token, token])
        assert torch.allclose(sum(moved[name] for name in names), expected, rtol=1e-3)


def test_the_order_is_greedy_and_costs_add_up() -> None:
    effects = torch.randn(10, 7, 7, generator=torch.Generator().manual_seed(4))
    groups = {token: [token] for token in range(7)}
    for merge in ordered(effects):

        def added(first: int, second: int) -> float:
            alone = squared_error(effects, groups[first]) + squared_error(effects, groups[second])
            return squared_error(effects, groups[first] + groups[second]) - alone

        assert merge.cost == pytest.approx(min(added(*pair) for pair in combinations(groups, 2)), rel=1e-4, abs=1e-6)
        assert merge.cost == pytest.approx(added(merge.first, merge.second), rel=1e-4, abs=1e-6)
        assert merge.first < merge.second
        groups[merge.first] += groups.pop(merge.second)
    assert list(groups) == [0]


def test_groups_of_neighbours_hold_together() -> None:
    grid = (5, 4)
    effects = torch.randn(3, 20, 20, generator=torch.Generator().manual_seed(5))
    near = neighbours(grid)
    merges = ordered(effects, near=near)
    assert len(merges) == 19
    for members in merged_layer(merges[:12], grid).members():
        reached = {members[0]}
        while more := {token for token in members if near[token, list(reached)].any()} - reached:
            reached |= more
        assert reached == set(members)


def test_a_probe_has_the_covariance_of_the_predictions() -> None:
    logits = torch.tensor([2.0, 0.5, -1.0])
    generator = torch.Generator().manual_seed(6)
    probes = probe(logits.expand(200_000, 3), True, generator)
    p = logits.softmax(0)
    assert torch.allclose(probes.T @ probes / len(probes), torch.diag(p) - torch.outer(p, p), atol=2e-3)


def test_equal_tokens_merge_for_nothing() -> None:
    """An image with two halves that are the same everywhere, and no positions: merging them changes nothing."""
    model = small_vit()
    with torch.no_grad():
        model.get_parameter("pos_embed").zero_()
    images = torch.randn(2, 3, 96, 48, generator=torch.Generator().manual_seed(7)).repeat(1, 1, 1, 2)
    merge_costs = pmvit.measure(model, [images], method="measured", groups="any", progress=False)
    made = pmvit.plan(merge_costs, keep=(5 * 18 + 1) / (6 * 36))  # of the last MLP nobody reads a patch
    assert {layer.num_kept for layer in made.layers.values()} == {18}
    assert all(
        token % 6 % 3 == made.layers[0].centres[group] % 6 % 3 for token, group in enumerate(made.layers[0].groups)
    )
    with torch.inference_mode():
        assert torch.allclose(pmvit.compress(model, made)(images), model(images), atol=1e-4)


def test_what_is_together_stays_together(merge_costs: MergeCosts) -> None:
    """Each group of a block lies in one group of the next, at any budget; without the constraint it need not."""
    for keep in (0.9, 0.6, 0.3):
        made = pmvit.plan(merge_costs, keep=keep)
        for block in range(2):
            layer, after = made.layers[block], made.layers[block + 1].groups
            steps = [layer, layer.mlp] if layer.mlp is not None else [layer]
            assert all(len({after[token] for token in group}) == 1 for step in steps for group in step.members())
    effects = [torch.randn(4, 5, 5, generator=torch.Generator().manual_seed(seed)) for seed in (20, 21)]
    for nested in (True, False):
        first = next(merge for merge in ordered(*effects, nested=nested) if merge.block == 0)
        own = ordered(effects[0])[0]
        assert (first.first, first.second) == (own.first, own.second) or nested


def test_what_nobody_reads_merges_for_nothing(merge_costs: MergeCosts) -> None:
    """The head reads the class token alone: what the last MLP does to the patches costs nothing, and goes first."""
    last = [merge for merge in merge_costs.merges if (merge.block, merge.part) == (2, "mlp")]
    assert merge_costs.merges[: len(last)] == tuple(last)
    assert {merge.cost for merge in last} == {0.0}
    made = pmvit.plan(merge_costs, keep=1 - 35 / (6 * 36))
    assert [layer.mlp.num_kept if layer.mlp else None for layer in made.layers.values()] == [None, None, 1]


def test_halves_are_nested_and_whole_blocks_are_not_split(images: Tensor, merge_costs: MergeCosts) -> None:
    made = pmvit.plan(merge_costs, keep=0.5)
    assert any(layer.mlp is not None for layer in made.layers.values())
    assert merge_costs.parts == (("attention", "mlp"),) * 3
    whole = pmvit.measure(small_vit(), [images], method="measured", parts="whole", progress=False)
    assert whole.parts == (("block",),) * 3
    assert all(layer.mlp is None for layer in pmvit.plan(whole, keep=0.5).layers.values())
    with pytest.raises(pmvit.PmvitError, match="takes residual reconstruction; got pinv"):
        pmvit.plan(merge_costs, keep=0.5, reconstruct="pinv")
    with pytest.raises(pmvit.PmvitError, match="nested=True where attention and MLP are split"):
        replace(merge_costs.config, nested=False)


def test_no_step_is_smaller_than_it_may_be(merge_costs: MergeCosts) -> None:
    """Along the blocks and their halves, groups stay the same or become fewer by the least step; others change less."""

    def counts(least_step: float) -> list[int]:
        made = pmvit.plan(merge_costs, keep=0.6, least_step=least_step)
        return [
            (layer.mlp or layer).num_kept if half else layer.num_kept
            for layer in made.layers.values()
            for half in (0, 1)
        ]

    steps = {least: [(36, counts(least)[0]), *pairwise(counts(least))] for least in (0.0, 0.25)}
    assert any(0 < before - after < 0.25 * before for before, after in steps[0.0])
    assert all(before == after or before - after >= 0.25 * before for before, after in steps[0.25])
    assert sum(counts(0.25)) == pytest.approx(sum(counts(0.0)), abs=9)


def test_early_merges_come_later_if_they_are_dearer() -> None:
    effects = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(22))
    places = {}
    for early in (1.0, 100.0):
        merges = ordered(effects, effects, effects, early=early, nested=False)
        places[early] = sum(place for place, merge in enumerate(merges) if merge.block == 0)
        assert sorted(merges) == sorted(ordered(effects, effects, effects, nested=False))
    assert places[100.0] > places[1.0]


def test_combinations_keep_squares() -> None:
    """The squared error of a group, over all images, is that over their random combinations, about."""
    effects = torch.randn(40, 3, 3, generator=torch.Generator().manual_seed(23))
    total = torch.zeros(4000, 3, 3)  # hardly two of them in one row
    add_combinations(total, effects, 1.0, torch.Generator().manual_seed(24))
    assert squared_error(total, [0, 2]) == pytest.approx(squared_error(effects, [0, 2]), rel=0.1)


def test_batches_make_no_difference(images: Tensor, merge_costs: MergeCosts) -> None:
    loader = [(images[:3], torch.zeros(3)), (images[3:], torch.zeros(3))]
    by_batch = pmvit.measure(small_vit(), loader, method="measured", limit=5, progress=False)
    assert by_batch.images == 5
    assert by_batch.merges != merge_costs.merges


def test_mirror_images_count_alike(images: Tensor, merge_costs: MergeCosts) -> None:
    effects = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(8))
    swapped = mirrored(effects, (2, 3))
    assert torch.equal(mirrored(swapped, (2, 3)), effects)
    assert torch.equal(swapped[..., 0, 4], effects[..., 2, 4])  # the first row's ends change places, middles stay
    both, other = (torch.cat(pair) for pair in ((effects, swapped), (swapped, effects)))
    assert [merge.cost for merge in ordered(both)] == pytest.approx(
        [merge.cost for merge in ordered(other)], rel=1e-4, abs=1e-6
    )
    assert (
        pmvit.measure(small_vit(), [images], method="measured", mirror=False, progress=False).merges
        != merge_costs.merges
    )


def test_budgets_are_met(merge_costs: MergeCosts) -> None:
    made = pmvit.plan(merge_costs, keep=0.6)
    assert sum(2 * 36 * layer.share_kept for layer in made.layers.values()) == pytest.approx(round(0.6 * 3 * 72))
    assert made.reconstruct == "residual"
    assert made.attention_bias
    share = pmvit.plan(merge_costs, flops_share=0.7, method="measured")
    small = pmvit.compress(small_vit(), share)
    assert predicted_macs(merge_costs, share) == pmvit.flops(small).macs
    assert 0.68 < pmvit.flops(small).macs / merge_costs.cost.macs <= 0.7
    assert 0 not in pmvit.plan(merge_costs, keep=0.6, skip=(0,)).layers


def test_a_file_gives_the_same_merge_costs(merge_costs: MergeCosts, tmp_path: Path) -> None:
    merge_costs.save(tmp_path / "merge_costs.json")
    assert MergeCosts.load(tmp_path / "merge_costs.json") == merge_costs
    document = json.loads((tmp_path / "merge_costs.json").read_text())
    document["merges"][3] = document["merges"][2]
    (tmp_path / "damaged.json").write_text(json.dumps(document))
    with pytest.raises(pmvit.PmvitError, match="is not what was written"):
        MergeCosts.load(tmp_path / "damaged.json")
    del document["sha256"]
    (tmp_path / "broken.json").write_text(json.dumps(document))
    with pytest.raises(pmvit.PmvitError, match=r"block \d: expected merges of two groups that are left"):
        MergeCosts.load(tmp_path / "broken.json")


def test_the_first_version_of_the_file_is_read_as_merges_of_whole_blocks(
    merge_costs: MergeCosts, tmp_path: Path
) -> None:
    of_attention = [merge for merge in merge_costs.merges if merge.part == "attention"]
    config = {name: value for name, value in asdict(merge_costs.config).items() if name not in ("parts", "limit")}
    config["images"] = merge_costs.config.limit
    first = {
        **asdict(merge_costs),
        "format": "pmvit-prices",
        "version": 1,
        "merges": [[merge.block, merge.first, merge.second, merge.cost] for merge in of_attention],
        "config": config,
    }
    (tmp_path / "prices.json").write_text(json.dumps(first))
    assert MergeCosts.load(tmp_path / "prices.json") == replace(
        merge_costs,
        merges=tuple(merge._replace(part="block") for merge in of_attention),
        config=replace(merge_costs.config, parts="whole"),
    )


def test_mistakes_get_one_line(merge_costs: MergeCosts, images: Tensor) -> None:
    model = small_vit()
    with pytest.raises(pmvit.PmvitError, match="prune, grouping: expected beside scores alone"):
        pmvit.plan(merge_costs, keep=0.5, prune=0.2, grouping="row")
    with pytest.raises(pmvit.PmvitError, match="makes plans from scores; got merge costs"):
        pmvit.plan(merge_costs, keep=0.5, method="scored")
    with pytest.raises(pmvit.PmvitError, match="makes plans from merge costs; got scores"):
        pmvit.plan(pmvit.measure(model, [], method="scored", scorer="random"), keep=0.5, method="measured")
    with pytest.raises(pmvit.PmvitError, match="least_step: expected beside merge costs alone"):
        pmvit.plan(pmvit.measure(model, [], method="scored", scorer="random"), keep=0.5, least_step=0.2)
    with pytest.raises(pmvit.PmvitError, match="least_step: expected a share from 0 to below 1, got 1"):
        pmvit.plan(merge_costs, keep=0.5, least_step=1.0)
    with pytest.raises(pmvit.PmvitError, match="the loader is empty"):
        pmvit.measure(model, [], method="measured", progress=False)
    with pytest.raises(pmvit.PmvitError, match="block 0: what is measured is not finite"):
        pmvit.measure(model, [images * torch.nan], method="measured", progress=False)
    with pytest.raises(pmvit.PmvitError, match="measure the original"):
        pmvit.measure(pmvit.compress(model, pmvit.plan(merge_costs, keep=0.5)), [images], method="measured")
    with pytest.raises(pmvit.PmvitError, match="a SwinTransformer attends inside windows: make a fixed plan"):
        pmvit.measure(small_swin(), [images], method="measured")
    with pytest.raises(pmvit.PmvitError, match="limit: expected a number above 0"):
        replace(merge_costs.config, limit=0)


def test_measured_plans_keep_more_of_the_demo_model() -> None:
    """On other images and at the same cost, predictions stay nearer to the original's than with a plan from scores."""
    model = demo_model()
    train, test = (demo_loader(half, 64, 128) for half in ("train", "test"))
    sources = (
        pmvit.measure(model, train, method="measured", progress=False),
        pmvit.measure(model, train, method="scored", progress=False),
    )
    measured, scored = (
        pmvit.evaluate(pmvit.compress(model, pmvit.plan(each, flops_share=0.7)), test, reference=model, progress=False)
        for each in sources
    )
    assert measured.kl is not None
    assert scored.kl is not None
    assert measured.kl < 0.7 * scored.kl
