"""PS-ViT (Patch Slimming; Tang et al., CVPR 2022, arXiv:2106.02852), written from the paper for comparison.

Each block computes only some patches, the same in every image; a patch that a block leaves out is gone for all blocks
after it. In block l, the patches of its mask m_l attend to all that the block before computed. Masks are found from
the last block, of which the class token alone is needed, back to the first: what a patch is worth in block t is

    s_t,i = || A_t[:, i] U_t[i, :] ||_F^2,   A_t = prod_{l = t+1 ... L} diag(m_l) P_l,   U_t = P_t |Z_{t-1}|

with P the attention and Z the tokens, the mean over images. Block t computes what block t + 1 computes, and of the
others those that are worth most, until what is left out is within a tolerance.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from pmvit.data.batches import unpack
from pmvit.errors import PmvitError
from pmvit.hosts.modes import evaluation_mode
from pmvit.hosts.outputs import predict
from pmvit.methods.attention import attend, attend_from, mlp_update
from pmvit.methods.base import Encoder, Method, MethodBlock, Site, check_size, encoder_of

IMAGES = 64  # to choose by: attention maps of all blocks are kept


class Observed(NamedTuple):
    """Of images: attention of every block, the mean over heads, (blocks, images, tokens, tokens); and the squared
    lengths of the rows of U, (blocks, images, tokens)."""

    maps: Tensor
    lengths: Tensor
    num_prefix: int


class PsBlock(MethodBlock):
    """A block that computes the tokens at some places of those it gets."""

    places: Tensor

    def __init__(self, block: nn.Module, site: Site, places: Tensor, num_tokens: int) -> None:
        super().__init__(block, site)
        self.num_tokens = num_tokens
        self.register_buffer("places", places, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        check_size(tokens, self.num_tokens)
        update = attend_from(self.block, tokens, self.places)
        tokens = tokens[:, self.places] + update
        return tokens + mlp_update(self.block, tokens)


def observe(encoder: Encoder, model: nn.Module, batches: Iterable[Tensor]) -> Observed:
    """What masks are chosen by."""
    maps: list[list[Tensor]] = [[] for _ in encoder.blocks]
    lengths: list[list[Tensor]] = [[] for _ in encoder.blocks]

    def watch(number: int) -> Any:
        def hook(block: nn.Module, inputs: tuple[Any, ...]) -> None:
            found = attend(block, inputs[0], maps=True).maps
            if found is not None:
                mean = found.mean(1)
                maps[number].append(mean.cpu())
                lengths[number].append((mean @ inputs[0].abs()).square().sum(-1).cpu())

        return hook

    handles = [block.register_forward_pre_hook(watch(number)) for number, block in enumerate(encoder.blocks)]
    device = next(encoder.parameters()).device
    try:
        with evaluation_mode(model), torch.no_grad():
            for images in batches:
                predict(model, images.to(device))
    finally:
        for handle in handles:
            handle.remove()
    joined = [torch.stack([torch.cat(of_block) for of_block in kind]) for kind in (maps, lengths)]
    return Observed(joined[0], joined[1], encoder.num_prefix_tokens)


def choose(observed: Observed, tolerance: float) -> list[int]:
    """For each patch, how many of the blocks compute it, if they may leave out this share of what patches are worth."""
    maps, lengths, num_prefix = observed
    depth, images, num_tokens, _ = maps.shape
    is_needed = torch.arange(num_tokens) < num_prefix  # by the last block
    blocks = torch.zeros(num_tokens, dtype=torch.long)
    reach = torch.eye(num_tokens)[:num_prefix].expand(images, -1, -1)
    for block in range(depth - 2, -1, -1):
        reach = (reach * is_needed) @ maps[block + 1]  # those rows of A that the output reads
        worth = (reach.square().sum(1) * lengths[block]).double().mean(0)
        worth[:num_prefix] = 0
        others = worth.masked_fill(is_needed, 0)
        order = others.argsort(descending=True, stable=True)
        left_out = others[order].flip(0).cumsum(0).flip(0)  # if so many of the others are computed
        is_needed = is_needed.clone()
        is_needed[order[: int((left_out > tolerance * worth.sum()).sum())]] = True
        blocks += is_needed
    return blocks[num_prefix:].tolist()


@dataclass(frozen=True)
class PsVit(Method):
    """Patch slimming: patches that are the same in every image, chosen from the last block to the first.

    Attributes:
        tolerance: The share of what patches are worth that a block may leave out.
        blocks_per_patch: How many of the blocks, first to last, compute each patch; what `fit` chooses.
    """

    name = "ps-vit"
    title = "PS-ViT"
    needs_class_token = True
    needs_class_pooling = True
    needs_images = True
    old_options: ClassVar = {"lives": "blocks_per_patch"}

    tolerance: float
    blocks_per_patch: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance <= 1:
            raise PmvitError(f"tolerance: expected a share of what patches are worth, 0 to 1; got {self.tolerance}")

    @classmethod
    def options_at(cls, strength: float, encoder: Encoder, options: dict[str, Any]) -> dict[str, Any]:
        return {"tolerance": strength}

    @classmethod
    def observe(cls, model: nn.Module, data: Iterable[Any]) -> Observed:
        batches: list[Tensor] = []
        for batch in data:
            batches.append(unpack(batch)[0][: IMAGES - sum(map(len, batches))])
            if sum(map(len, batches)) == IMAGES:
                break
        if not batches:
            raise PmvitError(f"expected images for {cls.name} to choose patches by; got none")
        return observe(encoder_of(model), model, batches)

    def choose(self, observed: Observed) -> "PsVit":
        return replace(self, blocks_per_patch=tuple(choose(observed, self.tolerance)))

    def block_for(self, block: nn.Module, site: Site) -> PsBlock:
        if self.blocks_per_patch is None:
            raise PmvitError(f"{self.name} chooses its patches by looking at images: give it some (fit, --data)")
        if len(self.blocks_per_patch) != site.num_patches:
            raise PmvitError(
                f"blocks_per_patch: expected one number for each of the {site.num_patches} patches; got "
                f"{len(self.blocks_per_patch)}"
            )
        blocks = torch.tensor([*[site.depth] * site.num_prefix, *self.blocks_per_patch])
        left = blocks[blocks >= site.number]  # the block before computed these
        return PsBlock(block, site, (left > site.number).nonzero().flatten(), len(left))
