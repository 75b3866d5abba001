"""A plain transformer block, rewritten for inference: normalise, attend, add; normalise, MLP, add, and nothing else.

A host says in `PlainParts` what a block is made of; here it is put together again, whole or in halves, in one of two
forms: `eager` for eager PyTorch, `graph` for graphs and for blocks of which only some tokens are read.
"""

from torch import Tensor, nn

from pmvit.config.inference import Target
from pmvit.hosts.parts import PlainParts
from pmvit.runtime.blocks.arguments import Half, TokensAlone
from pmvit.runtime.blocks.eager import FlatBlock
from pmvit.runtime.blocks.fold import in_order, norms_heads
from pmvit.runtime.blocks.graph import PartialBlock


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
    parts = parts if half == "mlp" else in_order(parts, order)
    result: TokensAlone
    if target == "eager" and num_outputs == num_tokens and is_usual:
        result = FlatBlock(parts, num_tokens, inplace, half)
    else:
        result = PartialBlock(parts, num_tokens, num_outputs, target == "onnx", half)
    result.given = given
    return result
