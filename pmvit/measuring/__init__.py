"""What planning has to know of a model, measured on images: scores (Eq. 9), merge costs, FLOPs.

*Scores* say how much each token of each layer matters (Eq. 9 through the value tensor, see `score_recorder`). *Merge
costs* say what merging tokens does to the output (ours, see `merge_costs`).
"""

from pmvit.measuring.cost_run import measure_merge_costs
from pmvit.measuring.merge_costs import Merge, MergeCostConfig, MergeCosts
from pmvit.measuring.score_run import score
from pmvit.measuring.scores import ScoreConfig, Scores

__all__ = ["Merge", "MergeCostConfig", "MergeCosts", "ScoreConfig", "Scores", "measure_merge_costs", "score"]
