"""A benchmark that cannot flatter itself: all variants take turns on the same images in one run."""

import copy
import math
import platform
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pmvit._system import keep_freed_memory
from pmvit.compression import compress, compression_of
from pmvit.config.inference import Target
from pmvit.data.opening import ImageData
from pmvit.errors import PmvitError
from pmvit.evaluation.reference import reference_for
from pmvit.hosts import host_of
from pmvit.hosts.outputs import as_module
from pmvit.measuring.flops import flops
from pmvit.methods import Evit, Tome
from pmvit.planning import Plan
from pmvit.planning.adaptive import AdaptivePlan
from pmvit.progress import track
from pmvit.runtime.bench.memory import peak_memory
from pmvit.runtime.bench.table import Benchmark, BenchmarkRow
from pmvit.runtime.bench.timing import interleave, run_to_end, speedup
from pmvit.runtime.bench.variants import VARIANTS, in_place_plan, uncompressed, variant
from pmvit.runtime.export.run import prepared_images
from pmvit.runtime.export.targets import QUANTIZING, RUNTIMES, Run, inferring, quietly, reason, runtime_called
from pmvit.runtime.optimize import optimize_for_inference
from pmvit.saving.models import save

PYTORCH = ("eager", "compile")
INT8 = "-int8"  # behind the name of a variant: quantised
ALIASES = {"onnxruntime": "onnx"}
Maker = Callable[[Target], nn.Module]
Makers = Mapping[str, nn.Module | Maker]


def benchmark(
    model: nn.Module,
    *,
    against: Sequence[str] | Makers = ("original", "compressed", "optimized", "bound"),
    runtimes: Sequence[str] = ("eager",),
    batches: Sequence[int] = (1, 16),
    rounds: int = 20,
    threads: int | None = None,
    images: ImageData | None = None,
    memory: bool = False,
    original: str | Path | nn.Module | None = None,
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> Benchmark:
    """Measure the speed of a compressed model against others made of the same weights, side by side.

    The baseline, called original, is what the model was made of if that is at hand, else the same weights uncompressed;
    `environment["original"]` says which.

    Args:
        model: What `compress` or `load` returned.
        against: Variants: original, original-optimized, compressed (without the passes), optimized (with them), bound
            (the equal-token bound), direct, tome; with `-int8` behind them quantised (onnxruntime, openvino). The
            original is always among them. Or any models on the device that take the same images, by name, one of them
            called original, or what makes them for a target of `InferenceConfig`.
        runtimes: eager, compile, onnxruntime, openvino, torch-export, aot-inductor, torchscript, executorch, litert.
        batches: Batch sizes.
        rounds: How often each variant takes its turn.
        threads: CPU threads of every runtime.
        images: Images to run on, and to calibrate on, as `export` takes them; built-in pictures if left out.
        memory: Measure peak memory of variants too, each in a process of its own; on the CPU alone.
        original: Where the original is: a model, or a name or path as `create_model` takes it.
        device: Where eager and compile run; other runtimes have the CPU alone.
        progress: Show a bar.

    Raises:
        PmvitError: If the model is not compressed, or a variant, runtime or package is not there.
    """
    if not batches or min(batches) < 1 or rounds < 2:
        raise PmvitError(f"expected batch sizes of 1 and more and rounds of 2 and more; got {batches} and {rounds}")
    runtimes = known_runtimes(runtimes)
    on_cpu = [name for name in runtimes if name not in PYTORCH]
    is_cpu = torch.device(device).type == "cpu"
    if on_cpu and not is_cpu:
        raise PmvitError(
            f"device: expected cpu for {', '.join(on_cpu)}, which run there (ONNX Runtime by its CPU provider); got "
            f"{device}, where {' and '.join(PYTORCH)} run"
        )
    said = {}
    if not isinstance(against, Mapping):
        compression = compression_of(model)
        if compression is None or not isinstance(compression.what, Plan | AdaptivePlan):
            raise PmvitError("expected a model that a plan compressed to benchmark; this one is not compressed by one")
        names = dict.fromkeys(["original", *against])
        unknown = [name for name in names if name.removesuffix(INT8) not in VARIANTS]
        if unknown:
            known = ", ".join(VARIANTS)
            raise PmvitError(f"expected variants among {known}, with {INT8} or without; got {unknown[0]!r}")
        baseline = reference_for(model, original)
        said = {"original": baseline.title}
        model, whole = (copy.deepcopy(each).to(device, torch.float32) for each in (model, baseline.model))
        against = {
            name: partial(variant, name.removesuffix(INT8), whole if name.startswith("original") else model)
            for name in names
        }
    count = len(images) if isinstance(images, Tensor) else max(*batches, 32)
    shown = prepared_images(model, images, count).to(device)
    before = torch.get_num_threads()
    threads = threads or before
    rows: list[BenchmarkRow] = []
    keeps = keep_freed_memory()
    torch.set_num_threads(threads)
    try:
        settings = [(runtime, batch) for runtime in runtimes for batch in batches]
        for runtime, batch in track(settings, "benchmark", len(settings), show=progress):
            some = shown.repeat(-(-batch // len(shown)), 1, 1, 1)
            some = some[: len(some) // batch * batch].contiguous()  # the first batch is timed, all serve to calibrate
            with tempfile.TemporaryDirectory() as folder:
                saved = Path(folder) / "model" if memory and is_cpu else None
                if saved is not None:
                    save(model, saved)
                rows += _take_turns(against, runtime, some.split(batch), rounds, threads, Path(folder), saved)
    finally:
        torch.set_num_threads(before)
    where = {"freed memory": "kept" if keeps else "given back"} if is_cpu else {"device": _device_name(device)}
    return Benchmark(rows, {**_environment(runtimes, threads, rounds), **where, **said})


def known_runtimes(names: Sequence[str]) -> list[str]:
    """The runtimes that users call so; raise `PmvitError` for one that is not there."""
    known = [ALIASES.get(name, name) for name in names]
    for name in known:
        if name not in PYTORCH:
            runtime_called(name)
    return known


def overhead(
    model: nn.Module,
    *,
    batch: int = 16,
    rounds: int = 20,
    threads: int | None = None,
    device: str | torch.device = "cpu",
) -> Benchmark:
    """What the operations cost where nothing is compressed (the paper's Table IV), in eager PyTorch.

    They run on all tokens in another order; a plan that keeps all as they are is found to have nothing to do.
    """
    whole = uncompressed(model).to(device, torch.float32)
    grids = tuple(layout.grid for layout in host_of(whole).layouts())
    placed = compress(whole, in_place_plan(grids[0], len(grids), grids))
    models = {
        "original": whole,
        "prune and merge": placed,
        "prune and merge, all kept": compress(whole, Plan.keep_all(grids[0], len(grids), grids=grids)),
        "prune and merge, optimized": optimize_for_inference(placed),
        "direct": variant("direct", placed, "eager"),
    }
    with suppress(PmvitError):  # these are not for every host
        models["tome, matching but not merging"] = compress(whole, Tome(0, always_match=True))
        models["evit, fusing one token a stage"] = compress(whole, Evit(keep=1 - 1 / math.prod(grids[0])))
    return benchmark(placed, against=models, batches=[batch], rounds=rounds, threads=threads, device=device)


def _take_turns(
    makers: Makers, runtime: str, batches: Sequence[Tensor], rounds: int, threads: int, folder: Path, saved: Path | None
) -> list[BenchmarkRow]:
    """All variants of one runtime at one batch size."""
    images = batches[0]
    runs: dict[str, Run] = {}
    failures: dict[str, str] = {}
    peaks: dict[str, float | None] = {}
    costs: dict[str, float] = {}
    for number, (name, make) in enumerate(makers.items()):
        try:
            costs[name] = flops(_made(make, runtime)).gflops
            calibration = batches if name.endswith(INT8) else ()
            made = as_module(_made(make, runtime))
            runs[name], file = _open(made, runtime, images, calibration, threads, folder / str(number))
            run_to_end(runs[name], images)
            if saved is not None:
                peaks[name] = peak_memory(name.removesuffix(INT8), saved, runtime, file, tuple(images.shape), threads)
        except Exception as error:  # a variant that a runtime cannot take is a result, not the end
            runs.pop(name, None)
            failures[name] = reason(error, 120)
    if "original" not in runs:
        why = failures.get("original", "there is no model of that name")
        raise PmvitError(f"{runtime} does not run the original model: {why}")
    times = interleave({name: partial(run_to_end, run, images) for name, run in runs.items()}, rounds)
    rows = []
    for name in makers:
        row = BenchmarkRow(name, runtime, len(images), costs.get(name), failure=failures.get(name))
        if name in runs:
            seconds, ratio = times[name], speedup(times, name, "original")
            row = replace(
                row,
                throughput=len(images) / statistics.median(seconds),
                p50=statistics.median(seconds),
                p95=statistics.quantiles(seconds, n=20, method="inclusive")[-1],
                speedup=ratio,
                of_bound=speedup(times, name, "bound") if "bound" in runs else None,
                efficiency=ratio.value * costs[name] / costs["original"],
                memory=peaks.get(name),
            )
        rows.append(row)
    return rows


def _made(make: nn.Module | Maker, runtime: str) -> nn.Module:
    """A model for a runtime, in evaluation mode and without gradients."""
    target: Target = "eager" if runtime == "eager" else RUNTIMES[runtime].target if runtime in RUNTIMES else "graph"
    model = copy.deepcopy(make) if isinstance(make, nn.Module) else make(target)
    return model.eval().requires_grad_(False)


def _open(
    model: nn.Module, runtime: str, images: Tensor, calibration: Sequence[Tensor], threads: int, path: Path
) -> tuple[Run, Path | None]:
    """A model ready to run, quantised if there are images to calibrate on, and its file if it has one."""
    if calibration and runtime not in QUANTIZING:
        raise PmvitError(f"eight bits are for {' and '.join(QUANTIZING)}")
    if runtime == "eager":
        return inferring(model), None
    if runtime == "compile":
        with quietly():
            run = inferring(torch.compile(model, fullgraph=True))
            run(images)
        return run, None
    file = path.with_suffix(RUNTIMES[runtime].suffix)
    return RUNTIMES[runtime].make(model, file, images, False, calibration, threads), file


def _environment(runtimes: Sequence[str], threads: int, rounds: int) -> dict[str, Any]:
    found = {"pmvit": version("pmvit"), "timm": version("timm"), "torch": torch.__version__.partition("+")[0]}
    for name in ("onnxruntime" if name == "onnx" else name for name in runtimes):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {**found, "CPU": _processor(), "threads": threads, "rounds": rounds}


def _device_name(device: str | torch.device) -> str:
    """A device, with the name of the GPU if it is one of CUDA's."""
    is_cuda = torch.device(device).type == "cuda"
    return f"{device} ({torch.cuda.get_device_name(device)})" if is_cuda else str(device)


def _processor() -> str:
    """The name of the processor, as far as the system says."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
