"""Every option of pmvit: what can be chosen, its default and what it means, each written once and without torch.

Keyword arguments of the verbs build these classes, what was used is recorded in every file, and the command line is
made from them: the first sentence about an attribute is its help.
"""

from pmvit.config.base import choices as choices
from pmvit.config.base import with_keywords as with_keywords
from pmvit.config.inference import InferenceConfig as InferenceConfig
from pmvit.config.inference import InferenceOptions as InferenceOptions
from pmvit.config.inference import SpeedConfig as SpeedConfig
from pmvit.config.inference import SpeedOptions as SpeedOptions
from pmvit.config.measuring import MeasureOptions as MeasureOptions
from pmvit.config.measuring import MergeCostConfig as MergeCostConfig
from pmvit.config.measuring import MetricConfig as MetricConfig
from pmvit.config.measuring import ScoreConfig as ScoreConfig
from pmvit.config.planning import PAPER as PAPER
from pmvit.config.planning import PlanConfig as PlanConfig
from pmvit.config.planning import PlanOptions as PlanOptions
from pmvit.config.planning import TargetOptions as TargetOptions
from pmvit.config.training import PRESETS as PRESETS
from pmvit.config.training import FinetuneConfig as FinetuneConfig
from pmvit.config.training import FinetuneOptions as FinetuneOptions
