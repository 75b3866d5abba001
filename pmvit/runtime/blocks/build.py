"""A plain transformer block, rewritten for inference: normalise, attend, add; normalise, MLP, add, and nothing else.

A host's block is taken apart into `PlainParts` and put together again, whole or in halves, in one of two forms:
`eager` for eager PyTorch, `graph` for graphs and for blocks of which only some tokens are read.
"""

from torch import nn

from pmvit.hosts.host import Run
from pmvit.hosts.parts import PlainMlp, PlainParts
from pmvit.runtime.blocks.eager import FlatAttention, FlatBlock, FlatMlp
from pmvit.runtime.blocks.graph import PartialAttention, PartialBlock, PartialMlp


def inference_block(parts: PlainParts, run: Run) -> nn.Module:
    """The form of a block or of one half that is cheapest where it runs."""
    num_tokens, num_outputs, bias, target, inplace, half = run
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
