"""Adapters: one a family of host models, found through a registry."""

from pmvit.models.adapter import (
    Adapter,
    HostChange,
    TokenLayout,
    adapter_for,
    adapter_of_family,
    find_adapter,
    register,
    supported_families,
)
from pmvit.models.hf_swin import HuggingFaceSwin
from pmvit.models.hf_vit import HuggingFaceViT
from pmvit.models.segmenter_adapter import SegmenterAdapter
from pmvit.models.smp_dpt import SmpDpt
from pmvit.models.timm_features import TimmFeatures
from pmvit.models.timm_swin import TimmSwin
from pmvit.models.timm_vit import TimmViT
from pmvit.models.torchvision_swin import TorchvisionSwin
from pmvit.models.torchvision_vit import TorchvisionViT

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
