"""Token Merging (ToMe; Bolya et al., ICLR 2023, arXiv:2210.09461), written from the paper for comparison.

In every block, between attention and MLP, the r most similar pairs of tokens become one. Which ones they are is found
anew for every image, by *bipartite soft matching* (Section 3): tokens are split alternately into two sets; each token
of the first points at its most similar one of the second, by the cosine of their keys (mean over heads); the r
strongest of these edges are merged. Attention to a merged token counts for all patches in it (Eq. 1).
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.models.timm_inference import is_plain


def match(keys: Tensor, r: int, num_protected: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bipartite soft matching of (batch, tokens, width) keys.

    Returns:
        For each image, places in the first set (even tokens) that stay and that are merged, and for the latter the
        places in the second set (odd tokens) that they are merged into.
    """
    unit = F.normalize(keys, dim=-1)
    similarity = unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)
    if num_protected:
        first, second = (num_protected + 1) // 2, num_protected // 2
        similarity[:, :first] = -torch.inf
        similarity[:, :, :second] = -torch.inf
    strength, partner = similarity.max(-1)
    by_strength = strength.argsort(dim=-1, descending=True)
    merged, stays = by_strength[:, :r], by_strength[:, r:].sort(dim=1).values
    return stays, merged, partner.gather(1, merged)


def merge_matched(
    tokens: Tensor, sizes: Tensor, matched: tuple[Tensor, Tensor, Tensor], num_protected: int
) -> tuple[Tensor, Tensor]:
    """Average the matched tokens, weighted by how many patches each stands for; return them and the new sizes.

    The protected tokens stay in front, as they were.
    """

    def summed(values: Tensor) -> Tensor:
        stays, merged, into = (index[..., None].expand(-1, -1, values.shape[-1]) for index in matched)
        even, odd = values[:, ::2], values[:, 1::2]
        sets = even.gather(1, stays), odd.scatter_add(1, into, even.gather(1, merged))
        front = [sets[place % 2][:, place // 2, None] for place in range(num_protected)]
        return torch.cat([*front, sets[0][:, (num_protected + 1) // 2 :], sets[1][:, num_protected // 2 :]], dim=1)

    new_sizes = summed(sizes)
    return summed(tokens * sizes) / new_sizes, new_sizes


class TomeBlock(nn.Module):
    """timm's block with r tokens merged between attention and MLP; tokens and their sizes travel side by side."""

    def __init__(self, block: nn.Module, r: int, num_prefix: int, is_last: bool, always_match: bool) -> None:
        super().__init__()
        self.block = block
        self.r = r
        self.always_match = always_match
        self.num_prefix = num_prefix
        self.is_last = is_last

    def forward(self, state: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        is_first = not isinstance(state, tuple)  # all tokens are of one patch
        tokens, sizes = state if isinstance(state, tuple) else (state, state.new_ones(*state.shape[:2], 1))
        block: Any = self.block
        update, keys = self._attend(block.norm1(tokens), None if is_first else sizes)
        tokens = tokens + block.ls1(update)
        r = min(self.r, (tokens.shape[1] - self.num_prefix) // 2)
        if r > 0 or self.always_match:
            tokens, sizes = merge_matched(tokens, sizes, match(keys, r, self.num_prefix), self.num_prefix)
        tokens = tokens + block.ls2(block.mlp(block.norm2(tokens)))
        return tokens if self.is_last else (tokens, sizes)

    def _attend(self, tokens: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor]:
        attention: Any = self.block.attn
        batch, count, _ = tokens.shape
        qkv = attention.qkv(tokens).reshape(batch, count, 3, attention.num_heads, attention.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = attention.q_norm(query), attention.k_norm(key)
        bias = None if sizes is None else sizes.log().transpose(1, 2)[:, None]  # the same for every query
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        output = attention.proj(attended.transpose(1, 2).reshape(batch, count, -1))
        return output, key.mean(1)


def tome(model: nn.Module, r: int, *, always_match: bool = False) -> nn.Module:
    """A copy of a timm ViT that merges r tokens a block; it can be told to look for pairs even where it merges none.

    Raises:
        PmvitError: If the model is not built of plain pre-norm blocks, or r is negative.
    """
    if r < 0:
        raise PmvitError(f"r: expected the tokens to merge a block, 0 or more; got {r}")
    if not isinstance(model, VisionTransformer) or not all(is_plain(block) for block in model.blocks):
        raise PmvitError(f"expected a timm VisionTransformer with plain blocks for ToMe; got a {type(model).__name__}")
    model = copy.deepcopy(model)
    last = len(model.blocks) - 1
    for number, block in enumerate(model.blocks):
        model.blocks[number] = TomeBlock(block, r, model.num_prefix_tokens, number == last, always_match)
    return model
