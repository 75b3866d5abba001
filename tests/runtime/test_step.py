"""The step of adaptive plans for graphs, beside the step that it stands for."""

import pytest
import torch

from pmvit.adaptive import MergeStep, places_after
from pmvit.runtime.blocks.step import GraphStep


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("has_sizes", [False, True])
@pytest.mark.parametrize("are_alike", [False, True])
@pytest.mark.parametrize(("num_prefix", "count", "merges"), [(1, 16, 6), (0, 9, 8), (5, 30, 1)])
def test_it_merges_the_same_tokens(
    explicit: bool, has_sizes: bool, are_alike: bool, num_prefix: int, count: int, merges: int
) -> None:
    torch.manual_seed(0)
    tokens = torch.randn(3, num_prefix + count, 12)
    if are_alike:  # as on a white background: all distances are the same
        tokens[:, num_prefix + 2 :] = tokens[:, num_prefix + 1 : num_prefix + 2]
    sizes = torch.randint(1, 9, (3, num_prefix + count, 1)).float() if has_sizes else None
    step = MergeStep(torch.randn(12, 4), count, merges, num_prefix)
    merged, new_sizes, choice = step(tokens, sizes, count)
    found, found_sizes, found_choice = GraphStep(step, explicit)(tokens, sizes, count)
    assert torch.equal(found_choice.order, choice.order)
    assert torch.equal(found_choice.into, choice.into)
    assert torch.equal(places_after(found_choice), places_after(choice))
    assert torch.equal(found_sizes, new_sizes)
    assert torch.allclose(found, merged, atol=1e-5)
