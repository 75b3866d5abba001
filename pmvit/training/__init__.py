"""Fine-tuning with self-distillation: from a compressed model to one that is as accurate as its original."""

from pmvit.training.run import calibrate, finetune
from pmvit.training.signals import StoppedError
from pmvit.training.trainer import Finetuned

__all__ = ["Finetuned", "StoppedError", "calibrate", "finetune"]
