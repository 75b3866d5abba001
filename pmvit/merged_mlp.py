"""The MLP of a block on fewer tokens than its attention: merged once more before it, all of them updated after (ours).

A block adds two updates to its tokens `Y`, that of attention and then that of the MLP. Attention asks for tokens that
tell places apart, the MLP is what costs most; so a plan may give the MLP groups of its own, each a union of groups that
attention runs on, and the block computes `Y + R mlp(norm(M Y))` in place of `Y + mlp(norm(Y))`. Both modules take the
place of the host's own modules, so the host's block runs as it is.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pmvit.flow import Channel
from pmvit.prune_merge import TokenMatrices


class MeanOfPatches(nn.Module):
    """M and R of one group of all patch tokens: for the last MLP where nobody reads them behind it.

    Args:
        num_prefix: Tokens before the patch tokens, which stay apart.
        channel: Of the adaptive block around it, which knows how many patch tokens there are.
    """

    num_groups = 1

    def __init__(self, num_prefix: int, channel: Channel) -> None:
        super().__init__()
        self.num_prefix, self.channel = num_prefix, channel

    def extra_repr(self) -> str:
        return f"all -> 1 patch tokens + {self.num_prefix} prefix"

    def merge_tokens(self, tokens: Tensor) -> Tensor:
        """Prefix tokens and the mean of the others."""
        prefix, patches = tokens[:, : self.num_prefix], tokens[:, self.num_prefix :]
        return torch.cat([prefix, patches.mean(1, keepdim=True)], dim=1)

    def reconstruct_tokens(self, groups: Tensor) -> Tensor:
        """Prefix tokens, and for every other the same."""
        of_block = self.channel.groups(groups)
        if of_block is None:
            raise RuntimeError("expected an MLP that runs on the mean of patches to run inside its adaptive block")
        return self.spread(groups, of_block.centres.shape[1])

    def spread(self, groups: Tensor, count: int) -> Tensor:
        """The same, for so many tokens in all."""
        prefix, mean = groups[:, : self.num_prefix], groups[:, self.num_prefix :]
        return torch.cat([prefix, mean.expand(-1, count - self.num_prefix, -1)], dim=1)


class MergedNorm(nn.Module):
    """What normalises tokens before an MLP, on groups of them: `norm(M Y)`."""

    def __init__(self, norm: nn.Module, matrices: TokenMatrices | MeanOfPatches) -> None:
        super().__init__()
        self.norm = norm
        self.matrices = matrices

    def forward(self, tokens: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.matrices.merge_tokens(tokens.flatten(1, -2)))  # of a grid, if they come so
        return normed


class SpreadMlp(nn.Module):
    """An MLP on groups of tokens, whose updates go to all members: `R mlp(...)`.

    Args:
        mlp: The host's.
        matrices: Those of the norm before it.
        rows: Of the grid in which the block has its tokens; `None` if they stand one after the other.
    """

    def __init__(self, mlp: nn.Module, matrices: TokenMatrices | MeanOfPatches, rows: int | None = None) -> None:
        super().__init__()
        self.mlp, self.rows = mlp, rows
        self._matrices = (matrices,)  # the norm's: in a tuple, so that it is not a second owner of the weights

    def forward(self, groups: Tensor, *positional: Any, **arguments: Any) -> Tensor:
        tokens = self._matrices[0].reconstruct_tokens(self.mlp(groups, *positional, **arguments))
        return tokens if self.rows is None else tokens.unflatten(1, (self.rows, -1))


def groups_of_groups(attention: Tensor, groups: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The group in a block's MLP of each group in its attention, and its weight there.

    Args:
        attention: The group of each patch token in attention.
        groups: The group of each patch token in the MLP; those of one group in attention are in one here.
        weights: The weight of each patch token in the MLP's group.
    """
    count = int(attention.max()) + 1
    of_groups = torch.zeros(count, dtype=groups.dtype).index_copy(0, attention, groups)
    return of_groups, torch.zeros(count, dtype=weights.dtype).index_add(0, attention, weights)


def mlp_matrices_of(block: nn.Module, parts: tuple[str, ...] | None) -> TokenMatrices | MeanOfPatches | None:
    """M and R before and after the MLP of a block, `None` if its MLP runs on all its tokens."""
    norm = block.get_submodule(parts[0]) if parts is not None else None
    return norm.matrices if isinstance(norm, MergedNorm) else None


def unwrapped(part: nn.Module) -> nn.Module:
    """The host's own module of one that may stand in for it."""
    if isinstance(part, MergedNorm):
        return part.norm
    return part.mlp if isinstance(part, SpreadMlp) else part
