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
    from pmvit.compress import compress, decompress, load, save
    from pmvit.cost import Flops, flops
    from pmvit.evaluation import Evaluation, evaluate
    from pmvit.evaluation.segmentation import SegmentationEvaluation, evaluate_segmentation
    from pmvit.models.segmenter import Segmenter, create_segmenter
    from pmvit.pipeline import RunResults, run
    from pmvit.planning import LayerPlan, Plan, PlanConfig, plan
    from pmvit.pricing import PriceConfig, Prices, price
    from pmvit.prune_merge import PruneMerge
    from pmvit.report.segment import segment
    from pmvit.report.segmentation import Segmentation
    from pmvit.report.tradeoff import draw_tradeoff
    from pmvit.report.visualize import Visualized, visualize
    from pmvit.runtime.benchmark import Benchmark, benchmark, overhead
    from pmvit.runtime.export import Exported, export
    from pmvit.runtime.optimize import InferenceConfig, optimize_for_inference
    from pmvit.scoring import ScoreConfig, Scores, score
    from pmvit.training import FinetuneConfig, Finetuned, finetune

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
    "Plan",
    "PlanConfig",
    "PmvitError",
    "PriceConfig",
    "Prices",
    "PruneMerge",
    "RunResults",
    "ScoreConfig",
    "Scores",
    "Segmentation",
    "SegmentationEvaluation",
    "Segmenter",
    "Visualized",
    "benchmark",
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
    "optimize_for_inference",
    "overhead",
    "plan",
    "price",
    "run",
    "save",
    "score",
    "segment",
    "visualize",
]

_HOMES = {
    "comparison": ("Comparison", "compare"),
    "compress": ("compress", "decompress", "load", "save"),
    "cost": ("Flops", "flops"),
    "evaluation": ("Evaluation", "evaluate"),
    "evaluation.segmentation": ("SegmentationEvaluation", "evaluate_segmentation"),
    "models.segmenter": ("Segmenter", "create_segmenter"),
    "pipeline": ("RunResults", "run"),
    "planning": ("LayerPlan", "Plan", "PlanConfig", "plan"),
    "pricing": ("PriceConfig", "Prices", "price"),
    "prune_merge": ("PruneMerge",),
    "report.segment": ("segment",),
    "report.segmentation": ("Segmentation",),
    "report.tradeoff": ("draw_tradeoff",),
    "report.visualize": ("Visualized", "visualize"),
    "runtime.benchmark": ("Benchmark", "benchmark", "overhead"),
    "runtime.export": ("Exported", "export"),
    "runtime.optimize": ("InferenceConfig", "optimize_for_inference"),
    "scoring": ("ScoreConfig", "Scores", "score"),
    "training": ("FinetuneConfig", "Finetuned", "finetune"),
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
