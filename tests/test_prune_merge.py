"""The mathematics: M, R and the wrapper, against their definitions."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pmvit.config.planning import Reconstruct
from pmvit.config.training import Learn
from pmvit.prune_merge import (
    PRUNED,
    PruneMerge,
    dense_matrix,
    merge,
    merge_rows,
    pruned_shortcut,
    pseudo_inverse,
    reconstruct,
    reconstruct_rows,
)


def random_groups(num_tokens: int, num_groups: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of random size, some tokens pruned; their first members as centres; random weights."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_tokens, generator=generator)
    groups = torch.full((num_tokens,), PRUNED)
    groups[order[:num_groups]] = torch.arange(num_groups)
    rest = order[num_groups:]
    groups[rest] = torch.randint(PRUNED, num_groups, (len(rest),), generator=generator)
    centres = torch.stack([torch.nonzero(groups == group)[0, 0] for group in range(num_groups)])
    weights = torch.rand(num_tokens, generator=generator, dtype=torch.float64) + 0.1
    return groups, centres, weights


class Toy(nn.Module):
    """A block that mixes tokens, so that it matters which ones it sees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + torch.tanh(self.mix(tokens)) * tokens.mean(1, keepdim=True)


@given(st.integers(2, 40), st.data())
@settings(max_examples=40, deadline=None)
def test_closed_form_is_the_pseudo_inverse(num_tokens: int, data: st.DataObject) -> None:
    num_groups = data.draw(st.integers(1, num_tokens))
    groups, _, weights = random_groups(num_tokens, num_groups, seed=num_tokens)
    rows = merge_rows(groups, num_groups)
    matrix = dense_matrix(rows, weights[rows.columns], num_tokens)
    inverse = pseudo_inverse(groups, weights, num_groups)[groups != PRUNED]
    back = dense_matrix(reconstruct_rows(groups), inverse, num_groups)
    assert torch.allclose(back, torch.linalg.pinv(matrix), atol=1e-12)


def test_l2_normalised_rows_have_their_transpose_as_inverse() -> None:
    groups = torch.tensor([0, 0, 1, PRUNED])
    weights = torch.tensor([0.6, 0.8, 1.0, 0.0])
    assert torch.allclose(pseudo_inverse(groups, weights, 2), weights)


def test_merge_by_hand() -> None:
    tokens = torch.tensor([[[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]]])
    groups = torch.tensor([1, 0, 1, PRUNED])
    weights = torch.tensor([0.5, 1.0, 0.25, 9.0])
    rows = merge_rows(groups, 2)
    merged = merge(tokens, rows, weights[rows.columns])
    assert torch.equal(merged, torch.tensor([[[2.0, 20.0], [1.25, 12.5]]]))
    returned = reconstruct(merged, reconstruct_rows(groups), torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(returned, torch.tensor([[[1.25, 12.5], [4.0, 40.0], [3.75, 37.5], [0.0, 0.0]]]))
    mask = (groups != PRUNED).float()
    assert torch.equal(pruned_shortcut(tokens, mask), torch.tensor([[[0.0, 0.0]] * 3 + [[4.0, 40.0]]]))


@pytest.mark.parametrize("num_prefix", [0, 1, 5])
@pytest.mark.parametrize("reconstruction", ["pinv", "residual"])
@pytest.mark.parametrize("seed", range(3))
def test_group_and_dense_form_are_the_formula(num_prefix: int, reconstruction: Reconstruct, seed: int) -> None:
    torch.manual_seed(seed)
    num_tokens, num_groups, width = 30, 13, 8
    groups, centres, weights = random_groups(num_tokens, num_groups, seed)
    block = Toy(width)
    tokens = torch.randn(3, num_prefix + num_tokens, width, dtype=torch.float64)
    outputs = {}
    for learn in ("group", "dense"):
        wrapper = PruneMerge(
            block, groups, centres, weights, num_prefix=num_prefix, reconstruct=reconstruction, learn=learn
        ).double()
        outputs[learn] = wrapper(tokens)
        assert wrapper.block is block
    # Eq. 4-7 with matrices written out, prefix tokens as identity rows; the parameters are float32.
    identity = torch.eye(num_prefix, dtype=torch.float64)
    merging = torch.block_diag(identity, wrapper.merge_matrix().detach())
    mask = torch.cat([torch.ones(num_prefix), (groups != PRUNED).double()])[:, None]
    merged = merging @ tokens
    if reconstruction == "pinv":
        expected = torch.linalg.pinv(merging) @ block(merged) + (1 - mask) * tokens
    else:
        update = block(merged) - merged
        group_of_token = torch.cat([torch.arange(num_prefix), groups + num_prefix])
        expected = tokens + mask * update[:, group_of_token.clamp(min=0)]
    for output in outputs.values():
        assert torch.allclose(output, expected, atol=1e-5)


@pytest.mark.parametrize("learn", ["group", "dense"])
@pytest.mark.parametrize("reconstruction", ["pinv", "residual"])
def test_pruned_tokens_pass_by_unchanged(learn: Learn, reconstruction: Reconstruct) -> None:
    groups, centres, weights = random_groups(30, 9, seed=2)
    wrapper = PruneMerge(Toy(8), groups, centres, weights, num_prefix=1, reconstruct=reconstruction, learn=learn)
    tokens = torch.randn(2, 31, 8, dtype=torch.float64)
    output = wrapper.double()(tokens)
    pruned = torch.nonzero(groups == PRUNED).flatten() + 1
    assert len(pruned) > 0
    assert torch.equal(output[:, pruned], tokens[:, pruned])
    others = torch.nonzero(groups != PRUNED).flatten() + 1
    assert not torch.isclose(output[:, others], tokens[:, others]).all(-1).any()


def test_members_of_a_group_receive_one_update() -> None:
    groups = torch.tensor([0, 0, 0, 1])
    wrapper = PruneMerge(Toy(4), groups, torch.tensor([1, 3]), torch.tensor([0.2, 0.5, 0.3, 1.0])).double()
    tokens = torch.randn(1, 4, 4, dtype=torch.float64)
    update = wrapper(tokens) - tokens
    assert torch.allclose(update[:, 0], update[:, 1])
    assert torch.allclose(update[:, 0], update[:, 2])
    assert not torch.allclose(update[:, 0], update[:, 3])


def test_prefix_tokens_are_alone_whatever_is_learned() -> None:
    groups, centres, weights = random_groups(12, 5, seed=0)
    for learn in ("group", "dense"):
        wrapper = PruneMerge(nn.Identity(), groups, centres, weights, num_prefix=2, reconstruct="pinv", learn=learn)
        with torch.no_grad():
            wrapper.merge_weights.normal_()
            wrapper.reconstruct_weights.normal_()
        tokens = torch.randn(1, 14, 3)
        assert torch.equal(wrapper(tokens)[:, :2], tokens[:, :2])


def test_training_keeps_the_support_in_group_mode_and_fills_it_in_dense_mode() -> None:
    groups, centres, weights = random_groups(20, 8, seed=1)
    rows = merge_rows(groups, 8)
    support = dense_matrix(rows, torch.ones(len(rows.columns)), 20) != 0
    for learn in ("group", "dense"):
        torch.manual_seed(0)
        wrapper = PruneMerge(Toy(6), groups, centres, weights, learn=learn).double()
        before = copy.deepcopy(wrapper)
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        wrapper(torch.randn(4, 20, 6, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        for name in ("merge_matrix", "reconstruct_matrix"):
            now, then = getattr(wrapper, name)().detach(), getattr(before, name)().detach()
            inside = support if name == "merge_matrix" else support.T
            assert not torch.isclose(now[inside], then[inside]).all()
            assert bool((now[~inside] == 0).all()) == (learn == "group")


def test_wrong_number_of_tokens_is_named() -> None:
    wrapper = PruneMerge(nn.Identity(), torch.tensor([0, 0]), torch.tensor([0]), torch.ones(2), num_prefix=1)
    with pytest.raises(ValueError, match=r"expected 3 tokens \(2 patches \+ 1 prefix\), got 5: a fixed plan is for"):
        wrapper(torch.zeros(1, 5, 4))


def test_what_is_kept_between_calls_follows_the_weights_and_the_batch() -> None:
    groups, centres, weights = random_groups(20, 8, seed=3)
    wrapper = PruneMerge(Toy(6), groups, centres, weights, num_prefix=1).double()
    tokens = torch.randn(4, 21, 6, dtype=torch.float64)
    with torch.inference_mode():
        first = wrapper(tokens)
        assert torch.allclose(wrapper(tokens[:2]), first[:2])
        assert torch.allclose(wrapper(tokens[:1]), first[:1])
        assert torch.allclose(copy.deepcopy(wrapper)(tokens), first)
    with torch.no_grad():
        wrapper.merge_weights.mul_(2)
        assert not torch.allclose(wrapper(tokens[:1]), first[:1])
    assert torch.allclose(wrapper(tokens), wrapper.eval()(tokens))
    trained = wrapper(tokens)  # with gradients, after inference mode
    trained.sum().backward()
    assert wrapper.merge_weights.grad is not None
    with torch.inference_mode():
        assert torch.allclose(wrapper(tokens), trained)
        wrapper.merge_weights = nn.Parameter(wrapper.merge_weights.detach().clone() * 3)
        assert not torch.allclose(wrapper(tokens), trained)
