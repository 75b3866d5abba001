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

__all__ = [
    "Adapter",
    "HostChange",
    "TimmSwin",
    "TimmViT",
    "TokenLayout",
    "adapter_for",
    "adapter_of_family",
    "register",
    "supported_families",
]
