"""Peak memory of a variant, measured in a process that does nothing else."""

import ctypes
import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch


def peak_memory(
    variant: str, saved: Path, runtime: str, file: Path | None, shape: tuple[int, ...], threads: int
) -> float | None:
    """Megabytes that opening a variant, from its file or made of a saved model, and running it three times need in a
    fresh process; `None` where the system does not say, which is everywhere but on Linux.
    """
    with (
        suppress(Exception),  # it ran in this process; what fails there is the measurement
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
    ):
        return process.submit(_measure, variant, saved, runtime, file, shape, threads).result()
    return None


def _measure(name: str, saved: Path, runtime: str, file: Path | None, shape: tuple[int, ...], threads: int) -> float:
    from pmvit.hosts.outputs import as_module
    from pmvit.runtime.bench.variants import variant
    from pmvit.runtime.export.targets import RUNTIMES, inferring, quietly
    from pmvit.saving.models import load

    torch.set_num_threads(threads)
    images = torch.zeros(shape)
    if file is not None:
        RUNTIMES[runtime].check()
    give_back()  # what imports left is given back before, or it would count as memory that running saves
    before = process_memory("VmRSS")
    if file is not None:
        with quietly():
            run = RUNTIMES[runtime].open(file, threads)
    else:
        model = as_module(variant(name, load(saved), "eager" if runtime == "eager" else "graph"))
        run = inferring(torch.compile(model, fullgraph=True) if runtime == "compile" else model)
    give_back()
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    for _ in range(3):
        run(images)
    return process_memory("VmHWM") - before


def give_back() -> None:
    """Give memory that nothing uses back to the system, where the C library can be told (glibc)."""
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def process_memory(name: str) -> float:
    """Megabytes of this process as Linux counts them: `VmRSS` now, `VmHWM` at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[1]) / 1024
