"""Measure a `TokenMetric`: the second moment of differences of gradients at the tokens that enter each block.

To replace two tokens by their mean changes the one by `d` and the other by `-d`, so the output by `(g_a - g_b) d`, with
`g` the gradient of the output at each (of a random direction of it, see `probe`): what both have in common cancels. So
`F_l` is half the mean of `(g_a - g_b)(g_a - g_b)^T` over patches that are neighbours in the grid, as most that merge
are. The largest eigenvectors of `F_l`, times the square root of their eigenvalue, are the columns of `P_l`.

Of generated images, what a model predicts says nothing of the classes that images will have: all logits count alike.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from pmvit._system import this_process
from pmvit.config import MetricConfig
from pmvit.errors import PmvitError
from pmvit.hosts import Host
from pmvit.hosts.adaptive import spares_last_mlp
from pmvit.hosts.modes import evaluation_mode, frozen_parameters
from pmvit.hosts.outputs import predict
from pmvit.measuring.flops import model_cost
from pmvit.measuring.listener import precise
from pmvit.measuring.metric import TokenMetric
from pmvit.measuring.probe import opened, probe, summed_over_processes
from pmvit.progress import Bar
from pmvit.wrapping import fingerprint


def measure_metric(
    model: nn.Module, loader: Iterable[Any], config: MetricConfig, *, progress: bool = True
) -> TokenMetric:
    """Measure how much differences of tokens matter before each block, without labels; the model is left as it was.

    Several processes of torch.distributed measure together, each on images of its own.

    Args:
        model: An uncompressed model.
        loader: Yields `(images, labels)` or images.
        config: How to measure.
        progress: Show a progress bar.

    Raises:
        PmvitError: If the model attends inside windows, what is measured is not finite, or the input does not fit.
    """
    processes = this_process()[1]
    host, batches = opened(model, loader, -(-config.limit // processes), "adaptive", "merge tokens by the image")
    with ExitStack() as states:
        states.enter_context(evaluation_mode(model))
        states.enter_context(frozen_parameters(model))
        is_logits = host.outputs().gives_logits and not getattr(loader, "is_generated", False)
        moments = second_moments(model, host, batches, config, progress, is_logits=is_logits)
        return TokenMetric(
            projections=torch.stack([square_root(moment, config.rank) for moment in moments]),
            grid=host.layout.grid,
            num_prefix=host.layout.num_prefix,
            cost=model_cost(model),
            spares_last_mlp=spares_last_mlp(host),
            config=config,
            images=summed_over_processes(torch.zeros(1), sum(map(len, batches)))[1],
            model=fingerprint(model),
            data=str(getattr(loader, "name", type(loader).__name__)),
        )


def square_root(moment: Tensor, rank: int) -> Tensor:
    """The largest eigenvectors of a symmetric matrix, each times the square root of its eigenvalue, largest first."""
    values, vectors = torch.linalg.eigh(moment)
    largest: Tensor = values[-rank:].clamp_min(0).sqrt() * vectors[:, -rank:]
    return largest.flip(-1).float().contiguous()


def second_moments(
    model: nn.Module, host: Host, batches: list[Tensor], config: MetricConfig, progress: bool, *, is_logits: bool
) -> list[Tensor]:
    """Half the mean of `(g_a - g_b)(g_a - g_b)^T` over neighbours and images, at what enters each block."""
    names, layout = host.block_names(), host.layout
    generator = torch.Generator().manual_seed(config.seed + this_process()[0])
    sums: list[Tensor | None] = [None] * len(names)

    def add(index: int, gradient: Tensor) -> None:
        of_patches = precise(gradient).flatten(1, -2)[:, layout.num_prefix :].unflatten(1, layout.grid)
        steps = [of_patches.diff(dim=dim).flatten(0, -2) for dim in range(1, of_patches.dim() - 1)]
        moment = sum((rows.T @ rows).double() for rows in steps)
        known = sums[index]
        sums[index] = moment if known is None else known + moment

    def listen(index: int) -> Any:
        def hook(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            tokens = arguments[0]
            if not tokens.requires_grad:
                tokens = tokens.detach().requires_grad_()
            tokens.register_hook(lambda gradient: add(index, gradient))
            return (tokens, *arguments[1:])

        return hook

    with ExitStack() as states:
        states.enter_context(host.observed())
        for index, name in enumerate(names):
            handle = model.get_submodule(name).register_forward_pre_hook(listen(index))
            states.callback(handle.remove)
        bar = states.enter_context(Bar("measure", len(batches), show=progress))
        for images in batches:
            with torch.inference_mode(False), torch.enable_grad():
                output = predict(model, images.to(next(model.parameters()).device))
                (probe(output, is_logits, generator) * output).sum().backward()
            bar.advance()
    num_images = sum(map(len, batches))
    num_pairs = sum(layout.num_patches // side * (side - 1) for side in layout.grid)
    result = []
    for index, moment in enumerate(sums):
        if moment is None or not torch.isfinite(moment).all():
            reason = "no gradient arrives" if moment is None else "what is measured is not finite"
            raise PmvitError(f"block {index}: {reason}: does the output depend on it, and is it finite?")
        total, count = summed_over_processes(moment.cpu(), num_images)
        result.append(total / (2 * count * num_pairs))
    return result
