"""What a block holds, or is called with, per token: reduced to the groups that the block runs on."""

from typing import TypeVar

import torch
import torch.fx
from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock
from pmvit.prune_merge import PruneMerge

AnyBias = TypeVar("AnyBias", Tensor, None)


def select_tokens(tensor: Tensor, tokens: Tensor, *dims: int) -> Tensor:
    """Keep only `tokens` along each of the dimensions of a tensor.

    If each image has its own, (batch, count), the tensor becomes one of (batch, heads or 1, ...) for every image.
    """
    if tokens.dim() == 1:
        for dim in dims:
            tensor = tensor.index_select(dim, tokens)
        return tensor
    tensor = tensor[(None,) * (4 - tensor.dim())].expand(tokens.shape[0], -1, -1, -1)
    for dim in dims:
        places = tokens[:, None, :, None] if dim == -2 else tokens[:, None, None]
        shape = list(tensor.shape)
        shape[dim] = tokens.shape[1]
        tensor = tensor.gather(dim, places.expand(shape))
    return tensor


@torch.fx.wrap  # a traced model does not know yet whether it will be given a mask
def bias_at_centres(bias: AnyBias, centres: Tensor) -> AnyBias:
    """Keep the rows and columns of the centres of a bias or mask; a dimension of size 1 is broadcast and stays."""
    if bias is None:
        return bias
    return select_tokens(bias, centres, *(dim for dim in (-2, -1) if bias.shape[dim] > 1))


@torch.fx.wrap
def add_log_sizes(bias: Tensor | None, log_sizes: Tensor) -> Tensor:
    """Add the logarithm of each key's group size to the bias; a boolean mask becomes an additive one."""
    log_sizes = log_sizes.reshape(-1, 1, 1, log_sizes.shape[-1])  # they may differ from image to image
    if bias is None:
        return log_sizes
    if bias.dtype == torch.bool:
        return torch.where(bias, log_sizes, float("-inf"))
    return bias + log_sizes.to(bias.dtype)


class OfGroups(nn.Module):
    """Something inside a wrapped block that depends on its groups.

    Args:
        wrapper: Of the block. A fixed plan's groups are kept, those of an adaptive one asked for in every pass.
    """

    centres: Tensor | None
    log_sizes: Tensor | None

    def __init__(self, wrapper: PruneMerge | AdaptiveBlock) -> None:
        super().__init__()
        fixed = wrapper if isinstance(wrapper, PruneMerge) else None
        self.channel = None if isinstance(wrapper, PruneMerge) else wrapper.channel
        self.register_buffer("centres", None if fixed is None else fixed.centres, persistent=False)
        self.register_buffer("log_sizes", None if fixed is None else fixed.log_sizes, persistent=False)

    def groups(self, tensor: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The centre of each group, and what is added to its scores; the tensor is one that the block works with.

        Outside of an adaptive block there are no groups.
        """
        if self.channel is None:
            return self.centres, self.log_sizes
        found = self.channel.groups(tensor)
        return (None, None) if found is None else (found.centres, found.log_sizes)

    def bias_of_sizes(self, tensor: Tensor) -> Tensor | None:
        """What is added to attention scores, (batch or 1, 1, 1, groups), if anything; the tensor as in `groups`."""
        _, log_sizes = self.groups(tensor)
        return None if log_sizes is None else add_log_sizes(None, log_sizes.to(tensor))
