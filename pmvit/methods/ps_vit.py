"""PS-ViT (Patch Slimming; Tang et al., CVPR 2022, arXiv:2106.02852), written from the paper for comparison.

Each block computes only some patches, the same in every image; a patch that a block leaves out is gone for all blocks
after it. In block l, the patches of its mask m_l attend to all that the block before computed. Masks are found from
the last block, of which the class token alone is needed, back to the first: what a patch is worth in block t is

    s_t,i = || A_t[:, i] U_t[i, :] ||_F^2,   A_t = prod_{l = t+1 ... L} diag(m_l) P_l,   U_t = P_t |Z_{t-1}|

with P the attention and Z the tokens, the mean over images. Block t computes what block t + 1 computes, and of the
others those that are worth most, until what is left out is within a tolerance.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from pmvit.data.batches import first_images
from pmvit.data.opening import ImageData, as_loader
from pmvit.errors import PmvitError
from pmvit.hosts.modes import evaluation_mode
from pmvit.hosts.outputs import predict
from pmvit.methods.attention import attend, finish, fused, mlp_update, project
from pmvit.methods.base import Encoder, Method, MethodBlock, Site, check_size, encoder_of

IMAGES = 64  # to choose by: attention maps of all blocks are kept
AT_A_TIME = 16


class Observed(NamedTuple):
    """Of images: attention of every block, the mean over heads, (blocks, images, tokens, tokens); and the squared
    lengths of the rows of U, (blocks, images, tokens)."""

    maps: Tensor
    lengths: Tensor
    num_prefix: int


class PsBlock(MethodBlock["PsVit"]):
    """A block that computes the tokens at some places of those it gets."""

    places: Tensor

    def __init__(self, block: Any, site: Site, method: "PsVit") -> None:
        super().__init__(block, site, method)
        blocks = torch.tensor([*[site.depth] * site.num_prefix, *(method.blocks_per_patch or ())])
        left = blocks[blocks >= site.number]  # the block before computed these
        self.num_tokens = len(left)
        self.register_buffer("places", (left > site.number).nonzero().flatten(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        check_size(tokens, self.num_tokens)
        normed: Tensor = self.block.norm1(tokens)
        query = project(self.block, normed[:, self.places], 0)
        found = fused(self.block, query, project(self.block, normed, 1), project(self.block, normed, 2))
        tokens = tokens[:, self.places] + finish(self.block, found)
        return tokens + mlp_update(self.block, tokens)


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
    block_class = PsBlock
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
    def observe(cls, model: nn.Module, data: ImageData) -> Observed:
        encoder = encoder_of(model)
        seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {block: [] for block in encoder.blocks}

        def watch(block: nn.Module, inputs: tuple[Tensor]) -> None:
            maps = attend(block, inputs[0], maps=True).maps.mean(1)
            seen[block].append((maps.cpu(), (maps @ inputs[0].abs()).square().sum(-1).cpu()))

        with ExitStack() as hooks, evaluation_mode(model), torch.no_grad():
            for block in seen:
                hooks.enter_context(block.register_forward_pre_hook(watch))
            for images in first_images(as_loader(model, data, labels=False, shuffle=True), IMAGES).split(AT_A_TIME):
                predict(model, images.to(next(encoder.parameters()).device))
        maps, lengths = (torch.stack([torch.cat([one[kind] for one in of]) for of in seen.values()]) for kind in (0, 1))
        return Observed(maps, lengths, encoder.num_prefix_tokens)

    def choose(self, observed: Observed) -> "PsVit":
        return replace(self, blocks_per_patch=tuple(choose(observed, self.tolerance)))

    def wraps(self, site: Site) -> bool:
        if self.blocks_per_patch is None:
            raise PmvitError(f"{self.name} chooses its patches by looking at images: give it some (fit, --data)")
        if len(self.blocks_per_patch) != site.num_patches:
            raise PmvitError(
                f"blocks_per_patch: expected one number for each of the {site.num_patches} patches; got "
                f"{len(self.blocks_per_patch)}"
            )
        return True
