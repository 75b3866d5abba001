"""How good a model is: accuracy, and how far it strays from the original."""

from pmvit.evaluation.classification import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate"]
