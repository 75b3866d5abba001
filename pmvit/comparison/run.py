"""`compare`: give every method the same cost, and measure what is left of the model."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from pmvit.comparison.candidates import OURS, Candidate, Evidence, candidate, check_names, counted
from pmvit.comparison.table import Compared, Comparison
from pmvit.compression import compression_of
from pmvit.errors import PmvitError
from pmvit.evaluation.classification import evaluate_all
from pmvit.evaluation.segmentation import evaluate_segmentation
from pmvit.hosts import host_of
from pmvit.hosts.outputs import as_module
from pmvit.measuring import MergeCosts, Scores
from pmvit.methods import Method
from pmvit.progress import track
from pmvit.runtime.bench.run import Makers, known_runtimes, measure, ready
from pmvit.runtime.bench.variants import variant
from pmvit.runtime.export.run import built_in_images
from pmvit.runtime.export.targets import as_exported

PASSES = ", optimized"  # behind our names where the passes for inference are measured, too


def compare(
    model: nn.Module,
    data: Iterable[Any],
    *,
    gflops: float | Sequence[float],
    methods: Sequence[str] | None = None,
    scores: Scores | None = None,
    merge_costs: MergeCosts | None = None,
    images: Iterable[Any] | None = None,
    others: Mapping[str, nn.Module] | None = None,
    exports: bool = True,
    runtimes: Sequence[str] = ("eager",),
    batches: Sequence[int] = (1, 16),
    rounds: int = 20,
    threads: int | None = None,
    progress: bool = True,
) -> Comparison:
    """Put methods side by side at equal cost, without training: accuracy, speed, and whether a graph comes out.

    Each method gets the strength at which its counted FLOPs come nearest to those asked for; where they are more than
    1 % off, as those of a method that takes whole rows of patches may be, the table shows it; one that stays more than
    5 % off is not measured.

    Args:
        model: The original.
        data: A loader of `(images, labels)`, or of images, for accuracy and agreement with the original.
        gflops: What each is to cost, in billions of multiply-accumulates; one number or several.
        methods: Names of `METHODS`, `prune-merge`, `measured`, `magnitude-pruning`, `taylor-pruning`; if not given, all
            that need no training and have what they need. The last two are those of the package torch-pruning.
        scores: What `prune-merge` plans with.
        merge_costs: What `measured` plans with.
        images: A loader of images, others than those of `data`, that `ps-vit` and `taylor-pruning` choose by.
        others: Models that are there already, as fine-tuned ones, by the names they are to have.
        exports: Try whether each is a static graph.
        runtimes: As `benchmark` has them; none to measure no speed.
        batches: Batch sizes.
        rounds: How often each takes its turn.
        threads: CPU threads of every runtime.
        progress: Show what is done.

    Raises:
        PmvitError: If the model is compressed, or there is no such method.
    """
    if compression_of(model) is not None:
        raise PmvitError("expected an original model to compare methods on; this one is compressed: use the original")
    budgets = [gflops] if isinstance(gflops, (int, float)) else list(gflops)
    evidence = Evidence(scores, merge_costs, images)
    names = list(methods or evidence.variants())
    check_names(names)
    runtimes = known_runtimes(runtimes)
    model = copy.deepcopy(model).eval()
    candidates = [counted(Compared("original", "original"), model)]
    asked = [(budget, name) for budget in budgets for name in names]
    for budget, name in track(asked, "search strengths", len(asked), show=progress):
        row = Compared(f"{name} {budget:g}" if len(budgets) > 1 else name, name, wanted=budget)
        candidates.append(candidate(model, row, budget, evidence))
    for name, other in (others or {}).items():
        used = compression_of(other)
        described = used.what.describe() if used is not None and isinstance(used.what, Method) else {}
        candidates.append(counted(Compared(name, "given", described), other))
    candidates = _evaluated(candidates, data, progress)
    if exports:
        candidates = [(row if made is None else replace(row, **tried_export(made)), made) for row, made in candidates]
    return _timed(candidates, runtimes, batches, rounds, threads, progress)


def _evaluated(candidates: list[Candidate], data: Iterable[Any], progress: bool) -> list[Candidate]:
    (_, original), *_ = candidates
    if original is None:
        return candidates
    made = [model for _, model in candidates if model is not None]
    if host_of(original).outputs().pixel_classes is None:
        found: list[Any] = list(evaluate_all(made, data, reference=original, progress=progress))
    else:
        found = [evaluate_segmentation(one, data, reference=original, progress=progress) for one in made]
    results = iter(found)
    return [(row if one is None else replace(row, evaluation=next(results)), one) for row, one in candidates]


def tried_export(model: nn.Module) -> dict[str, Any]:
    """Fields of a row: whether `torch.export` makes a graph of a model for any batch size, and if not, why."""
    images = built_in_images(host_of(model).input_size(), 2)
    try:
        as_exported(as_module(copy.deepcopy(model).cpu().float().requires_grad_(False)), images, any_batch=True)
    except Exception as error:  # whatever the exporter stumbles over is the result
        lines = str(error).strip().splitlines()
        return {"exports": False, "failure": f"{type(error).__name__}: {lines[0][:120] if lines else ''}"}
    return {"exports": True}


def _timed(
    candidates: list[Candidate],
    runtimes: Sequence[str],
    batches: Sequence[int],
    rounds: int,
    threads: int | None,
    progress: bool,
) -> Comparison:
    (_, original), *_ = candidates
    if not runtimes or original is None:
        return Comparison([row for row, _ in candidates])
    makers: Makers = {}
    for row, made in candidates:
        if made is not None:
            still = copy.deepcopy(made).to("cpu", torch.float32)
            makers[row.name] = partial(ready, still)
            if row.method in OURS:
                makers[row.name + PASSES] = partial(variant, "optimized", still)
    benchmark = measure(original.cpu().float(), makers, runtimes, batches, rounds, threads, None, False, progress)
    rows = []
    for row, _ in candidates:
        timed = tuple(speed for speed in benchmark.rows if speed.variant == row.name)
        rows.append(replace(row, speeds=timed))
        if row.name + PASSES in makers:
            passes = tuple(speed for speed in benchmark.rows if speed.variant == row.name + PASSES)
            rows.append(replace(row, name=row.name + PASSES, speeds=passes, gflops=passes[0].gflops))
    return Comparison(rows, benchmark.environment)
