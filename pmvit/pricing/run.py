"""`price`: run images forward and backward, and merge the tokens of every block in the cheapest order."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pmvit._modes import check_trainable, evaluation_mode, frozen_parameters
from pmvit._processes import this_process
from pmvit.cost import model_cost
from pmvit.data.batches import unpack, unreadable
from pmvit.errors import PmvitError
from pmvit.fingerprint import fingerprint
from pmvit.models import adapter_for
from pmvit.outputs import predict
from pmvit.pricing.merging import mirrored, neighbours, order_merges
from pmvit.pricing.prices import Merge, PriceConfig, Prices
from pmvit.pricing.recorder import EffectRecorder
from pmvit.progress import Bar
from pmvit.prune_merge import PruneMerge


def price(
    model: nn.Module,
    loader: Iterable[Any],
    config: PriceConfig | None = None,
    *,
    progress: bool = True,
    **options: Any,
) -> Prices:
    """Measure what merging tokens costs in every block. Labels are not read; the model is left as it was.

    Args:
        model: An uncompressed model.
        loader: Yields `(images, labels)` or images.
        config: What to measure; `options` are its fields and override it.
        progress: Show a progress bar.

    Raises:
        PmvitError: If the model attends inside windows, what is measured is not finite, or the input does not fit.
    """
    config = replace(config or PriceConfig(), **options)
    if any(isinstance(module, PruneMerge) for module in model.modules()):
        raise PmvitError("expected an uncompressed model to price; this one is compressed: price the original")
    check_trainable(model)
    if this_process()[1] > 1:
        raise PmvitError(f"expected one process to price a model, got {this_process()[1]}: start it without a launcher")
    adapter = adapter_for(model)
    layouts = adapter.layouts(model)
    if any(layout.windows is not None or layout != layouts[0] for layout in layouts):
        raise PmvitError(
            f"expected attention over the whole of one grid to price merges; a {type(model).__name__} attends inside "
            'windows: plan from scores, method="scored"'
        )
    batches = list(_first_images(loader, config.images))
    if not batches:
        raise PmvitError(f"expected at least one batch of images; the loader is empty{unreadable(loader)}")
    blocks = [model.get_submodule(name) for name in adapter.block_names(model)]
    images = sum(map(len, batches))
    parts = list(_parts(len(blocks), images, layouts[0].num_patches, config.memory))
    near = torch.ones(2 * (layouts[0].num_patches,), dtype=torch.bool)
    if config.groups == "neighbours":
        near = neighbours(layouts[0].grid)
    merges: list[tuple[Merge, ...]] = []
    with ExitStack() as states:
        states.enter_context(evaluation_mode(model))
        states.enter_context(frozen_parameters(model))
        states.enter_context(adapter.for_scoring(model))
        bar = states.enter_context(Bar("price", len(parts) * len(batches), show=progress))
        for layers in parts:
            recorder = EffectRecorder(blocks, layouts[0], layers)
            try:
                effects = _effects(model, recorder, batches, config.seed, bar)
            finally:
                recorder.remove_hooks()
            for effect in effects:
                evidence = torch.cat([effect, mirrored(effect, layouts[0].grid)], dim=1) if config.mirror else effect
                merges.append(order_merges(evidence, near))
    return Prices(
        merges=tuple(merges),
        grid=layouts[0].grid,
        num_prefix=layouts[0].num_prefix,
        cost=model_cost(model),
        config=config,
        images=images,
        model=fingerprint(model),
        data=str(getattr(loader, "name", type(loader).__name__)),
        skip=adapter.default_skip(model),
    )


def probe(output: Tensor, is_logits: bool, generator: torch.Generator) -> Tensor:
    """A random direction of the output, for each image: the mean square of a change along it is what the change costs.

    Of logits, that is twice the divergence of the predictions, to second order (the covariance of the direction is the
    Fisher information `diag(p) - p p^T`); of any other output, the squared distance.
    """
    signs = torch.randint(0, 2, output.shape, generator=generator).to(output.device, output.dtype) * 2 - 1
    if not is_logits:
        return signs
    probabilities = output.detach().softmax(-1)
    direction = probabilities.sqrt() * signs
    return direction - probabilities * direction.sum(-1, keepdim=True)


def _effects(model: nn.Module, recorder: EffectRecorder, batches: list[Tensor], seed: int, bar: Bar) -> Tensor:
    """`E` of the recorder's layers for all images, (layers, 2, images, patches, patches)."""
    is_logits = adapter_for(model).gives_logits(model)
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    num_patches = recorder.layout.num_patches
    effects = torch.empty(len(recorder.layers), 2, sum(map(len, batches)), num_patches, num_patches)
    done = 0
    for images in batches:
        with torch.inference_mode(False), torch.enable_grad():
            with recorder:
                output = predict(model, images.to(device))
            (probe(output, is_logits, generator) * output).sum().backward()
        effects[:, :, done : done + len(images)] = recorder.collect()
        for layer, effect in zip(recorder.layers, effects[:, :, done : done + len(images)], strict=True):
            if not torch.isfinite(effect).all():
                raise PmvitError(
                    f"block {layer}: what is measured is not finite: are the logits of these images finite?"
                )
        done += len(images)
        bar.advance()
    return effects


def _first_images(loader: Iterable[Any], count: int) -> Iterator[Tensor]:
    """Batches of images until there are as many."""
    for batch in loader:
        images = unpack(batch)[0][:count]
        count -= len(images)
        yield images
        if count <= 0:
            return


def _parts(depth: int, images: int, num_patches: int, gigabytes: float) -> Iterator[list[int]]:
    """The blocks in turns, as many at a time as fit into memory."""
    size = 4 * 2 * images * num_patches**2
    at_once = max(int(gigabytes * 1e9 / size), 1)
    for start in range(0, depth, at_once):
        yield list(range(start, min(start + at_once, depth)))
