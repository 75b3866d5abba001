"""Hosts: what pmvit knows of other libraries' models, one class a family, found through a registry."""

from pmvit.hosts.hf.swin import HuggingFaceSwin
from pmvit.hosts.hf.vit import HuggingFaceViT
from pmvit.hosts.host import (
    OLD_FAMILIES,
    Host,
    HostChange,
    TokenLayout,
    find_host,
    host_class,
    host_of,
    register,
    supported_families,
)
from pmvit.hosts.segmenter.host import SegmenterHost
from pmvit.hosts.smp import SmpDpt
from pmvit.hosts.timm.features import TimmFeatures
from pmvit.hosts.timm.swin import TimmSwin
from pmvit.hosts.timm.vit import TimmViT
from pmvit.hosts.torchvision.swin import TorchvisionSwin
from pmvit.hosts.torchvision.vit import TorchvisionViT

__all__ = [
    "OLD_FAMILIES",
    "Host",
    "HostChange",
    "HuggingFaceSwin",
    "HuggingFaceViT",
    "SegmenterHost",
    "SmpDpt",
    "TimmFeatures",
    "TimmSwin",
    "TimmViT",
    "TokenLayout",
    "TorchvisionSwin",
    "TorchvisionViT",
    "find_host",
    "host_class",
    "host_of",
    "register",
    "supported_families",
]
