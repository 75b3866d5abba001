"""Peak memory of a variant, measured in a process that does nothing else."""

import ctypes
import gc
import multiprocessing
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, cast

import torch


class Openable(NamedTuple):
    """A variant in a runtime, so that another process can open it: its file, or how it is made of a saved model."""

    runtime: str
    file: Path | None
    saved: Path
    variant: str


def peak_memory(openable: Openable, shape: tuple[int, ...], threads: int) -> float | None:
    """Megabytes that opening a variant and running it three times need in a fresh process; `None` where the system
    does not say, which is everywhere but on Linux.
    """
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(openable, shape, threads, its))
    process.start()
    its.close()
    try:
        return cast("float | None", mine.recv())
    except EOFError:
        return None
    finally:
        process.join()


def _report(openable: Openable, shape: tuple[int, ...], threads: int, report: Connection) -> None:
    try:
        report.send(_measure(openable, shape, threads))
    except Exception:  # it ran in the process that asks; what fails here is the measurement
        report.send(None)
    report.close()


def _measure(openable: Openable, shape: tuple[int, ...], threads: int) -> float:
    from pmvit.hosts.outputs import as_module
    from pmvit.runtime.bench.variants import variant
    from pmvit.runtime.export.targets import RUNTIMES, inferring
    from pmvit.saving.models import load

    torch.set_num_threads(threads)
    images = torch.zeros(shape)
    if openable.file is not None:
        RUNTIMES[openable.runtime].check()
    before = process_memory("VmRSS")
    if openable.file is not None:
        run = RUNTIMES[openable.runtime].open(openable.file, threads)
    else:
        made = variant(openable.variant, load(openable.saved), "eager" if openable.runtime == "eager" else "graph")
        model = as_module(made)
        run = inferring(torch.compile(model, fullgraph=True) if openable.runtime == "compile" else model)
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    for _ in range(3):
        run(images)
    return process_memory("VmHWM") - before


def process_memory(name: str) -> float:
    """Megabytes of this process as Linux counts them: `VmRSS` now, `VmHWM` at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[1]) / 1024
