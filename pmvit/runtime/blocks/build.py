"""A plain transformer block, rewritten for inference: normalise, attend, add; normalise, MLP, add, and nothing else.

A host says in `PlainParts` what a block is made of; here it is put together again, whole or in halves, in one of two
forms: `eager` for eager PyTorch, `graph` for graphs and for blocks of which only some tokens are read.
"""

from typing import Literal

from torch import Tensor, nn

from pmvit.config.inference import Target
from pmvit.hosts.parts import PlainMlp, PlainParts
from pmvit.runtime.blocks.eager import FlatAttention, FlatBlock, FlatMlp
from pmvit.runtime.blocks.graph import PartialAttention, PartialBlock, PartialMlp

Half = Literal["attention", "mlp"]  # of a block, each with what normalises before it and the addition after it


def inference_block(
    parts: PlainParts,
    num_tokens: int,
    num_outputs: int,
    bias: Tensor | None,
    target: Target,
    inplace: bool,
    half: Half | None = None,
) -> nn.Module:
    """The form of a block or of one half that is cheapest where it runs.

    Args:
        parts: What the block is made of.
        num_tokens: How many tokens it gets.
        num_outputs: How many of the first ones it computes, with keys and values of all.
        bias: To add to the attention scores of each token, if any.
        target: What is to run it.
        inplace: It may write to its input.
        half: Only this half of it; its MLP computes every token it gets.
    """
    attention_is_usual = isinstance(parts.norm1, nn.LayerNorm) and not parts.norms_heads
    mlp_is_usual = isinstance(parts.norm2, nn.LayerNorm) and isinstance(parts.mlp, PlainMlp)
    is_usual = (attention_is_usual or half == "mlp") and (mlp_is_usual or half == "attention")
    if target == "eager" and num_outputs == num_tokens and is_usual:
        if half == "mlp":
            return FlatMlp(parts, num_tokens, inplace)
        return (FlatBlock if half is None else FlatAttention)(parts, num_tokens, bias, inplace)
    if half == "mlp":
        return PartialMlp(parts, num_outputs)
    kind = PartialBlock if half is None else PartialAttention
    return kind(parts, num_tokens, num_outputs, bias, explicit=target == "onnx")
