"""What planning has to know of a model, measured on images: a metric, merge costs, scores (Eq. 9), FLOPs.

A *metric* says how much differences of tokens matter, for plans that adapt to the image (ours, see `metric`). *Merge
costs* say what merging tokens does to the output (ours, see `merge_costs`). *Scores* say how much each token of each
layer matters (Eq. 9 through the value tensor, see `listener`). `measure` chooses between them.
"""

from pmvit.measuring.merge_costs import Merge as Merge
from pmvit.measuring.merge_costs import MergeCosts as MergeCosts
from pmvit.measuring.method import KINDS as KINDS
from pmvit.measuring.method import MeasureConfig as MeasureConfig
from pmvit.measuring.method import Measured as Measured
from pmvit.measuring.method import check_needs_no_images as check_needs_no_images
from pmvit.measuring.method import kind_of as kind_of
from pmvit.measuring.method import measure as measure
from pmvit.measuring.method import measure_by as measure_by
from pmvit.measuring.method import measure_config as measure_config
from pmvit.measuring.method import read_measured as read_measured
from pmvit.measuring.metric import TokenMetric as TokenMetric
from pmvit.measuring.scores import Scores as Scores
