"""PS-ViT, ACT and IA-RED2 do what their papers state; weight pruning takes away what is worth least."""

from typing import Any

import pytest
import torch
from torch import Tensor

import pmvit
from pmvit.comparison.weights import prune_weights, pruned
from pmvit.methods import PsVit, Tome, make_method
from pmvit.methods.act import cluster
from pmvit.methods.budget import nearest
from pmvit.methods.learned import reward
from pmvit.methods.ps_vit import Observed, choose
from pmvit.wrapping import TrainingPass, extra_loss
from tests.helpers import small_vit


@pytest.fixture(scope="module")
def vit() -> Any:
    return small_vit()


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(4, 3, 96, 96, generator=torch.Generator().manual_seed(1))


def test_ps_vit_follows_attention_from_the_last_block_to_the_first() -> None:
    """Of three patches, the class token reads the first at the end, and that one the second before."""
    last, middle, first = (torch.full((4, 4), 0.0).fill_diagonal_(1.0) for _ in range(3))
    last[0] = torch.tensor([0.1, 0.9, 0.0, 0.0])
    middle[1] = torch.tensor([0.0, 0.2, 0.8, 0.0])
    observed = Observed(torch.stack([first, middle, last])[:, None], torch.ones(3, 1, 4), 1)
    assert choose(observed, 0.0) == [2, 1, 0]  # patch 3 is nowhere; patch 1 in two blocks, and none in the last
    worth = torch.tensor([0.9 * 0.2, 0.9 * 0.8]).square()  # of patches 1 and 2 in the first block
    others = float(worth[1] / worth.sum())  # patch 1 is computed for the block after it in any case
    assert choose(observed, others - 0.01) == [2, 1, 0]
    assert choose(observed, others + 0.01) == [2, 0, 0]
    assert choose(observed, 1.0) == [0, 0, 0]


def test_ps_vit_computes_the_same_of_fewer_patches(vit: Any, images: Tensor) -> None:
    """A block's outputs that stay are not changed by those that go, and a last block for the class token is exact."""
    blocks = tuple(2 if patch % 3 else 1 for patch in range(36))
    model: Any = pmvit.compress(vit, make_method("ps-vit", tolerance=0.5, blocks_per_patch=blocks))
    tokens = torch.randn(2, 37, 48, generator=torch.Generator().manual_seed(0))
    left = torch.tensor([0, *(1 + patch for patch in range(36) if patch % 3)])
    with torch.inference_mode():
        assert torch.allclose(model.blocks[0](tokens), vit.blocks[0](tokens), atol=1e-5)
        assert torch.allclose(model.blocks[1](tokens), vit.blocks[1](tokens)[:, left], atol=1e-5)
        assert model.forward_features(images).shape[1] == 1
    exact = pmvit.compress(vit, PsVit(tolerance=0.0).fit(vit, [images]))
    with torch.inference_mode():
        assert torch.allclose(exact(images), vit(images), atol=1e-5)
    assert pmvit.flops(exact).macs < pmvit.flops(vit).macs
    with pytest.raises(pmvit.PmvitError, match="by looking at images"):
        pmvit.compress(vit, make_method("ps-vit", tolerance=0.1))
    with pytest.raises(pmvit.PmvitError, match="got data, which it would not look at"):
        Tome(r=3).fit(vit, [images])


def test_methods_that_need_images_cost_what_they_should(vit: Any, images: Tensor) -> None:
    wanted = 0.6 * pmvit.flops(vit).gflops
    _, reached = nearest(vit, PsVit, wanted, data=[images])
    assert reached == pytest.approx(wanted, rel=0.02)


def test_act_is_exact_where_queries_are_alike(vit: Any) -> None:
    """Copies share a bucket, whose prototype is each of them; and there are never more buckets than asked for."""
    kinds = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([kinds[:, :1], kinds[:, 1 + torch.arange(36) % 4]], dim=1)
    model: Any = pmvit.compress(vit, make_method("act", prototypes=4))
    with torch.inference_mode():
        assert torch.allclose(model.blocks[1](tokens), vit.blocks[1](tokens), atol=1e-5)
    queries = torch.randn(3, 2, 50, 16, generator=torch.Generator().manual_seed(1))
    block = model.blocks[0]
    for most in (1, 7, 49):
        found = cluster(queries, block.directions, block.mixers, most)
        counts = {len(of_head.unique()) for of_image in found for of_head in of_image}
        assert max(counts) <= most
        assert min(counts) > most / 3  # as small a width as goes
        assert int(found.max()) == max(counts) - 1


def test_act_is_nearer_with_more_prototypes(vit: Any) -> None:
    tokens = 3 * torch.randn(2, 37, 48, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = vit.blocks[0](tokens)
        errors = [
            float(
                (pmvit.compress(vit, make_method("act", prototypes=number)).blocks[0](tokens) - whole).square().mean()
            )
            for number in (34, 18, 2)
        ]
    assert errors == sorted(errors)
    assert errors[0] < errors[2] / 3


def test_ia_red2_masks_while_training_what_it_drops_in_inference(vit: Any, images: Tensor) -> None:
    """With sure decisions, the class token cannot tell a mask from a token that is gone; images keep what they need."""
    torch.manual_seed(0)
    model: Any = pmvit.compress(vit, make_method("ia-red2", keep=1.0, threshold=0.5))
    for block in model.blocks:
        block.is_sure = True
    with torch.no_grad():
        hard = model(images)
        soft = model.train()(images)
    assert torch.allclose(soft, hard, atol=1e-4)
    shares = torch.stack([block.drawn.share for block in model.blocks if block.interpreter is not None])
    assert (shares[1:] <= shares[:-1]).all()
    assert 0 < shares.min() < 1
    with torch.no_grad():
        alone = torch.cat([model.eval()(image[None]) for image in images])
    assert torch.allclose(alone, hard, atol=1e-4)  # whatever it is batched with


def test_ia_red2_is_rewarded_for_what_it_drops(vit: Any, images: Tensor) -> None:
    assert reward(torch.tensor([0.5, 0.5]), torch.tensor([True, False]), 0.7).tolist() == pytest.approx([0.75, -0.7])
    torch.manual_seed(0)
    model: Any = pmvit.compress(vit, make_method("ia-red2", keep=0.5, blocks=(1,))).train()
    model.head.bias.data[0] = 100.0  # right, whatever it drops
    optimizer = torch.optim.Adam(model.blocks[1].interpreter.parameters(), lr=0.02)
    shares = []
    for _ in range(25):
        logits = model(images)
        shares.append(float(model.blocks[1].drawn.share.mean()))
        loss = extra_loss(model, TrainingPass(images, logits, torch.zeros(4)))
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert sum(shares[-5:]) / 5 < shares[0] - 0.2
    assert extra_loss(model, None) is None


def test_weight_pruning_takes_what_is_zero() -> None:
    """A quarter of all channels does nothing: it goes, and the outputs stay, as does the scale of attention."""
    model: Any = small_vit()
    with torch.no_grad():
        for number, block in enumerate(model.blocks):
            block.mlp.fc1.weight[number::4] = 0
            block.mlp.fc1.bias[number::4] = 0
            block.mlp.fc2.weight[:, number::4] = 0
            rows = block.attn.qkv.weight.view(3, 3, 16, 48)  # of q, k, v, and heads
            rows[:, :, number::4] = 0
            block.attn.qkv.bias.view(3, 3, 16)[:, :, number::4] = 0
            block.attn.proj.weight.view(48, 3, 16)[:, :, number::4] = 0
    small: Any = pruned(model, 0.25, "magnitude", {})
    images = torch.randn(2, 3, 96, 96)
    assert [block.attn.head_dim for block in small.blocks] == [12, 12, 12]
    with torch.inference_mode():
        assert torch.allclose(small(images), model(images), atol=1e-4)


def test_weight_pruning_costs_what_it_should(vit: Any, images: Tensor) -> None:
    wanted = 0.7 * pmvit.flops(vit).gflops
    small, ratio = prune_weights(vit, wanted, "taylor", [images])
    assert pmvit.flops(small).gflops == pytest.approx(wanted, rel=0.02)
    assert 0 < ratio < 1
    assert [p.grad for p in small.parameters() if p.grad is not None] == []
    with pytest.raises(pmvit.PmvitError, match="give it images"):
        prune_weights(vit, wanted, "taylor")
