"""What planning has to know of a model, measured on images: scores (Eq. 9), merge costs, FLOPs.

*Scores* say how much each token of each layer matters (Eq. 9 through the value tensor, see `score_recorder`). *Merge
costs* say what merging tokens does to the output (ours, see `merge_costs`). `measure` chooses between them.
"""

from pmvit.measuring.merge_costs import Merge, MergeCosts
from pmvit.measuring.method import measure, measure_by, measure_config, read_measured
from pmvit.measuring.metric import TokenMetric
from pmvit.measuring.scores import Scores

__all__ = ["Merge", "MergeCosts", "Scores", "TokenMetric", "measure", "measure_by", "measure_config", "read_measured"]
