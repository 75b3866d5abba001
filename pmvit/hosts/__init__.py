"""Hosts: what pmvit knows of other libraries' models, one class a family, found through a registry."""

from pmvit.hosts.hf.audio import HuggingFaceAudio as HuggingFaceAudio
from pmvit.hosts.hf.sam import HuggingFaceSam as HuggingFaceSam
from pmvit.hosts.hf.swin import HuggingFaceSwin as HuggingFaceSwin
from pmvit.hosts.hf.video import HuggingFaceVideo as HuggingFaceVideo
from pmvit.hosts.hf.vit import HuggingFaceViT as HuggingFaceViT
from pmvit.hosts.hf.vlm import HuggingFaceVLM as HuggingFaceVLM
from pmvit.hosts.host import OLD_FAMILIES as OLD_FAMILIES
from pmvit.hosts.host import Host as Host
from pmvit.hosts.host import HostChange as HostChange
from pmvit.hosts.host import TokenLayout as TokenLayout
from pmvit.hosts.host import find_host as find_host
from pmvit.hosts.host import host_class as host_class
from pmvit.hosts.host import host_of as host_of
from pmvit.hosts.host import register as register
from pmvit.hosts.host import supported_families as supported_families
from pmvit.hosts.segmenter.model import SegmenterHost as SegmenterHost
from pmvit.hosts.smp import SmpDpt as SmpDpt
from pmvit.hosts.timm.naflex import TimmNaFlex as TimmNaFlex
from pmvit.hosts.timm.swin import TimmSwin as TimmSwin
from pmvit.hosts.timm.vit import TimmFeatures as TimmFeatures
from pmvit.hosts.timm.vit import TimmViT as TimmViT
from pmvit.hosts.torchvision import TorchvisionSwin as TorchvisionSwin
from pmvit.hosts.torchvision import TorchvisionViT as TorchvisionViT
