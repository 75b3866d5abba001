"""Scores: run batches forward and backward and add up what the recorder hears."""

import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit._system import this_process
from pmvit.config import ScoreConfig
from pmvit.data.batches import IGNORED, check_labels, count_items, resize_labels, unpack, unreadable
from pmvit.errors import PmvitError
from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode, frozen_parameters
from pmvit.hosts.outputs import check_size, predict
from pmvit.measuring.flops import model_cost
from pmvit.measuring.listener import ScoreRecorder
from pmvit.measuring.probe import original_host, summed_over_processes
from pmvit.measuring.scores import PARTIAL_FORMAT, Scores
from pmvit.progress import track
from pmvit.wrapping import fingerprint

SECONDS_BETWEEN_CHECKPOINTS = 30.0
ENDS: dict[str, Any] = {"iterations": 1, "limit": None}  # what may change before scoring goes on


def _loss(config: ScoreConfig, logits: Tensor, labels: Tensor | None) -> Tensor:
    """The loss, summed over the images, so that each image's gradient is its own."""
    if config.loss == "embedding":
        mean = logits.detach().mean(0) if len(logits) > 1 else 0.0
        return 0.5 * (logits - mean).square().sum()
    if config.loss == "entropy":
        log_probabilities = logits.log_softmax(-1)
        return -(log_probabilities.exp() * log_probabilities).sum()
    if config.loss == "predicted":
        labels = logits.argmax(-1)
    if labels is None:
        raise PmvitError('expected batches of (images, labels), got images alone: use loss="predicted" or "entropy"')
    if logits.dim() == 4 and labels.dim() == 3:
        labels = resize_labels(labels, (logits.shape[1], logits.shape[2]))
    if labels.shape != logits.shape[:-1]:
        raise PmvitError(
            f"expected labels of shape {tuple(logits.shape[:-1])}, one for each prediction of the model; got "
            f'{tuple(labels.shape)}: use loss="predicted" or "entropy"'
        )
    check_labels(labels, logits.shape[-1])
    ignored = IGNORED if labels.dim() > 1 else -100
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=ignored)


def score(
    model: nn.Module,
    loader: Iterable[Any],
    config: ScoreConfig,
    *,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> Scores:
    """Measure the importance of every token in every block (Eq. 9); see `measure`."""
    host = original_host(model, "scored", "score tokens")
    layouts = host.layouts()
    if "class_attn" in config.scorer and not host.layout.has_class_token:
        raise PmvitError(f"the scorer {config.scorer} needs a class token, and this model has none: use grad_attn")
    if config.scorer.startswith("grad") and config.loss != "embedding" and not host.outputs().gives_logits:
        raise PmvitError(
            f"the loss {config.loss} needs a model with classes; this {type(model).__name__} puts out an embedding or "
            'features: use loss="embedding"'
        )
    blocks = [model.get_submodule(name) for name in host.block_names()]
    shape = (len(blocks), max(layout.num_patches for layout in layouts))
    start = Scores(
        values=torch.zeros(shape, dtype=torch.float64),
        grid=layouts[0].grid,
        num_prefix=layouts[0].num_prefix,
        cost=model_cost(model),
        config=config,
        iterations=0,
        images=0,
        model=fingerprint(model),
        data=str(getattr(loader, "name", type(loader).__name__)),
        grids=tuple(layout.grid for layout in layouts),
        windows=tuple(layout.windows for layout in layouts),
        skip=host.reading().scored_skip or host.reading().default_skip,
    )
    if config.scorer == "random":
        generator = torch.Generator().manual_seed(config.seed)
        values = torch.rand(shape, generator=generator, dtype=torch.float64)
        for row, layout in zip(values, layouts, strict=True):
            row[layout.num_patches :] = 0.0
        return replace(start, values=values)
    store = Path(checkpoint) if checkpoint is not None else None
    sums = _resume(start, store) if store is not None and store.exists() else start
    with ExitStack() as states:
        states.enter_context(evaluation_mode(model))
        states.enter_context(frozen_parameters(model))
        states.enter_context(host.observed())
        recorder = ScoreRecorder(config.scorer, blocks, layouts)
        states.callback(recorder.remove_hooks)
        there = count_items(loader)
        total = config.iterations if there is None else min(config.iterations, there)
        batches = islice(loader, sums.iterations, config.iterations)
        shown = track(batches, "measure", total, done=sums.iterations, show=progress)
        sums = _accumulate(model, recorder, shown, sums, store if this_process()[0] == 0 else None)
    if sums.iterations == 0:
        raise PmvitError(f"expected at least one batch of images; the loader is empty{unreadable(loader)}")
    if zero := [layer for layer, row in enumerate(sums.values) if not row.any()]:
        raise PmvitError(
            f"block {zero[0]}: all scores are zero, so its gradient vanishes: are the weights loaded, or is the loss "
            "already zero?"
        )
    return replace(sums, values=sums.values / sums.iterations)


def _accumulate(
    model: nn.Module, recorder: ScoreRecorder, batches: Iterable[Any], sums: Scores, store: Path | None
) -> Scores:
    """Add the scores of each batch to the sums, which are written to `store` now and then and when interrupted."""
    device = next(model.parameters()).device
    saved = time.monotonic()
    try:
        iterator = iter(batches)
        while True:
            total, count = torch.zeros_like(sums.values), 0
            left = _images_left(sums)
            if left != 0 and (batch := next(iterator, None)) is not None:
                images, labels = unpack(batch)
                check_size(host_of(model), images)
                images = images[:left].to(device, non_blocking=True)
                labels = None if labels is None else labels[:left].to(device, non_blocking=True)
                per_image = _score_batch(model, recorder, images, labels, sums.config)
                if wrong := [layer for layer, rows in enumerate(per_image) if not torch.isfinite(rows).all()]:
                    raise PmvitError(
                        f"block {wrong[0]}: the scores are not finite: does the model give finite logits for these "
                        "images?"
                    )
                if sums.config.abs_per_sample:
                    per_image = per_image.abs()
                total, count = per_image.sum(1).cpu().double(), len(images)
            total, count = summed_over_processes(total, count)
            if count == 0:  # no process has a batch left
                break
            values = sums.values + (total / count).abs()
            sums = replace(sums, values=values, iterations=sums.iterations + 1, images=sums.images + count)
            if store is not None and time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                sums.save(store, PARTIAL_FORMAT)
                saved = time.monotonic()
    finally:
        if store is not None and sums.iterations:
            sums.save(store, PARTIAL_FORMAT)
    return sums


def _images_left(sums: Scores) -> int | None:
    """How many more images this process may use, where there is a limit."""
    if sums.config.limit is None:
        return None
    process, processes = this_process()
    return (sums.config.limit - sums.images + processes - 1 - process) // processes


def _score_batch(
    model: nn.Module, recorder: ScoreRecorder, images: Tensor, labels: Tensor | None, config: ScoreConfig
) -> Tensor:
    needs_gradient = config.scorer.startswith("grad")
    with torch.inference_mode(False), torch.set_grad_enabled(needs_gradient):
        with recorder:
            logits = predict(model, images)
        if needs_gradient:
            _loss(config, logits, labels).backward()
    return recorder.collect()


def _resume(start: Scores, store: Path) -> Scores:
    """The partial sums in `store`, if they belong to this model and configuration."""
    sums = Scores.load(store, PARTIAL_FORMAT)
    for what, here, there in (
        ("weights", start.model, sums.model),
        ("data", start.data, sums.data),
        ("configuration", replace(start.config, **ENDS), replace(sums.config, **ENDS)),
    ):
        if here != there:
            raise PmvitError(
                f"{store} holds partial scores of other {what} ({there}, not {here}): delete it to start anew"
            )
    return replace(sums, config=start.config)
