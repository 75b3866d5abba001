"""Prune and Merge, the idea in one file: merge tokens, run the block on fewer of them, put every token back.

`Z` holds the N tokens that enter a transformer block `B`. A plan sorts them into m groups; a token in no group is
pruned. Three constants follow from the plan:

- the merge matrix `M` (m x N): row g holds the weights with which the tokens of group g become one;
- the reconstruct matrix `R` (N x m): it hands what the block made of a group back to the group's members;
- the token mask `T` (N): 0 where a token is pruned, 1 elsewhere.

Two reconstructions:

- `pinv`, the paper's (Eq. 7): `Z' = R B(M Z) + (1 - T) Z`, with `R` the pseudo-inverse of `M`;
- `residual`, ours: `Z' = Z + R (B(M Z) - M Z)`, with `R` one for every member. Each token keeps its own residual
  stream and receives its group's update; a pruned token receives none.

N tokens go in and N come out, and nothing here depends on the input. Every column of `M` and every row of `R` has at
most one entry, so both products are sums over short runs of tokens (`segment_sum`), not dense matrix products.
"""

import inspect
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.fx
from torch import Tensor, nn

from pmvit.config.planning import PRUNED as PRUNED
from pmvit.config.planning import Reconstruct
from pmvit.config.training import Learn
from pmvit.wrapping import WrappedBlock

Made = TypeVar("Made")


class SparseRows(NamedTuple):
    """Where the entries of a sparse matrix are: row i has them in `columns[offsets[i]:offsets[i + 1]]`."""

    columns: Tensor
    offsets: Tensor


def merge_rows(groups: Tensor, num_groups: int) -> SparseRows:
    """Sparsity of M: one row a group, its entries at the group's members, in the order of the tokens."""
    members = torch.nonzero(groups != PRUNED).flatten()
    columns = members[torch.argsort(groups[members], stable=True)]
    sizes = torch.bincount(groups[columns], minlength=num_groups)
    return SparseRows(columns, torch.cumsum(sizes, 0) - sizes)


def reconstruct_rows(groups: Tensor) -> SparseRows:
    """Sparsity of R: one row a token, with one entry at its group; the row of a pruned token is empty."""
    is_member = (groups != PRUNED).long()
    return SparseRows(groups[groups != PRUNED], torch.cumsum(is_member, 0) - is_member)


def pseudo_inverse(groups: Tensor, weights: Tensor, num_groups: int) -> Tensor:
    """Weights of R = M^+ (Eq. 7), one a token: the groups are disjoint, so those of a group w are w / ||w||^2."""
    is_member = groups != PRUNED
    squared_norms = weights.new_zeros(num_groups).index_add(0, groups[is_member], weights[is_member] ** 2)
    inverse = torch.zeros_like(weights)
    inverse[is_member] = weights[is_member] / squared_norms[groups[is_member]]
    return inverse


def dense_matrix(rows: SparseRows, weights: Tensor, width: int) -> Tensor:
    """The matrix with these rows and weights, written out in full."""
    sizes = torch.diff(rows.offsets, append=rows.offsets.new_tensor([rows.columns.numel()]))
    matrix = weights.new_zeros(rows.offsets.numel(), width)
    row_of_entry = torch.repeat_interleave(torch.arange(sizes.numel(), device=sizes.device), sizes)
    matrix[row_of_entry, rows.columns] = weights
    return matrix


def repeat_rows(rows: SparseRows, batch: int, count: int) -> SparseRows:
    """The rows for a batch whose images stand one after the other in one table, `count` tokens each."""
    image = torch.arange(batch, device=rows.columns.device)[:, None]
    columns = (rows.columns + image * count).flatten()
    return SparseRows(columns, (rows.offsets + image * rows.columns.numel()).flatten())


def segment_sum(table: Tensor, rows: SparseRows, weights: Tensor) -> Tensor:
    """Multiply a sparse matrix with a (tokens, width) table: one weighted sum a row, in one kernel."""
    weights = weights if weights.dtype == table.dtype else weights.to(table.dtype)
    # What `F.embedding_bag(..., mode="sum")` calls; its checks would take as long as the sum itself.
    return torch.embedding_bag(table, rows.columns, rows.offsets, False, 0, False, weights)[0]


def merge(tokens: Tensor, matrix: Tensor | SparseRows, weights: Tensor | None = None) -> Tensor:
    """`M Z` (Eq. 4) for (batch, tokens, width) tokens, with M dense or as sparse rows and their weights."""
    if not isinstance(matrix, SparseRows):
        return torch.matmul(matrix.to(tokens.dtype), tokens)
    if weights is None:
        raise TypeError("sparse rows come with the weights of their entries; got none")
    batch, count, width = tokens.shape
    rows = repeat_rows(matrix, batch, count)
    return segment_sum(tokens.reshape(-1, width), rows, weights.repeat(batch)).view(batch, -1, width)


reconstruct = merge  # `R Y` (Eq. 7): the same product, from m tokens back to N


def pruned_shortcut(tokens: Tensor, token_mask: Tensor) -> Tensor:
    """`(1 - T) Z` (Eq. 5): the pruned tokens as they came, zero elsewhere."""
    return tokens * (1 - token_mask.to(tokens.dtype))[:, None]


@torch.fx.wrap  # one node of a traced graph
def _learned_product(tokens: Tensor, rows: SparseRows, prefix: Tensor, weights: Tensor, is_shared: Tensor) -> Tensor:
    """`merge` with the weights of prefix and patch tokens; that of a token alone in its group gets no gradient."""
    return merge(tokens, rows, torch.cat([prefix, torch.where(is_shared, weights, weights.detach())]))


@torch.fx.wrap
def _checked(tokens: Tensor, num_patches: int, num_prefix: int) -> Tensor:
    """The tokens, or a `ValueError` if they are not as many as a plan is for."""
    if tokens.shape[1] != num_patches + num_prefix:
        raise ValueError(
            f"expected {num_patches + num_prefix} tokens ({num_patches} patches + {num_prefix} prefix), "
            f"got {tokens.shape[1]}: a fixed plan is for one image size, and an adaptive one for any: "
            "bring the images to that size, or make an adaptive plan"
        )
    return tokens


def is_recorded(tokens: Tensor) -> bool:
    """Whether a graph is made of what happens to the tokens, by a compiler, torch.jit or torch.fx."""
    return torch.compiler.is_compiling() or type(tokens) is not Tensor or torch._C._is_tracing()


class LastMade(Generic[Made]):
    """A cache of one entry, whose key is a batch size and the like: in inference, call after call has the same."""

    def __init__(self) -> None:
        self._last: tuple[object, Made] | None = None

    def get(self, made_for: object, make: Callable[[], Made]) -> Made:
        """The entry, if it was made for this key; otherwise it is made now and kept in place of the last."""
        last = self._last  # another thread may replace it
        if last is None or last[0] != made_for:
            with torch.inference_mode(False), torch.no_grad():
                self._last = last = (made_for, make())
        return last[1]


class TokenMatrices(nn.Module):
    """M and R of some tokens, after the prefix tokens, which pass as identity rows and have no weights.

    The weights are parameters: with `learn="group"` one weight a token, so that training keeps the groups as planned;
    with `learn="dense"` the full matrices, which training may fill. A token alone in its group learns no weight: what
    reads it begins by normalising and is nearly blind to it, and a plain copy costs nothing later.

    Args:
        groups: The group of each token, `PRUNED` for none; every group 0 ... m - 1 has a member.
        weights: The weight of each token in its group; those of pruned tokens are not read.
        num_prefix: How many tokens stand before these.
        reconstruct: `residual` or `pinv`.
        learn: `group` or `dense`.
    """

    merge_weights: nn.Parameter
    reconstruct_weights: nn.Parameter
    merge_columns: Tensor
    merge_offsets: Tensor
    merge_shared: Tensor
    reconstruct_columns: Tensor
    reconstruct_offsets: Tensor
    reconstruct_shared: Tensor
    prefix_weights: Tensor

    def __init__(
        self,
        groups: Tensor,
        weights: Tensor,
        *,
        num_prefix: int = 0,
        reconstruct: Reconstruct = "residual",
        learn: Learn = "group",
    ) -> None:
        super().__init__()
        self.num_prefix, self.num_groups, self.num_patches = num_prefix, int(groups.max()) + 1, groups.numel()
        self.reconstruct, self.learn = reconstruct, learn
        self._repeated = {name: LastMade[tuple[SparseRows, Tensor]]() for name in ("merge", "reconstruct")}
        self._derive(prefix_weights=torch.ones(num_prefix))

        is_member = groups != PRUNED
        all_groups = torch.cat([torch.arange(num_prefix), torch.where(is_member, groups + num_prefix, PRUNED)])
        rows, members = merge_rows(all_groups, num_prefix + self.num_groups), torch.nonzero(is_member).flatten()
        self._hold("merge", rows, rows.columns[num_prefix:] - num_prefix, groups, weights)
        inverse = pseudo_inverse(groups, weights, self.num_groups) if reconstruct == "pinv" else is_member.to(weights)
        self._hold("reconstruct", reconstruct_rows(all_groups), members, groups, inverse)
        if learn == "dense":
            full = self.merge_matrix(), self.reconstruct_matrix()
            self.merge_weights, self.reconstruct_weights = (nn.Parameter(matrix.detach()) for matrix in full)

    def _hold(self, name: str, rows: SparseRows, tokens: Tensor, groups: Tensor, weights: Tensor) -> None:
        """Keep one of the two matrices, given the patch token that each of its entries is of."""
        is_shared = torch.bincount(groups[tokens]) > 1
        self.register_parameter(f"{name}_weights", nn.Parameter(weights[tokens]))
        derived = {"columns": rows.columns, "offsets": rows.offsets, "shared": is_shared[groups[tokens]]}
        self._derive(**{f"{name}_{kind}": buffer for kind, buffer in derived.items()})

    def _derive(self, **buffers: Tensor | None) -> None:
        """Keep what is derived from the plan beside the weights; it is not saved with them."""
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def extra_repr(self) -> str:
        return (
            f"{self.num_patches} -> {self.num_groups} patch tokens + {self.num_prefix} prefix, "
            f"reconstruct={self.reconstruct!r}, learn={self.learn!r}"
        )

    def merge_matrix(self) -> Tensor:
        """M over the patch tokens, dense (m x N)."""
        return self._dense("merge", self.merge_weights, self.num_patches)

    def reconstruct_matrix(self) -> Tensor:
        """R over the patch tokens, dense (N x m)."""
        return self._dense("reconstruct", self.reconstruct_weights, self.num_groups)

    def merge_tokens(self, tokens: Tensor) -> Tensor:
        """`M Z`: (batch, tokens, width) to (batch, groups, width)."""
        return self._product("merge", self.merge_weights, _checked(tokens, self.num_patches, self.num_prefix))

    def reconstruct_tokens(self, groups: Tensor) -> Tensor:
        """`R Y`: (batch, groups, width) to (batch, tokens, width), zero at pruned tokens."""
        return self._product("reconstruct", self.reconstruct_weights, groups)

    def _rows(self, name: str) -> SparseRows:
        return SparseRows(self.get_buffer(f"{name}_columns"), self.get_buffer(f"{name}_offsets"))

    def _dense(self, name: str, weights: Tensor, width: int) -> Tensor:
        if weights.dim() == 2:
            return weights
        columns, offsets = (index[self.num_prefix :] - self.num_prefix for index in self._rows(name))
        return dense_matrix(SparseRows(columns, offsets), weights, width)

    def _product(self, name: str, weights: Tensor, tokens: Tensor) -> Tensor:
        """What `merge` computes; in inference, rows and weights repeated for the last batch size are kept."""
        if self.learn == "dense":
            prefix, patches = tokens[:, : self.num_prefix], tokens[:, self.num_prefix :]
            return torch.cat([prefix, merge(patches, weights)], dim=1)
        if torch.is_grad_enabled() or is_recorded(tokens) or weights.is_inference():
            is_shared = self.get_buffer(f"{name}_shared")
            return _learned_product(tokens, self._rows(name), self.prefix_weights, weights, is_shared)
        batch, count, width = tokens.shape
        rows, all_weights = self._repeated[name].get(
            (batch, tokens.device, weights.dtype, weights.data_ptr(), weights._version),
            lambda: (
                repeat_rows(self._rows(name), batch, count),
                torch.cat([self.prefix_weights, weights]).repeat(batch),
            ),
        )
        return segment_sum(tokens.reshape(-1, width), rows, all_weights).view(batch, -1, width)


def argument_names(block: nn.Module) -> tuple[str, ...]:
    """What a block takes after the tokens, by place or name."""
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(block.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is named)[1:]


def named_arguments(names: tuple[str, ...], positional: tuple[Any, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    """What a block is called with after the tokens, all by name."""
    if len(positional) > len(names):
        raise TypeError(f"expected at most {len(names)} arguments after the tokens, got {len(positional)}")
    return {**dict(zip(names, positional, strict=False)), **arguments}


class PruneMerge(TokenMatrices, WrappedBlock):
    """A transformer block that runs on merged tokens: N tokens in, m through the block, N out.

    The block is held as it is and never changed; its M and R are those of `TokenMatrices`, where the block is and in
    the type of its weights.

    Args:
        block: The block to wrap: called with tokens of shape (batch, tokens, width), it returns the same shape, or a
            tuple that begins with it. (The wrapper itself also takes tokens as they lie in their grid.)
        groups: The group of each patch token, `PRUNED` for none; every group 0 ... m - 1 has a member.
        centres: The patch token that stands for each group where the host needs a position.
        weights: The weight of each patch token in its group; those of pruned tokens are not read.
        attention_bias: Add the logarithm of each group's size to its attention scores.
        arguments_at_centres: Reduces the other arguments of a block call (rotary embedding, masks) to the group
            centres. It gets this module and the call's keyword arguments and returns those for the block.
        num_prefix: As in `TokenMatrices`, like `reconstruct` and `learn`.
    """

    centres: Tensor
    patch_centres: Tensor
    token_mask: Tensor
    log_sizes: Tensor | None

    def __init__(
        self,
        block: nn.Module,
        groups: Tensor,
        centres: Tensor,
        weights: Tensor,
        *,
        attention_bias: bool = False,
        arguments_at_centres: Callable[["PruneMerge", dict[str, Any]], dict[str, Any]] | None = None,
        num_prefix: int = 0,
        reconstruct: Reconstruct = "residual",
        learn: Learn = "group",
    ) -> None:
        super().__init__(groups, weights, num_prefix=num_prefix, reconstruct=reconstruct, learn=learn)
        self.arguments_at_centres = arguments_at_centres
        self.argument_names = argument_names(block)
        prefix = torch.arange(num_prefix)
        sizes = torch.cat([torch.ones_like(prefix), torch.bincount(groups[groups != PRUNED])])
        self._derive(
            centres=torch.cat([prefix, centres + num_prefix]),
            patch_centres=centres,
            token_mask=torch.cat([torch.ones(num_prefix), (groups != PRUNED).float()]),
            log_sizes=sizes.float().log() if attention_bias else None,
        )
        self.to(next(block.parameters(), self.merge_weights))
        self.training = block.training
        self.block = block

    def forward(self, tokens: Tensor, *positional: Any, **arguments: Any) -> Any:
        shape = tokens.shape
        tokens = tokens.flatten(1, -2)  # rows and columns of a grid, if they come so
        merged = self.merge_tokens(tokens)
        output = self.block(merged, **self.block_arguments(positional, arguments))
        if isinstance(output, tuple):
            return (self._leave(tokens, merged, output[0]).view(shape), *output[1:])
        return self._leave(tokens, merged, output).view(shape)

    def block_arguments(self, positional: tuple[Any, ...], arguments: dict[str, Any]) -> dict[str, Any]:
        """What the block is called with beside the tokens, all by name and reduced to the groups."""
        arguments = named_arguments(self.argument_names, positional, arguments)
        return arguments if self.arguments_at_centres is None else self.arguments_at_centres(self, arguments)

    def _leave(self, tokens: Tensor, merged: Tensor, output: Tensor) -> Tensor:
        if self.reconstruct == "pinv":
            return self.reconstruct_tokens(output).add_(pruned_shortcut(tokens, self.token_mask))
        return self.reconstruct_tokens(output - merged).add_(tokens)
