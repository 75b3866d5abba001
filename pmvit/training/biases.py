"""Bias correction: what merging shifts on average is shifted back, in closed form and without labels (ours).

A block that runs on means of tokens gives them updates that are a little off, image after image in the same direction,
and the blocks after it add to it. The mean of this shift over images and tokens is a vector, and a block has a bias
that moves all its output tokens by a vector: the one at its end. So each block in turn, first to last, gets the bias
with which the mean of its output is that of the original's block, and the next block is corrected behind it. After the
last block only those tokens count that the head reads.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode
from pmvit.hosts.outputs import predict
from pmvit.training.loss import tapped_tokens

PREFIX_SHARE = 0.1  # of the mean over tokens, for class and other prefix tokens: few, but what is read in the end
TRIED = 3  # biases of a block, last first


@torch.no_grad()
def correct_biases(model: nn.Module, teacher: nn.Module, images: Tensor) -> int:
    """Correct the last bias of every block of a compressed model, in place, to that of its original.

    All images pass the compressed model at once, because every block has to get what those before it put out when they
    are corrected. A few hundred are enough: only means are taken. A block without a bias that moves all tokens alike is
    left as it is; how many were corrected is returned.
    """
    means = _block_means(teacher, images)
    host = host_of(model)
    layouts, num_read = host.layouts(), host.reading().num_read
    corrected = 0

    def correct(number: int, block: nn.Module, arguments: Any, options: Any, output: Any) -> Any:
        nonlocal corrected
        tokens, prefix, patches = _tokens(output), layouts[number].num_prefix, layouts[number].num_patches
        missing = means[number] - tokens.mean(0)
        weights = tokens.new_ones(prefix + patches, 1)  # how much each token counts
        weights[:prefix] = PREFIX_SHARE / (1 - PREFIX_SHARE) * patches / max(prefix, 1)
        if number == len(layouts) - 1 and num_read is not None:
            weights[num_read:] = 0.0  # nobody reads them, and plans know it
        own = getattr(block, "block", block).parameters()
        biases = [parameter for parameter in own if parameter.shape == tokens.shape[-1:]]
        for bias in biases[: -TRIED - 1 : -1]:
            before = bias.clone()
            try:
                bias.add_(1)
                moved = _tokens(block.forward(*arguments, **options)) - tokens
            finally:
                bias.copy_(before)
            moves = moved.mean(0)  # how far tokens move, (tokens, width), if each entry of the bias is raised by one
            if not ((moved - moves).abs().max() <= 1e-3 * moves.abs().max() and moves.any()):
                continue  # images differ, or nothing moves
            shift = (weights * moves * missing).sum(0) / (weights * moves.square()).sum(0).clamp(min=1e-12)
            bias.add_(shift)
            corrected += 1
            now = tokens + moves * shift
            return (now.view_as(output[0]), *output[1:]) if isinstance(output, tuple) else now.view_as(output)
        return None

    with ExitStack() as hooks, evaluation_mode(model):
        for number, name in enumerate(host.block_names()):
            block = model.get_submodule(name)
            hooks.enter_context(block.register_forward_hook(partial(correct, number), with_kwargs=True))
        predict(model, images)
    return corrected


def _block_means(teacher: nn.Module, images: Tensor) -> list[Tensor]:
    """The mean output tokens of every block over the images, (tokens, width) each."""
    sums: dict[int, Any] = {}
    with tapped_tokens(teacher) as outputs, evaluation_mode(teacher):
        for part in images.split(32):
            predict(teacher, part)
            for number, output in outputs.items():
                sums[number] = sums.get(number, 0) + _tokens(output).sum(0)
    return [sums[number] / len(images) for number in sorted(sums)]


def _tokens(output: Any) -> Tensor:
    """The (batch, tokens, width) tokens in what a block puts out."""
    tokens: Tensor = output[0] if isinstance(output, tuple) else output
    return tokens.flatten(1, -2)
