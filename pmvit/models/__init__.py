"""Adapters: one a family of host models, found through a registry."""

from pmvit.models.adapter import (
    Adapter,
    HostChange,
    TokenLayout,
    adapter_for,
    adapter_of_family,
    register,
    supported_families,
)
from pmvit.models.timm_swin import TimmSwin
from pmvit.models.timm_vit import TimmViT
from pmvit.models.torchvision_swin import TorchvisionSwin

__all__ = [
    "Adapter",
    "HostChange",
    "TimmSwin",
    "TimmViT",
    "TokenLayout",
    "TorchvisionSwin",
    "adapter_for",
    "adapter_of_family",
    "register",
    "supported_families",
]
