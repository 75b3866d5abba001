"""Bias correction: what merging shifts on average is shifted back, in closed form and without labels (ours).

A block that runs on means of tokens gives them updates that are a little off, image after image in the same direction,
and the blocks after it add to it. The mean of this shift over images and tokens is a vector, and a block has a bias
that moves all its output tokens by a vector: the one at its end. So each block in turn, first to last, gets the bias
with which the mean of its output is that of the original's block, and the next block is corrected behind it. After the
last block only those tokens count that the head reads.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode
from pmvit.hosts.outputs import predict
from pmvit.training.hooks import block_hooks, output_tokens

PREFIX_SHARE = 0.1  # of the mean over tokens, for class and other prefix tokens: few, but what is read in the end
TRIED = 3  # biases of a block, last first


@torch.no_grad()
def correct_biases(model: nn.Module, teacher: nn.Module, images: Tensor) -> int:
    """Correct the last bias of every block, in place.

    All images pass the compressed model at once, because every block has to get what those before it put out when they
    are corrected. A few hundred are enough: only means are taken.

    Args:
        model: A compressed model.
        teacher: Its original.
        images: The images to take means over.

    Returns:
        How many blocks were corrected; one without a bias that moves all tokens alike is left as it is.
    """
    means = _block_means(teacher, images)
    host = host_of(model)
    layouts, num_read = host.layouts(), host.reading().num_read
    corrected = 0

    def correct(number: int, block: nn.Module, arguments: Any, options: Any, output: Any) -> Any:
        nonlocal corrected
        tokens = _tokens(output)
        missing = means[number] - tokens.mean(0)
        weights = _token_weights(layouts[number].num_prefix, layouts[number].num_patches).to(tokens)[:, None]
        if number == len(layouts) - 1 and num_read is not None:
            weights[num_read:] = 0.0  # nobody reads them, and plans know it
        for bias in _last_biases(block, tokens.shape[-1]):
            moves = _response(block, bias, arguments, options, tokens)
            if moves is None:
                continue
            shift = (weights * moves * missing).sum(0) / (weights * moves.square()).sum(0).clamp(min=1e-12)
            bias.add_(shift)
            corrected += 1
            return _with_tokens(output, tokens + moves * shift)
        return None

    with block_hooks(model, correct), evaluation_mode(model):
        predict(model, images)
    return corrected


def _block_means(teacher: nn.Module, images: Tensor) -> list[Tensor]:
    """The mean output tokens of every block over the images, (tokens, width) each."""
    sums: dict[int, Tensor] = {}

    def add(number: int, _block: nn.Module, _arguments: Any, _options: Any, output: Any) -> None:
        total = _tokens(output).sum(0)
        sums[number] = total if number not in sums else sums[number] + total

    with block_hooks(teacher, add), evaluation_mode(teacher):
        for part in images.split(32):
            predict(teacher, part)
    return [sums[number] / len(images) for number in sorted(sums)]


def _tokens(output: Any) -> Tensor:
    """The (batch, tokens, width) tokens in what a block puts out."""
    return output_tokens(output).flatten(1, -2)


def _with_tokens(output: Any, tokens: Tensor) -> Any:
    """What a block puts out, with other tokens."""
    if isinstance(output, tuple):
        return (tokens.view(output[0].shape), *output[1:])
    return tokens.view(output.shape)


def _token_weights(num_prefix: int, num_patches: int) -> Tensor:
    """How much each token counts: the prefix tokens together for their share."""
    prefix = PREFIX_SHARE / (1 - PREFIX_SHARE) * num_patches / max(num_prefix, 1)
    return torch.cat([torch.full((num_prefix,), prefix), torch.ones(num_patches)])


def _last_biases(block: nn.Module, width: int) -> list[nn.Parameter]:
    """The last vectors of a block with one entry per channel."""
    wrapped = getattr(block, "block", block)
    return [parameter for parameter in wrapped.parameters() if parameter.shape == (width,)][: -TRIED - 1 : -1]


def _response(
    block: nn.Module, bias: nn.Parameter, arguments: tuple[Any, ...], options: dict[str, Any], tokens: Tensor
) -> Tensor | None:
    """How far the output moves, (tokens, width), if each entry of a bias is raised by one; `None` if images differ."""
    before = bias.clone()
    bias.add_(1)
    try:
        moved = _tokens(block.forward(*arguments, **options)) - tokens
    finally:
        bias.copy_(before)
    mean = moved.mean(0)
    is_alike = (moved - mean).abs().max() <= 1e-3 * mean.abs().max()
    return mean if is_alike and mean.any() else None
