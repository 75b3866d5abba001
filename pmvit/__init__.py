"""Prune and Merge: token compression for Vision Transformers.

    scores = pmvit.score(model, loader)
    plan = pmvit.plan(scores, keep=0.6, prune=0.1)
    small = pmvit.compress(model, plan)

The names are loaded when they are first used, so that `import pmvit` and `pmvit --help` are instant.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pmvit import _torchvision
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from pmvit.comparison import Comparison, compare
    from pmvit.compression import compress, decompress
    from pmvit.evaluation.classification import Evaluation, evaluate
    from pmvit.evaluation.segmentation import SegmentationEvaluation, evaluate_segmentation
    from pmvit.hosts.segmenter.model import Segmenter, create_segmenter
    from pmvit.measuring import MergeCostConfig, MergeCosts, ScoreConfig, Scores, measure_merge_costs, score
    from pmvit.measuring.flops import Flops, flops
    from pmvit.pipeline import RunResults, run
    from pmvit.planning import LayerPlan, Plan, PlanConfig, plan
    from pmvit.prune_merge import PruneMerge
    from pmvit.reporting.page.report import report
    from pmvit.reporting.pictures.segment import segment
    from pmvit.reporting.pictures.segmentation import Segmentation
    from pmvit.reporting.pictures.tradeoff import draw_tradeoff
    from pmvit.reporting.pictures.visualize import Visualized, visualize
    from pmvit.reporting.serve.server import serve
    from pmvit.runtime.bench.run import benchmark, overhead
    from pmvit.runtime.bench.table import Benchmark
    from pmvit.runtime.export.run import Exported, export
    from pmvit.runtime.optimize import InferenceConfig, optimize_for_inference
    from pmvit.saving import load, save
    from pmvit.training import FinetuneConfig, Finetuned, calibrate, finetune

__version__ = "0.1.0"

__all__ = [
    "Benchmark",
    "Comparison",
    "Evaluation",
    "Exported",
    "FinetuneConfig",
    "Finetuned",
    "Flops",
    "InferenceConfig",
    "LayerPlan",
    "MergeCostConfig",
    "MergeCosts",
    "Plan",
    "PlanConfig",
    "PmvitError",
    "PruneMerge",
    "RunResults",
    "ScoreConfig",
    "Scores",
    "Segmentation",
    "SegmentationEvaluation",
    "Segmenter",
    "Visualized",
    "benchmark",
    "calibrate",
    "compare",
    "compress",
    "create_segmenter",
    "decompress",
    "draw_tradeoff",
    "evaluate",
    "evaluate_segmentation",
    "export",
    "finetune",
    "flops",
    "load",
    "measure_merge_costs",
    "optimize_for_inference",
    "overhead",
    "plan",
    "report",
    "run",
    "save",
    "score",
    "segment",
    "serve",
    "visualize",
]

_HOMES = {
    "comparison": ("Comparison", "compare"),
    "compression": ("compress", "decompress"),
    "measuring.flops": ("Flops", "flops"),
    "evaluation.classification": ("Evaluation", "evaluate"),
    "evaluation.segmentation": ("SegmentationEvaluation", "evaluate_segmentation"),
    "hosts.segmenter.model": ("Segmenter", "create_segmenter"),
    "pipeline": ("RunResults", "run"),
    "planning": ("LayerPlan", "Plan", "PlanConfig", "plan"),
    "measuring": ("MergeCostConfig", "MergeCosts", "ScoreConfig", "Scores", "measure_merge_costs", "score"),
    "prune_merge": ("PruneMerge",),
    "reporting.page.report": ("report",),
    "reporting.pictures.segment": ("segment",),
    "reporting.pictures.segmentation": ("Segmentation",),
    "reporting.pictures.tradeoff": ("draw_tradeoff",),
    "reporting.pictures.visualize": ("Visualized", "visualize"),
    "runtime.bench.run": ("benchmark", "overhead"),
    "runtime.bench.table": ("Benchmark",),
    "runtime.export.run": ("Exported", "export"),
    "runtime.optimize": ("InferenceConfig", "optimize_for_inference"),
    "saving": ("load", "save"),
    "reporting.serve.server": ("serve",),
    "training": ("FinetuneConfig", "Finetuned", "calibrate", "finetune"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


class _Package(ModuleType):
    """Loads public names on first use. Where a function and a module share a name, `pmvit.name` is the function."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'pmvit' has no attribute {name!r}")
        value = getattr(import_module(f"pmvit.{_HOME_OF[name]}"), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


sys.modules[__name__].__class__ = _Package
_torchvision.install()
