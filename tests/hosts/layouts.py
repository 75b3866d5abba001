"""The weights of a timm ViT in the layouts of Hugging Face transformers and torchvision."""

from typing import Any

import torch
from torch import Tensor, nn

import pmvit
from pmvit.hosts.outputs import predict
from pmvit.planning import Plan

State = dict[str, Tensor]


def hugging_face_vit(model: nn.Module) -> nn.Module:
    """A `ViTForImageClassification` with the weights of a timm ViT."""
    from transformers import ViTConfig, ViTForImageClassification

    state = model.state_dict()
    blocks = list(model.get_submodule("blocks").children())
    width = state["cls_token"].shape[-1]
    labels: dict[str, Any] = {"num_labels": state["head.weight"].shape[0]}  # which every configuration takes
    attention: Any = blocks[0].get_submodule("attn")
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=len(blocks),
        num_attention_heads=attention.num_heads,
        intermediate_size=state["blocks.0.mlp.fc1.weight"].shape[0],
        image_size=224,
        patch_size=16,
        layer_norm_eps=1e-6,
        **labels,
    )
    names = {
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
        "attn.proj": "attention.o_proj",
    }
    renamed: State = {
        "vit.embeddings.cls_token": state["cls_token"],
        "vit.embeddings.position_embeddings": state["pos_embed"],
    }
    for kind in ("weight", "bias"):
        renamed[f"vit.embeddings.patch_embeddings.projection.{kind}"] = state[f"patch_embed.proj.{kind}"]
        renamed[f"vit.layernorm.{kind}"] = state[f"norm.{kind}"]
        renamed[f"classifier.{kind}"] = state[f"head.{kind}"]
        for index in range(len(blocks)):
            for here, there in names.items():
                renamed[f"vit.layers.{index}.{there}.{kind}"] = state[f"blocks.{index}.{here}.{kind}"]
            for letter, part in zip("qkv", state[f"blocks.{index}.attn.qkv.{kind}"].chunk(3), strict=True):
                renamed[f"vit.layers.{index}.attention.{letter}_proj.{kind}"] = part
    made: nn.Module = ViTForImageClassification(config)
    made.load_state_dict({name: value.clone() for name, value in renamed.items()})
    return made.eval()


def torchvision_vit(model: nn.Module) -> nn.Module:
    """torchvision's `VisionTransformer` with the weights of a timm ViT."""
    from torchvision.models import VisionTransformer

    state = model.state_dict()
    blocks = list(model.get_submodule("blocks").children())
    width = state["cls_token"].shape[-1]
    names = {
        "norm1": "ln_1",
        "norm2": "ln_2",
        "mlp.fc1": "mlp.0",
        "mlp.fc2": "mlp.3",
        "attn.proj": "self_attention.out_proj",
    }
    renamed: State = {"class_token": state["cls_token"], "encoder.pos_embedding": state["pos_embed"]}
    for kind in ("weight", "bias"):
        renamed[f"conv_proj.{kind}"] = state[f"patch_embed.proj.{kind}"]
        renamed[f"encoder.ln.{kind}"] = state[f"norm.{kind}"]
        renamed[f"heads.head.{kind}"] = state[f"head.{kind}"]
        for index in range(len(blocks)):
            path = f"encoder.layers.encoder_layer_{index}"
            for here, there in names.items():
                renamed[f"{path}.{there}.{kind}"] = state[f"blocks.{index}.{here}.{kind}"]
            renamed[f"{path}.self_attention.in_proj_{kind}"] = state[f"blocks.{index}.attn.qkv.{kind}"]
    made: nn.Module = VisionTransformer(
        image_size=224,
        patch_size=16,
        num_layers=len(blocks),
        num_heads=blocks[0].get_submodule("attn").num_heads,
        hidden_dim=width,
        mlp_dim=state["blocks.0.mlp.fc1.weight"].shape[0],
        num_classes=state["head.weight"].shape[0],
    )
    made.load_state_dict({name: value.clone() for name, value in renamed.items()})
    return made.eval()


def explicit_attention(attention: nn.MultiheadAttention, tokens: Tensor, maps: list[Tensor]) -> Tensor:
    """`nn.MultiheadAttention` on one tensor with its attention map in sight, which is added to `maps`."""
    projected = tokens @ attention.in_proj_weight.T + attention.in_proj_bias
    query, key, value = projected.unflatten(-1, (3, attention.num_heads, attention.head_dim)).permute(2, 0, 3, 1, 4)
    attended = (query @ key.transpose(-2, -1) / attention.head_dim**0.5).softmax(-1)
    maps.append(attended)
    result: Tensor = attention.out_proj((attended @ value).transpose(1, 2).flatten(2))
    return result


def explicit_scores(loss: Tensor, maps: list[Tensor], num_prefix: int, num_patches: int) -> Tensor:
    """Eq. 9 to the letter: `A * dL/dA` summed over queries, mean over heads; absolute, then the mean over images."""
    gradients = torch.autograd.grad(loss, maps)
    products = [(a * g).sum(2).mean(1).abs().mean(0) for a, g in zip(maps, gradients, strict=True)]
    return torch.stack(products)[:, num_prefix : num_prefix + num_patches].detach()


def check_same_as_timm(other: nn.Module, model: nn.Module, plan: Plan, images: Tensor) -> None:
    """Another library's model has the logits of timm's, before and after compression by the same plan."""
    with torch.no_grad():
        before, after = model(images), pmvit.compress(model, plan)(images)
        assert torch.allclose(predict(other, images), before, atol=1e-4)
        assert torch.allclose(predict(pmvit.compress(other, plan), images), after, atol=1e-4)
        assert not torch.allclose(after, before, atol=1e-1)
