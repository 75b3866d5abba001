"""Every option of pmvit: what can be chosen, its default and what it means, each written once and without torch.

Keyword arguments of the verbs build these classes, what was used is recorded in every file, and the command line is
made from them: the first sentence about an attribute is its help.
"""

from pmvit.config.base import choices, with_keywords
from pmvit.config.inference import InferenceConfig, InferenceOptions
from pmvit.config.measuring import MeasureOptions, MergeCostConfig, MetricConfig, ScoreConfig
from pmvit.config.planning import PAPER, PlanConfig, PlanOptions
from pmvit.config.training import PRESETS, FinetuneConfig, FinetuneOptions

__all__ = [
    "PAPER",
    "PRESETS",
    "FinetuneConfig",
    "FinetuneOptions",
    "InferenceConfig",
    "InferenceOptions",
    "MeasureOptions",
    "MergeCostConfig",
    "MetricConfig",
    "PlanConfig",
    "PlanOptions",
    "ScoreConfig",
    "choices",
    "with_keywords",
]
