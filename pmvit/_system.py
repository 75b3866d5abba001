"""What computing has to know about the system it runs on: its processor, its memory, the processes beside it.

Some virtual machines announce AMX, the matrix unit of recent Intel processors, and do not execute it. And the C library
gives memory back that is needed again at once.
"""

import ctypes
import functools
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

VARIABLE = "ONEDNN_MAX_CPU_ISA"  # heeded by PyTorch and OpenVINO when they first compute
WITHOUT_AMX = "AVX512_CORE_FP16"
PROBE = "import torch; torch.nn.Linear(64, 64).bfloat16()(torch.ones(64, 64).bfloat16())"


@functools.cache
def avoid_broken_amx() -> bool:
    """Where AMX is announced but kills the process that uses it, keep libraries from using it; say whether it is so.

    Costs the start of a Python process where AMX is announced, nothing elsewhere. Call it before the first computation
    with eight-bit integers or bfloat16: libraries look at the variable only once.
    """
    if VARIABLE in os.environ or not _announces_amx():
        return False
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True)  # noqa: S603  # a constant
    is_broken = probe.returncode == -signal.SIGILL
    if is_broken:
        os.environ[VARIABLE] = WITHOUT_AMX
    return is_broken


def _announces_amx() -> bool:
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def keep_freed_memory() -> bool:
    """Tell the C library to keep memory that was freed instead of giving it back, where it can be told (glibc).

    PyTorch takes and frees buffers of megabytes with every operation; where each is new memory, eager PyTorch waits for
    its pages, by chance more for one model than for another.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold = -1, -3  # of malloc.h
        return bool(mallopt(trim_threshold, 1 << 30)) and bool(mallopt(mmap_threshold, 1 << 30))
    return False


def this_process() -> tuple[int, int]:
    """Rank and world size of torch.distributed; (0, 1) where it is not used."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


_everybody: list[tuple[str, int]] = []  # where the processes run: by rank, the machine and the number it has there
_advice: list[Callable[[], str]] = []  # what to do where one of them ends: the newest


def meet_processes(advice: Callable[[], str]) -> None:
    """Let all processes know where the others run, so that `lost_processes` can say which of them have ended.

    Args:
        advice: Says what to do then.
    """
    if this_process()[1] > 1:
        from accelerate.utils import gather_object

        _advice[:] = [advice]
        _everybody[:] = gather_object([(platform.node(), os.getpid())])


def lost_processes(patience: float = 3.0) -> str | None:
    """Which of the processes beside this one have ended, and what to do then, in one line; `None` if none has.

    Where one ends, others learn of it from a collective that fails, with words about sockets, or from their launcher,
    which ends them, too: whichever is first. That may be a little earlier than the end of the process can be seen.
    """
    import psutil

    here, until = platform.node(), time.monotonic() + patience
    beside = {rank: number for rank, (machine, number) in enumerate(_everybody) if machine == here}
    while beside:
        ended = []
        for rank, number in beside.items():
            with suppress(psutil.AccessDenied):
                try:
                    is_there = psutil.Process(number).status() != psutil.STATUS_ZOMBIE
                except psutil.NoSuchProcess:
                    is_there = False
                ended += [] if is_there else [str(rank)]
        if ended:
            said = f"rank {' and '.join(ended)} of {len(_everybody)} ended before the work was done"
            return f"{said} (without a message of its own it was killed, often for want of memory); {_advice[0]()}"
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    return None


def wait_for_all() -> None:
    """Until all processes are here."""
    if this_process()[1] > 1:
        torch.distributed.barrier()
