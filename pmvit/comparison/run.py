"""`compare`: give every method the same cost, and measure what is left of the model."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from pmvit.comparison.making import MethodInputs, check_methods, make_smaller
from pmvit.comparison.table import Comparison, ComparisonRow
from pmvit.compression import compression_of
from pmvit.config.measuring import OURS
from pmvit.data.opening import ImageData
from pmvit.errors import PmvitError
from pmvit.evaluation.classification import Evaluation, evaluate_all
from pmvit.evaluation.reference import Reference
from pmvit.evaluation.segmentation import SegmentationEvaluation, evaluate_segmentation, labels_pixels
from pmvit.hosts import host_of
from pmvit.hosts.outputs import as_module
from pmvit.measuring import MergeCosts, Scores, TokenMetric
from pmvit.measuring.flops import flops
from pmvit.methods import Method
from pmvit.progress import track
from pmvit.runtime.bench.run import Maker, benchmark, known_runtimes
from pmvit.runtime.bench.table import Benchmark
from pmvit.runtime.bench.variants import variant
from pmvit.runtime.export.run import built_in_images
from pmvit.runtime.export.targets import as_exported, reason

OPTIMIZED = ", optimized"  # behind our names where the passes for inference are measured, too


def compare(
    model: nn.Module,
    data: ImageData,
    *,
    gflops: float | Sequence[float],
    methods: Sequence[str] | None = None,
    scores: Scores | None = None,
    merge_costs: MergeCosts | None = None,
    metric: TokenMetric | None = None,
    images: ImageData | None = None,
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
        data: Images with or without labels, as `evaluate` takes them, for accuracy and agreement with the original.
        gflops: What each is to cost, in billions of multiply-accumulates; one number or several.
        methods: Names of `METHODS`; `prune-merge`, `measured` and `adaptive`, our plans; `magnitude-pruning` and
            `taylor-pruning`, those of the package torch-pruning. If not given, all that need no training and have what
            they need.
        scores: What `prune-merge` plans with.
        merge_costs: What `measured` plans with.
        metric: What `adaptive` plans with.
        images: Images, others than those of `data`, that `ps-vit` and `taylor-pruning` choose by.
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
    inputs = MethodInputs(scores, merge_costs, metric, images)
    names = list(methods or inputs.methods())
    check_methods(names)
    runtimes = known_runtimes(runtimes)
    model = copy.deepcopy(model).eval()
    rows, models = [ComparisonRow("original", "original")], {"original": model}
    asked = [(budget, name) for budget in budgets for name in names]
    for budget, name in track(asked, "search strengths", len(asked), show=progress):
        row = ComparisonRow(f"{name} {budget:g}" if len(budgets) > 1 else name, name, wanted=budget)
        try:
            models[row.name], options = make_smaller(model, name, budget, inputs)
            rows.append(replace(row, options=options))
        except PmvitError as error:
            rows.append(replace(row, failure=str(error)))
    for name, other in (others or {}).items():
        used = compression_of(other)
        described = used.what.describe() if used is not None and isinstance(used.what, Method) else {}
        rows.append(ComparisonRow(name, "given", described))
        models[name] = other
    reference = Reference(model, "original")
    evaluations: dict[str, Evaluation | SegmentationEvaluation]
    if labels_pixels(model):
        evaluations = {
            name: evaluate_segmentation(each, data, reference=reference, progress=progress)
            for name, each in models.items()
        }
    else:
        found = evaluate_all(list(models.values()), data, reference=reference, progress=progress)
        evaluations = dict(zip(models, found, strict=True))
    for index, row in enumerate(rows):
        if row.name in models:
            cost = flops(models[row.name])
            row = replace(row, gflops=cost.gflops, parameters=cost.parameters, evaluation=evaluations[row.name])
            rows[index] = replace(row, **try_export(models[row.name])) if exports else row
    if not runtimes:
        return Comparison(rows)
    makers = _makers(rows, models)
    speeds = benchmark(
        model, against=makers, runtimes=runtimes, batches=batches, rounds=rounds, threads=threads, progress=progress
    )
    return Comparison(list(_with_speeds(rows, speeds)), speeds.environment)


def try_export(model: nn.Module) -> dict[str, Any]:
    """Fields of a row: whether `torch.export` makes a graph of a model for any batch size, and if not, why."""
    images = built_in_images(host_of(model).input_size(), 2)
    try:
        as_exported(as_module(copy.deepcopy(model).cpu().float().requires_grad_(False)), images, any_batch=True)
    except Exception as error:  # whatever the exporter stumbles over is the result
        return {"exports": False, "failure": reason(error, 120)}
    return {"exports": True}


def _makers(rows: Sequence[ComparisonRow], models: Mapping[str, nn.Module]) -> dict[str, nn.Module | Maker]:
    """What is timed: each row that there is, and each of ours after the passes for inference, too."""
    makers: dict[str, nn.Module | Maker] = {}
    for row in rows:
        if row.name in models:
            still = copy.deepcopy(models[row.name]).to("cpu", torch.float32)
            makers[row.name] = still
            if row.method in OURS:
                makers[row.name + OPTIMIZED] = partial(variant, "optimized", still)
    return makers


def _with_speeds(rows: Sequence[ComparisonRow], benchmark: Benchmark) -> Iterator[ComparisonRow]:
    """The rows with their speeds; behind each of ours, the same after the passes."""
    for row in rows:
        yield replace(row, speeds=tuple(speed for speed in benchmark.rows if speed.variant == row.name))
        name = row.name + OPTIMIZED
        if speeds := tuple(speed for speed in benchmark.rows if speed.variant == name):
            yield replace(row, name=name, speeds=speeds, gflops=speeds[0].gflops)
