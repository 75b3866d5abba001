"""Prune and Merge: token compression for Vision Transformers.

    import pmvit

    measured = pmvit.measure(model, loader)  # any loader of images; labels are not read
    plan = pmvit.plan(measured, keep=0.6)  # how many tokens merge before each block; every image says which
    small = pmvit.compress(model, plan)  # a copy that runs on fewer tokens

or `small = pmvit.compress(model, pmvit.plan(pmvit.measure(model, loader), keep=0.6))`. What follows is as short:
`calibrate` and `finetune` bring accuracy back, `evaluate`, `benchmark` and `report` show what was gained and lost,
`export` and `optimize_for_inference` bring the model to where it runs, `save` and `load` keep it.

These names are loaded when they are first used, so that `import pmvit` and `pmvit --help` are instant. Everything else
is in its room: what is measured in `pmvit.measuring`, plans in `pmvit.planning`, options in `pmvit.config`, other
methods in `pmvit.methods`, models of other libraries in `pmvit.hosts`.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pmvit import _torchvision

if TYPE_CHECKING:  # the one list of public names: type checkers read it, and so does `__getattr__`
    from pmvit.comparison import compare as compare
    from pmvit.compression import compress as compress
    from pmvit.compression import decompress as decompress
    from pmvit.compression import set_budget as set_budget
    from pmvit.errors import PmvitError as PmvitError
    from pmvit.evaluation.classification import evaluate as evaluate
    from pmvit.measuring import measure as measure
    from pmvit.measuring.flops import flops as flops
    from pmvit.pipeline import run as run
    from pmvit.reporting.page.report import report as report
    from pmvit.reporting.pictures.segment import segment as segment
    from pmvit.reporting.pictures.visualize import visualize as visualize
    from pmvit.reporting.serve.server import serve as serve
    from pmvit.runtime.bench.run import benchmark as benchmark
    from pmvit.runtime.export.run import export as export
    from pmvit.runtime.optimize import optimize_for_inference as optimize_for_inference
    from pmvit.saving.models import load as load
    from pmvit.saving.models import save as save
    from pmvit.saving.push import push_to_hub as push_to_hub
    from pmvit.tradeoff import curve as curve
    from pmvit.tradeoff import plan as plan
    from pmvit.training import calibrate as calibrate
    from pmvit.training import finetune as finetune

__version__ = "0.1.0"

_SOURCE = Path(__file__).read_text(encoding="utf-8")
_ROOMS = {name: room for room, name in re.findall(r"^    from (\S+) import (\w+) as \2$", _SOURCE, re.MULTILINE)}
__all__ = sorted(_ROOMS)


if not TYPE_CHECKING:  # a type checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        if name not in _ROOMS:
            raise AttributeError(f"module 'pmvit' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_ROOMS[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_torchvision.install()
