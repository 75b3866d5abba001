"""Peak memory of a contender, measured in a process that does nothing else."""

import ctypes
import gc
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from pmvit.errors import PmvitError


class Place(NamedTuple):
    """A contender in a runtime, so that another process can open it: its file, or how it is made of a saved model."""

    runtime: str
    file: Path | None
    saved: Path
    contender: str


def peak_memory(place: Place, shape: tuple[int, ...], threads: int) -> float:
    """Megabytes that opening a contender and running it three times need in a fresh process; Linux."""
    if not Path("/proc/self/clear_refs").exists():
        raise PmvitError("peak memory is read from /proc, which this system does not have")
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(place, shape, threads, its))
    process.start()
    its.close()
    try:
        return float(mine.recv())
    except EOFError:
        process.join()
        raise PmvitError(f"the process that measured memory ended with code {process.exitcode}") from None
    finally:
        process.join()


def _report(place: Place, shape: tuple[int, ...], threads: int, report: Connection) -> None:
    from pmvit.compress import load
    from pmvit.runtime.contenders import contender
    from pmvit.runtime.targets import RUNTIMES, inferring

    torch.set_num_threads(threads)
    images = torch.zeros(shape)
    if place.file is not None:
        RUNTIMES[place.runtime].check()
    before = _status("VmRSS")
    if place.file is not None:
        run = RUNTIMES[place.runtime].open(place.file, threads)
    else:
        model = contender(place.contender, load(place.saved), "eager" if place.runtime == "eager" else "graph")
        run = inferring(torch.compile(model, fullgraph=True) if place.runtime == "compile" else model)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    for _ in range(3):
        run(images)
    report.send(_status("VmHWM") - before)
    report.close()


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[1]) / 1024
