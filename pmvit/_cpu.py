"""Some virtual machines announce AMX, the matrix unit of recent Intel processors, and do not execute it."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

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
