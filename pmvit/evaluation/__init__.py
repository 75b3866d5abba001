"""How good a model is: accuracy, mean IoU, and how far it strays from the original."""

from pmvit.evaluation.classification import Evaluation, evaluate
from pmvit.evaluation.segmentation import SegmentationEvaluation, evaluate_segmentation

__all__ = ["Evaluation", "SegmentationEvaluation", "evaluate", "evaluate_segmentation"]
