"""Weight pruning by the package torch-pruning, at the same cost as the token methods: fewer channels, all tokens.

Hidden channels of the MLPs and dimensions of the attention heads go, those of least importance first, ranked over all
blocks within each kind of layer (isomorphic pruning). The width of the tokens stays: without fine-tuning nothing is
left of a model that loses some of it.
"""

import copy
import warnings
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pmvit.data.batches import unpack
from pmvit.data.opening import ImageData, as_loader
from pmvit.errors import PmvitError
from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode
from pmvit.hosts.outputs import predict
from pmvit.hosts.timm.parts import is_plain
from pmvit.measuring.flops import flops
from pmvit.methods.budget import bisect

Importance = Literal["magnitude", "taylor"]
Host = Any  # timm's models: nn.Modules whose attributes have no types

IMAGES = 512  # whose gradients the Taylor importance is made of
MOST = 0.95  # of the channels of a layer may go


def prune_weights(
    model: nn.Module, gflops: float, importance: Importance = "magnitude", data: ImageData | None = None
) -> tuple[nn.Module, float]:
    """A copy of a timm ViT with fewer weights, as near to a cost as it comes, and the share of channels that went.

    Channels go by the `magnitude` of their weights, or the first-order change of the loss (`taylor`) on `data`, images
    as `as_loader` knows them; the model's own predictions take the place of missing labels.
    """
    encoder: Host = model
    if not isinstance(model, VisionTransformer) or not all(
        is_plain(block) and isinstance(block.attn.q_norm, nn.Identity) for block in encoder.blocks
    ):
        raise PmvitError(f"expected a timm VisionTransformer with plain blocks to prune; got a {type(model).__name__}")
    gradients: dict[str, Tensor] = {}
    if importance == "taylor":
        if data is None:
            raise PmvitError("taylor pruning goes by gradients: give it images")
        gradients = gradients_of(model, data)

    def made(ratio: float) -> tuple[tuple[nn.Module, float], float]:
        small = pruned(model, ratio, importance, gradients)
        return (small, ratio), flops(small).gflops

    return bisect(made, gflops, MOST)[0]


def gradients_of(model: nn.Module, data: ImageData) -> dict[str, Tensor]:
    """The gradient of the mean loss over images, by the names of parameters; the model is left as it was."""
    learner = copy.deepcopy(model).requires_grad_(True)
    device = next(learner.parameters()).device
    num_images = 0
    with evaluation_mode(learner), torch.enable_grad():
        for batch in as_loader(model, data, shuffle=True):
            images, labels = unpack(batch)
            logits = predict(learner, images.to(device))
            wanted = logits.argmax(-1) if labels is None else labels.to(device)
            F.cross_entropy(logits, wanted, reduction="sum").backward()
            num_images += len(images)
            if num_images >= IMAGES:
                break
    if not num_images:
        raise PmvitError("expected at least one image for the gradients of taylor pruning; got none")
    return {name: p.grad / num_images for name, p in learner.named_parameters() if p.grad is not None}


def pruned(model: nn.Module, ratio: float, importance: Importance, gradients: dict[str, Tensor]) -> nn.Module:
    """A copy without a share of the hidden channels and of the dimensions of heads."""
    try:
        import torch_pruning
    except ImportError:
        raise PmvitError("weight pruning needs torch-pruning: pip install 'pmvit[pruning]'") from None
    small: Host = copy.deepcopy(model).requires_grad_(True)
    for name, parameter in small.named_parameters():
        parameter.grad = gradients.get(name)
    attentions = {block.attn: block.attn.fused_attn for block in small.blocks}
    for attention in attentions:
        attention.fused_attn = False  # its parts can be followed
    roots = {layer for block in small.blocks for layer in (block.attn.qkv, block.mlp.fc1)}
    layers = [module for module in small.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    kinds = torch_pruning.importance
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unwrapped parameters")  # class token and positions keep their width
        torch_pruning.pruner.BasePruner(
            small,
            torch.zeros(1, *host_of(model).input_size(), device=next(small.parameters()).device),
            importance=kinds.GroupTaylorImportance() if importance == "taylor" else kinds.GroupMagnitudeImportance(p=2),
            global_pruning=True,
            isomorphic=True,
            pruning_ratio=ratio,
            max_pruning_ratio=MOST,
            ignored_layers=[layer for layer in layers if layer not in roots],
            num_heads={attention.qkv: attention.num_heads for attention in attentions},
        ).step()
    for attention, was_fused in attentions.items():
        _resize(attention, was_fused)
    small.zero_grad(set_to_none=True)
    result: nn.Module = small.train(model.training)
    return result


def _resize(attention: Host, was_fused: bool) -> None:
    """Let attention know its new sizes, and keep the scale of its scores: a pruned dimension adds nothing to them."""
    before = attention.head_dim
    attention.attn_dim = attention.qkv.out_features // 3
    attention.head_dim = attention.attn_dim // attention.num_heads
    attention.scale = attention.head_dim**-0.5
    attention.fused_attn = was_fused
    with torch.no_grad():
        factor = (attention.head_dim / before) ** 0.5
        attention.qkv.weight[: attention.attn_dim] *= factor
        if attention.qkv.bias is not None:
            attention.qkv.bias[: attention.attn_dim] *= factor
