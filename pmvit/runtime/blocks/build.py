"""A plain transformer block, rewritten for inference: normalise, attend, add; normalise, MLP, add, and nothing else.

A host says in `PlainParts` what a block is made of; here it is put together again, whole or in halves, in one of two
forms: `eager` for eager PyTorch, `graph` for graphs and for blocks of which only some tokens are read.
"""

from typing import Literal

from torch import Tensor, nn

from pmvit.config.inference import Target
from pmvit.hosts.parts import PlainParts
from pmvit.runtime.blocks.arguments import TokensAlone
from pmvit.runtime.blocks.eager import FlatAttention, FlatBlock, FlatMlp
from pmvit.runtime.blocks.fold import in_order, norms_heads
from pmvit.runtime.blocks.graph import PartialAttention, PartialBlock, PartialMlp

Half = Literal["attention", "mlp"]  # of a block, each with what normalises before it and the addition after it


def inference_block(
    parts: PlainParts,
    order: Tensor,
    num_outputs: int,
    target: Target,
    inplace: bool,
    half: Half | None = None,
    given: frozenset[int | str] = frozenset(),
) -> nn.Module:
    """The form of a block or of one half that is cheapest where it runs.

    Args:
        parts: What the block is made of.
        order: The tokens it gets, as the block numbers them.
        num_outputs: How many of the first ones it computes, with keys and values of all.
        target: What is to run it.
        inplace: It may write to its input.
        half: Only this half of it; its MLP computes every token it gets.
        given: What the host gives it beside the tokens, all of which the parts hold already (see `Arguments`).
    """
    num_tokens = len(order)
    attends = isinstance(parts.norm1, nn.LayerNorm) and not norms_heads(parts) and parts.attention_norm is None
    is_usual = (half == "mlp" or attends) and (half == "attention" or isinstance(parts.norm2, nn.LayerNorm))
    is_flat = target == "eager" and num_outputs == num_tokens and is_usual
    if half == "mlp":
        return FlatMlp(parts, num_tokens, inplace) if is_flat else PartialMlp(parts, num_tokens)
    parts = in_order(parts, order)
    result: TokensAlone
    if is_flat:
        result = (FlatBlock if half is None else FlatAttention)(parts, num_tokens, inplace)
    else:
        kind = PartialBlock if half is None else PartialAttention
        result = kind(parts, num_tokens, num_outputs, explicit=target == "onnx")
    result.given = given
    return result
