"""A short name for a model's weights, to tell whether work is continued on the same model."""

import hashlib

import torch
from torch import nn


def fingerprint(model: nn.Module) -> str:
    """The same for the same class and weights, on any device, and for no others."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        if not parameter.is_meta:
            value = parameter.detach().cpu().contiguous()
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
