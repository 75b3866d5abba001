"""Adapters: one a family of host models, found through a registry."""

from pmvit.hosts.hf.swin import HuggingFaceSwin
from pmvit.hosts.hf.vit import HuggingFaceViT
from pmvit.hosts.host import (
    Adapter,
    HostChange,
    TokenLayout,
    adapter_for,
    adapter_of_family,
    find_adapter,
    register,
    supported_families,
)
from pmvit.hosts.segmenter.host import SegmenterAdapter
from pmvit.hosts.smp import SmpDpt
from pmvit.hosts.timm.features import TimmFeatures
from pmvit.hosts.timm.swin import TimmSwin
from pmvit.hosts.timm.vit import TimmViT
from pmvit.hosts.torchvision.swin import TorchvisionSwin
from pmvit.hosts.torchvision.vit import TorchvisionViT

__all__ = [
    "Adapter",
    "HostChange",
    "HuggingFaceSwin",
    "HuggingFaceViT",
    "SegmenterAdapter",
    "SmpDpt",
    "TimmFeatures",
    "TimmSwin",
    "TimmViT",
    "TokenLayout",
    "TorchvisionSwin",
    "TorchvisionViT",
    "adapter_for",
    "adapter_of_family",
    "find_adapter",
    "register",
    "supported_families",
]
