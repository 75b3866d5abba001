"""PiToMe, DiffRate and MCTF do what their papers state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmvit
from pmvit.data.opening import open_loader
from pmvit.evaluation.classification import evaluate_all
from pmvit.methods import METHODS, DiffRate, Tome, make_method
from pmvit.methods.budget import method_for
from pmvit.methods.diffrate import MERGED, PRUNED, counts_at
from pmvit.methods.mctf import attraction, match_both_ways
from pmvit.methods.tome import match_redundant
from tests.helpers import small_vit


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def vit() -> Any:
    return small_vit()


def tokens_of_mlps(model: Any, images: Tensor) -> list[int]:
    """How many tokens the second half of each block gets."""
    counts: list[int] = []
    hooks = [
        block.block.norm2.register_forward_pre_hook(lambda _module, inputs: counts.append(inputs[0].shape[1]))
        for block in model.blocks
    ]
    with torch.inference_mode():
        model(images)
    for hook in hooks:
        hook.remove()
    return counts


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("pitome", {"r": (4, 0, 6)}, [33, 33, 27]),
        ("mctf", {"r": 5}, [37, 32, 27]),  # the first block merges nothing
        ("mctf", {"r": 5, "skip": ()}, [32, 27, 22]),
        ("diffrate", {"pruned": (36, 30, 12), "merged": (36, 25, 12)}, [37, 26, 13]),
        ("diffrate", {"pruned": (40, 20, 20), "merged": (40, 40, 9)}, [37, 21, 10]),
    ],
)
def test_as_many_tokens_are_left_as_asked_for(
    name: str, options: dict[str, Any], expected: list[int], vit: Any
) -> None:
    model = pmvit.compress(vit, make_method(name, **options))
    assert tokens_of_mlps(model, random(0, 2, 3, 96, 96)) == expected


def test_pitome_protects_what_is_like_few() -> None:
    """Five tokens of one kind, three of another, and four of no kind, which stay."""
    kinds = torch.tensor([0, 1, 0, 2, 0, 3, 1, 0, 4, 1, 0, 5])
    keys = torch.cat([random(1, 1, 2, 8), F.pad(torch.eye(6)[kinds][None] + 0.01 * random(0, 1, 12, 6), (0, 2))], dim=1)
    found = match_redundant(keys, 3, 2, 0.75)
    assert found.stays.shape[1] == 11
    assert found.stays[0, :2].tolist() == [0, 1]
    touched = [*found.merged[0].tolist(), *found.stays[0, -3:].tolist()]
    assert not set(touched) & {2 + place for place in range(12) if kinds[place] > 1}
    hosts = found.stays[0, found.into[0]]
    energy = F.elu(F.normalize(keys[0, 2:], dim=-1) @ F.normalize(keys[0, 2:], dim=-1).T - 0.75).mean(-1)
    assert sorted(place - 2 for place in touched) == sorted(energy.argsort(descending=True)[:6].tolist())
    for place, host in zip(found.merged[0], hosts, strict=True):
        similar = F.cosine_similarity(keys[0, place], keys[0, found.stays[0, -3:]], dim=-1)
        assert host == found.stays[0, -3:][similar.argmax()]


def test_mctf_merges_half_in_each_direction() -> None:
    drawn = random(0, 2, 9, 9).sigmoid()
    found = match_both_ways(drawn, 7, 1)  # 19 tokens; the first set is at even places
    assert found.stays.shape == (2, 12)
    for image in range(2):
        there, back = found.merged[image, :3], found.merged[image, 3:]
        assert (there % 2 == 0).all()
        assert (back % 2 == 1).all()
        strength = drawn[image].amax(1)
        assert sorted(there.tolist()) == sorted((2 + 2 * strength.argsort(descending=True)[:3]).tolist())
        left = drawn[image][[row for row in range(9) if 2 + 2 * row not in there]].amax(0)
        assert sorted(back.tolist()) == sorted((1 + 2 * left.argsort(descending=True)[:4]).tolist())
    tokens, weights = random(1, 2, 19, 4), random(2, 2, 19, 1).exp()
    merged, totals = found.merge(tokens, weights)
    assert torch.allclose(merged[:, 0], tokens[:, 0])
    assert torch.allclose((merged * totals).sum(1), (tokens * weights).sum(1), atol=1e-5)


def test_mctf_spares_what_is_attended_to_and_large() -> None:
    tokens = random(0, 1, 1, 6).expand(1, 4, 6)
    even = torch.ones(1, 4, 1)
    received, sizes = even.clone(), even.clone()
    received[0, 2], sizes[0, 3] = 8.0, 3.0
    drawn = attraction(tokens, received, sizes, (1.0, 20.0, 40.0), 0)[0]  # of patches 0 and 2 to patches 1 and 3
    expected = torch.tensor([[1.0, 3 ** (-1 / 40)], [8 ** (-1 / 20), 8 ** (-1 / 20) * 3 ** (-1 / 40)]])
    assert torch.allclose(drawn, expected, atol=1e-6)


def test_mctf_is_exact_where_tokens_are_alike(vit: Any) -> None:
    """Attention that is merged with copies is the attention of what is left."""
    pairs = random(0, 2, 18, 48).repeat_interleave(2, dim=1)
    tokens = torch.cat([random(1, 2, 1, 48), pairs], dim=1)
    model: Any = pmvit.compress(vit, make_method("mctf", r=18))
    with torch.inference_mode():
        merged, sizes, _ = model.blocks[1](tokens)
        whole = vit.blocks[1](tokens)[:, [0, *range(1, 37, 2)]]
    assert torch.equal(sizes[:, 1:], torch.full((2, 18, 1), 2.0))
    order = torch.cdist(whole, merged).argmin(-1)
    assert torch.allclose(merged.gather(1, order[..., None].expand_as(whole)), whole, atol=1e-5)


def test_diffrate_prunes_the_tail_and_merges_the_rest(vit: Any) -> None:
    model: Any = pmvit.compress(vit, make_method("diffrate", pruned=(36, 20, 20), merged=(36, 12, 12)))
    tokens, seen = random(0, 1, 37, 48), []
    model.blocks[1].block.norm2.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        _, sizes, _ = model.blocks[1](tokens)
        query, key, _ = vit.blocks[1].attn.qkv(vit.blocks[1].norm1(tokens)).unflatten(-1, (3, 3, 16)).unbind(2)
        maps = torch.einsum("bqhd,bkhd->bhqk", query, key).div(4).softmax(-1)
        attended = tokens + vit.blocks[1].attn(vit.blocks[1].norm1(tokens))
    order = 1 + maps[0, :, 0, 1:].mean(0).argsort(descending=True)
    important, others = attended[0, order[:12]], attended[0, order[12:20]]
    similarity = F.normalize(others, dim=-1) @ F.normalize(important, dim=-1).T
    hosts = similarity.argmax(1)
    for place in range(12):
        members = torch.cat([important[place, None], others[hosts == place]])
        assert torch.allclose(seen[0][0, 1 + place], members.mean(0), atol=1e-5)
        assert sizes[0, 1 + place, 0] == pytest.approx(1 + similarity[hosts == place, place].clamp_min(0).sum().item())


def as_the_authors_count(counts: Sequence[tuple[int, ...]], width: int = 192) -> float:
    """GFLOPs of DeiT-Tiny: patch embedding and head, attention of what a block gets, the MLP of what it leaves."""
    left = 197
    macs = left * width * 16 * 16 * 3 + width * 1000
    for after in zip(*counts, strict=True):
        macs += 4 * left * width**2 + 2 * left**2 * width
        left = min(left, *after)
        macs += 8 * left * width**2
    return macs / 1e9


def test_diffrate_has_the_published_counts_and_costs() -> None:
    """By the authors' formula, what they call 0.7 costs 0.727 and 0.6 costs 0.655; here, choosing is counted, too."""
    model = timm.create_model("deit_tiny_patch16_224")
    for number, (gflops, *counts) in enumerate(zip((1.0, 0.9, 0.8, 0.7, 0.6), PRUNED, MERGED, strict=True)):
        pruned, merged = counts_at((1 + number) / 6, 196, 12).tolist()
        assert merged == (torch.tensor(counts[1]) - 1).cummin(0).values.tolist()
        assert pruned == (torch.tensor(counts[0]) - 1).cummin(0).values.tolist()
        costs = pmvit.flops(pmvit.compress(model, DiffRate(tuple(pruned), tuple(merged)))).gflops
        assert costs == pytest.approx(as_the_authors_count(counts), rel=0.01)
        assert costs == pytest.approx(gflops, rel=0.1)
    assert counts_at(0.0, 100, 5).tolist() == [[100] * 5] * 2
    assert counts_at(0.5, 400, 24).shape == (2, 24)
    with pytest.raises(pmvit.PmvitError, match="a number for each of the 12 blocks; got 2"):
        pmvit.compress(model, DiffRate((4, 4), (4, 4)))
    with pytest.raises(pmvit.PmvitError, match="1 or more"):
        DiffRate((4, 0), (4, 4))


@pytest.mark.data
def test_real_images_at_equal_cost(deit_tiny: nn.Module, data: Path) -> None:
    """All of them within a budget, on 100 images: nearer to the original than random merging, and not far from ToMe."""
    loader = open_loader(deit_tiny, str(data / "imagenet" / "val"), batch_size=50, workers=0)
    batches = [batch for batch, _ in zip(loader, range(2), strict=False)]
    kinds: list[Any] = [Tome, *(METHODS[name] for name in ("random", "pitome", "diffrate", "mctf"))]
    models = [pmvit.compress(deit_tiny, method_for(deit_tiny, kind, 0.86)) for kind in kinds]
    assert all(pmvit.flops(model).gflops == pytest.approx(0.86, rel=0.01) for model in models)
    tome, at_random, *others = (
        one.kl or 0.0 for one in evaluate_all(models, batches, reference=deit_tiny, progress=False)
    )
    assert all(kl < at_random / 3 for kl in others)
    assert all(kl < 2 * tome for kl in others)
