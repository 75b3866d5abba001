"""What the papers of the other methods state of them."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmvit
from pmvit.methods import METHODS, Evit, make_method
from pmvit.methods.attention import attend, class_attention, take
from pmvit.methods.base import encoder_of
from pmvit.methods.budget import method_for
from pmvit.methods.expedite import Expedite, affinity, cluster, neighbours, reconstruct
from pmvit.methods.floors import draw, merge_cells
from pmvit.methods.halfway import importance, squeeze, weighted_page_rank, without_similar
from pmvit.methods.tome import matched, with_length_of_longest
from pmvit.wrapping import TrainingPass, extra_loss
from tests.helpers import method_at as at
from tests.helpers import small_vit
from tests.segmenters import small_segmenter


@pytest.fixture(scope="module")
def vit() -> Any:
    return small_vit()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_begins_at_the_original_and_is_saved(name: str, vit: Any, images: Tensor, tmp_path: Path) -> None:
    nothing, some = (pmvit.compress(vit, at(name, strength, vit)) for strength in (0.0, 0.5))
    with torch.inference_mode():
        assert torch.allclose(nothing(images), vit(images), atol=1e-5)
        reduced = some(images)
    assert not torch.allclose(reduced, vit(images), atol=2e-5)
    assert pmvit.flops(some).macs < pmvit.flops(vit).macs
    pmvit.save(some, tmp_path / "model")
    loaded: Any = pmvit.load(tmp_path / "model")
    assert loaded.compression.what == some.compression.what
    with torch.inference_mode():
        assert torch.equal(loaded(images), reduced)
    logits = some.train()(images)
    own = extra_loss(some, TrainingPass(images, logits, logits.argmax(-1)))
    (logits.square().sum() + (0.0 if own is None else own)).backward()
    assert [key for key, weight in some.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_give_all_tokens_segment(name: str) -> None:
    model = small_segmenter()
    method = METHODS[name].at(0.5, encoder_of(model))
    if not method.gives_all_tokens:
        with pytest.raises(pmvit.PmvitError, match="reads every token"):
            pmvit.compress(model, method)
        return
    with torch.inference_mode():
        assert pmvit.compress(model, method)(torch.randn(2, 3, 64, 96)).shape == (2, 3, 64, 96)


def tokens_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def explicit_class_attention(block: Any, tokens: Tensor) -> Tensor:
    """The row of the class token in the attention maps, from the definition."""
    query, key, _ = block.attn.qkv(block.norm1(tokens)).unflatten(-1, (3, 3, 16)).unbind(2)
    maps = torch.einsum("bqhd,bkhd->bhqk", query, key).div(4).softmax(-1)
    return maps[:, :, 0].mean(1)


def seen_by_mlp(block: Any, tokens: Tensor) -> Tensor:
    """The tokens that the second half of a wrapped block gets."""
    seen: list[Tensor] = []
    handle = block.block.norm2.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    block(tokens)
    handle.remove()
    return seen[0]


def test_class_attention_is_a_row_of_the_maps(vit: Any) -> None:
    block, tokens = vit.blocks[0], tokens_of(0, 2, 37, 48)
    with torch.no_grad():
        expected = explicit_class_attention(block, tokens)
        fused, explicit = attend(block, tokens), attend(block, tokens, maps=True)
        assert torch.allclose(class_attention(block, fused), expected, atol=1e-6)
        assert torch.allclose(class_attention(block, explicit), expected, atol=1e-6)
        assert torch.allclose(fused.update, explicit.update, atol=1e-5)


def test_evit_fuses_what_it_does_not_keep(vit: Any) -> None:
    """The inattentive tokens become one, the sum weighted by the attention of the class token."""
    tokens = tokens_of(0, 2, 37, 48)
    with torch.no_grad():
        after = seen_by_mlp(pmvit.compress(vit, make_method("evit", keep=0.7, blocks=(1,))).blocks[1], tokens)
        scores = explicit_class_attention(vit.blocks[1], tokens)[:, 1:]
        attended = tokens + attend(vit.blocks[1], tokens).update
    assert after.shape[1] == 1 + 26 + 1  # 0.7 of 36, rounded up
    for image in range(2):
        order = scores[image].argsort(descending=True)
        rest = order[26:]
        fused = (scores[image, rest, None] * attended[image, 1 + rest]).sum(0)
        assert torch.allclose(after[image, -1], fused, atol=1e-5)
        assert torch.allclose(after[image, 1:-1], attended[image, 1 + order[:26]], atol=1e-5)
        assert torch.allclose(after[image, 0], attended[image, 0], atol=1e-5)


def test_top_k_leaves_nothing_of_the_others(vit: Any) -> None:
    tokens = tokens_of(0, 2, 37, 48)
    with torch.no_grad():
        fusing, dropping = (
            seen_by_mlp(pmvit.compress(vit, make_method(name, keep=0.5, blocks=(1,))).blocks[1], tokens)
            for name in ("evit", "top-k")
        )
    assert torch.equal(dropping, fusing[:, :-1])


def test_tps_squeezes_into_the_nearest() -> None:
    kept = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    pruned = torch.tensor([[[3.0, 0.0], [1.0, 1.1], [0.0, 5.0]]])
    cosine = 1.1 / (1 + 1.1**2) ** 0.5  # of the second pruned token with the second kept one, its nearest
    e, weight = torch.e, torch.tensor(cosine).exp()
    first = (e * kept[0, 0] + e * pruned[0, 0]) / (2 * e)
    second = (e * kept[0, 1] + weight * pruned[0, 1] + e * pruned[0, 2]) / (2 * e + weight)
    assert torch.allclose(squeeze(kept, pruned)[0], torch.stack([first, second]))
    alike = tokens_of(0, 1, 4, 8)
    assert torch.allclose(squeeze(alike, alike.repeat(1, 3, 1)), alike, atol=1e-6)  # copies bring nothing new


def test_tofu_keeps_the_length_of_the_longest() -> None:
    tokens, sizes = tokens_of(0, 1, 8, 4), torch.ones(1, 8, 1)
    patches = [torch.tensor([places]) for places in ([5], [0, 2, 4, 6], [1, 3], [1, 1])]
    found = matched(1, *patches)  # tokens 2 and 4 into 3
    mean, new_sizes = found.merge(tokens, sizes)
    fused = with_length_of_longest(mean, tokens, found)
    place = int(found.places()[0, 3])
    assert new_sizes[0, place] == 3
    assert torch.allclose(fused[0, place].norm(), tokens[0, [2, 3, 4]].norm(dim=-1).max())
    assert torch.allclose(torch.cosine_similarity(fused, mean, dim=-1), torch.ones(1, 6))
    pruned = take(tokens, found.stays)
    assert torch.equal(pruned[0, place], tokens[0, 3])
    others = [other for other in range(6) if other != place]
    assert torch.allclose(fused[0, others], pruned[0, others], atol=1e-6)  # those alone are as they were


def test_random_merging_merges_r_patches_and_no_prefix() -> None:
    tokens, sizes = tokens_of(0, 1, 38, 4), torch.ones(1, 38, 1)
    drawn = draw(38, 7, 2, seed=3)
    merged, new_sizes = drawn.merge(tokens, sizes)
    assert merged.shape[1] == 31
    assert torch.equal(merged[:, :2], tokens[:, :2])
    assert torch.allclose((merged * new_sizes).sum(1), tokens.sum(1), atol=1e-5)
    again, other = draw(38, 7, 2, seed=3), draw(38, 7, 2, seed=4)
    assert torch.equal(again.merged, drawn.merged)
    assert not torch.equal(other.merged, drawn.merged)


def test_uniform_merges_cells(images: Tensor) -> None:
    places = merge_cells((4, 6), 1.0, 1).places()[0]
    grid = places[1:].view(4, 6)
    assert places[0] == 0
    assert len(places.unique()) == 1 + 6
    assert all(len(grid[r : r + 2, c : c + 2].unique()) == 1 for r in (0, 2) for c in (0, 2, 4))
    half = merge_cells((4, 6), 0.5, 1).places()
    assert half.max() == 3 + 12  # three cells and the twelve patches of the others
    assert merge_cells((5, 5), 1.0, 0).places().max() == 8  # cut cells at the edge
    model: Any = pmvit.compress(small_vit(class_token=False, global_pool="avg"), make_method("uniform", share=1.0))
    with torch.inference_mode():
        assert model.forward_features(images).shape[1] == 9


def test_evo_vit_updates_placeholders_by_their_representative(vit: Any) -> None:
    model: Any = pmvit.compress(vit, make_method("evo-vit", keep=0.25, start=1))
    tokens, attention = tokens_of(0, 2, 37, 48), tokens_of(1, 2, 36).softmax(-1)
    with torch.no_grad():
        after, evolved = model.blocks[1]((tokens, attention))
    assert after.shape == tokens.shape  # no token is lost
    for image in range(2):
        order = attention[image].argsort(descending=True)
        informative, placeholders = order[:9], order[9:]
        change = (after - tokens)[image, 1 + placeholders]
        assert torch.allclose(change, change[:1].expand_as(change), atol=1e-5)
        weights = attention[image, placeholders]
        mean = (weights[:, None] * tokens[image, 1 + placeholders]).sum(0) / weights.sum()
        slow = torch.cat([tokens[image, :1], tokens[image, 1 + informative], mean[None]])[None]
        with torch.no_grad():
            updated = vit.blocks[1](slow)[0]
            found = explicit_class_attention(vit.blocks[1], slow)[0, 1:-1]
        assert torch.allclose(after[image, 1 + informative], updated[1:-1], atol=1e-5)
        assert torch.allclose(change[0], (updated[-1] - mean), atol=1e-5)
        assert torch.equal(evolved[image, placeholders], attention[image, placeholders])
        mixed = (attention[image, informative] + found) / 2
        assert torch.allclose(evolved[image, informative], mixed, atol=1e-6)


def test_expedite_finds_clusters_and_the_way_back() -> None:
    grid, size = (6, 8), (3, 4)
    own = (torch.arange(6)[:, None] // 2 * 4 + torch.arange(8) // 2).flatten()
    centres = 20 * tokens_of(0, 1, 12, 16)
    patches = centres[:, own]
    near = neighbours(grid, size, 5)
    assert near[torch.arange(48), own].all()
    assert not near[0, 11]  # the other end of the image
    found = cluster(patches, grid, size, near, 5, 1.0)
    assert torch.allclose(found, centres, atol=1e-4)  # where patches of a cell are alike, they are the cluster
    refined = tokens_of(1, 1, 12, 16)
    assert torch.allclose(reconstruct(patches, found, refined, 20, 1.0), refined[:, own], atol=1e-4)
    every = 20 * tokens_of(2, 1, 48, 16)
    assert torch.allclose(reconstruct(every, every, every, 20, 1.0), every, atol=1e-4)  # nothing clustered: identity
    nearness = affinity(patches[:, :1], centres, 2.0)[0, 0]
    assert torch.allclose(nearness, -(patches[0, 0] - centres[0]).square().sum(-1) / 2, rtol=1e-4, atol=1e-2)


@pytest.mark.data
def test_expedite_clusters_better_than_the_averages_of_cells(deit_tiny: Any, train_batches: list[Any]) -> None:
    """Its rounds have to improve on where they begin, for which the temperature has to suit the model."""
    formed = Expedite((9, 9))
    begun = replace(formed, rounds=0)
    images, _ = train_batches[0]
    near = neighbours((14, 14), formed.clusters, formed.window)
    with torch.inference_mode():
        patches = deit_tiny.forward_intermediates(images, [4], output_fmt="NLC", intermediates_only=True)[0]

    def error(method: Expedite) -> float:
        clusters = cluster(patches, (14, 14), method.clusters, near, method.rounds, method.temperature)
        return torch.cdist(patches, clusters).square().amin(-1).mean().item()

    def divergence(method: Expedite) -> float:
        kl = pmvit.evaluate(pmvit.compress(deit_tiny, method), train_batches, reference=deit_tiny, progress=False).kl
        assert kl is not None
        return kl

    assert error(formed) < 0.8 * error(begun)
    assert divergence(formed) < 0.5 * divergence(begun)


def test_page_rank_is_the_stationary_distribution() -> None:
    maps = (2 * tokens_of(0, 2, 3, 20, 20)).double().softmax(-1)
    scores = weighted_page_rank(maps, 100)
    assert torch.allclose(scores.sum(-1), torch.ones(2, 3, dtype=torch.double))
    assert torch.allclose((scores[..., None, :] @ maps).squeeze(-2), scores, atol=1e-12)


def test_zero_tprune_filters_heads_and_prunes_the_similar() -> None:
    flat, fair, wild = torch.ones(10), torch.linspace(0.5, 1.5, 10), torch.tensor([9.1] + [0.1] * 9)
    scores = torch.stack([flat, fair, wild])[None]
    assert torch.allclose(importance(scores, (0.01, 0.7))[0], fair)
    assert torch.allclose(importance(scores[:, [0, 2]], (0.01, 0.7))[0], ((flat.square() + wild.square()) / 2).sqrt())
    keys = torch.eye(6)[None].clone()
    keys[0, 1] = keys[0, 5]  # of the three unimportant tokens 0, 1 and 2, number 1 is like an important one
    left = without_similar(torch.tensor([[1.0, 3.0, 2.0, 4.0, 5.0, 6.0]]), keys, 1)
    assert sorted(left[0].tolist()) == [0, 2, 3, 4, 5]


def test_dynamic_vit_masks_while_training_what_it_drops_in_inference(vit: Any, images: Tensor) -> None:
    """With sure decisions that keep the asked share, the class token cannot tell a mask from a token that is gone."""
    model: Any = pmvit.compress(vit, make_method("dynamic-vit", keep=0.5, blocks=(1, 2)))
    for number, share in ((1, 0.5), (2, 0.25)):
        model.blocks[number].predictor.forward = sure_of(round(36 * share))
    with torch.no_grad():
        hard = model(images)
        soft = model.train()(images)
        loss = extra_loss(model)
    assert torch.allclose(soft, hard, atol=1e-4)
    assert not torch.allclose(hard, vit(images), atol=1e-2)
    assert loss is not None
    assert loss < 1e-8
    assert extra_loss(model) is None  # it counts once


def sure_of(number: int) -> Any:
    """A predictor that keeps the first tokens, and ranks them by their places."""

    def decide(patches: Tensor, _kept: Tensor) -> Tensor:
        places = torch.arange(patches.shape[1])
        scores = torch.where(places < number, 1e4, -1e4) - places
        return torch.stack([scores, -scores], dim=-1).expand(len(patches), -1, -1)

    return decide


def test_dynamic_vit_learns_to_keep_its_share(vit: Any) -> None:
    torch.manual_seed(0)
    model: Any = pmvit.compress(vit, make_method("dynamic-vit", keep=0.3, blocks=(1,), ratio_weight=100.0))
    batches = [(torch.randn(8, 3, 96, 96), torch.arange(8) % 7) for _ in range(2)]
    shares = []
    model.blocks[1].register_forward_hook(lambda module, _inputs, _output: shares.append(module._kept_share))
    pmvit.finetune(model, train=batches, epochs=15, lr=3e-3, warmup_epochs=0, progress=False)
    drawn = [float(share.detach().mean()) for share in shares if share is not None]
    assert abs(drawn[0] - 0.3) > 0.1
    assert abs(sum(drawn[-10:]) / 10 - 0.3) < 0.05


def test_methods_cost_what_they_should(vit: Any) -> None:
    wanted = 0.7 * pmvit.flops(vit).gflops
    method = method_for(vit, Evit, wanted, blocks=(1,))
    assert method.blocks == (1,)
    assert pmvit.flops(pmvit.compress(vit, method)).gflops == pytest.approx(wanted, rel=0.01)


def test_methods_say_what_they_take(vit: Any) -> None:
    pooled = small_vit(class_token=False, global_pool="avg")
    with pytest.raises(pmvit.PmvitError, match="the class token; this model has none"):
        pmvit.compress(pooled, make_method("evit", keep=0.5))
    for name, options, message in (
        ("evit", {"keep": 0.0}, "above 0 and at most 1; got 0.0"),
        ("evit", {"keep": 0.5, "share": 0.5}, "unknown field 'share'"),
        ("evit", {}, "the field 'keep' is missing"),
        ("evit", {"keep": "half"}, "keep: expected a number, got 'half'"),
        ("top-k", {"keep": 0.5, "blocks": (7,)}, "blocks of 0 ... 2, got 7"),
        ("uniform", {"share": 2}, "0 to 1; got 2"),
        ("expedite", {"clusters": (9, 2)}, "no more than the 6 x 6 patches"),
    ):
        with pytest.raises(pmvit.PmvitError, match=message):
            pmvit.compress(vit, make_method(name, **options))


def test_methods_leave_the_modes_of_modules_alone(vit: Any) -> None:
    mixed: nn.Module = copy.deepcopy(vit).train()
    mixed.get_submodule("blocks.0").eval()
    wrapped: Any = pmvit.compress(mixed, make_method("tome", r=2))
    assert [block.training for block in wrapped.blocks] == [False, True, True]
    assert [block.block.training for block in wrapped.blocks] == [False, True, True]
