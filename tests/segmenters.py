"""Small Segmenters and checkpoints in the layout of the published ones."""

from typing import Any

import torch
from torch import Tensor

from pmvit.hosts.segmenter.model import Segmenter, create_segmenter

WIDTHS = {"tiny": (192, 12), "small": (384, 12), "base": (768, 12), "large": (1024, 24)}


def small_segmenter(**arguments: Any) -> Segmenter:
    """Six narrow blocks on 4 x 6 patches, three classes, random weights, none of them zero."""
    torch.manual_seed(0)
    defaults = {"classes": 3, "image_size": (64, 96), "embed_dim": 48, "depth": 6, "num_heads": 3}
    model = create_segmenter(**{**defaults, **arguments})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def published(
    width: int, depth: int, *, classes: int, side: int, decoder: str, distilled: bool = False, patch: int = 16
) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a published checkpoint, by what its project's modules are."""
    prefix = 2 if distilled else 1
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.cls_token": (1, 1, width),
        "encoder.pos_embed": (1, (side // patch) ** 2 + prefix, width),
        **_layer("encoder.patch_embed.proj", (width, 3, patch, patch)),
        **_blocks("encoder", width, depth),
        **_layer("encoder.norm", (width,)),
        **_layer("encoder.head", (1000, width)),
    }
    if distilled:
        shapes |= {"encoder.dist_token": (1, 1, width), **_layer("encoder.head_dist", (1000, width))}
    if decoder == "linear":
        return {**shapes, **_layer("decoder.head", (classes, width))}
    return {
        **shapes,
        "decoder.cls_emb": (1, classes, width),
        "decoder.proj_patch": (width, width),
        "decoder.proj_classes": (width, width),
        **_blocks("decoder", width, 2),
        **_layer("decoder.proj_dec", (width, width)),
        **_layer("decoder.decoder_norm", (width,)),
        **_layer("decoder.mask_norm", (classes,)),
    }


def _layer(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _blocks(where: str, width: int, depth: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(depth):
        block = f"{where}.blocks.{index}"
        shapes |= {**_layer(f"{block}.norm1", (width,)), **_layer(f"{block}.norm2", (width,))}
        shapes |= {**_layer(f"{block}.attn.qkv", (3 * width, width)), **_layer(f"{block}.attn.proj", (width, width))}
        shapes |= {**_layer(f"{block}.mlp.fc1", (4 * width, width)), **_layer(f"{block}.mlp.fc2", (width, 4 * width))}
    return shapes


def random_state(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def by_hand(state: dict[str, Tensor], images: Tensor, depth: int, heads: int) -> Tensor:
    """What the published model computes with a mask transformer, from the equations: scores of the patches."""
    patches = torch.nn.functional.conv2d(
        images, state["encoder.patch_embed.proj.weight"], state["encoder.patch_embed.proj.bias"], stride=16
    )
    tokens = patches.flatten(2).transpose(1, 2)
    tokens = torch.cat([state["encoder.cls_token"].expand(len(images), -1, -1), tokens], 1) + state["encoder.pos_embed"]
    for index in range(depth):
        tokens = _block(state, f"encoder.blocks.{index}", tokens, heads)
    tokens = _norm(state, "encoder.norm", tokens)[:, 1:]
    count = tokens.shape[1]
    tokens = torch.cat(
        [_linear(state, "decoder.proj_dec", tokens), state["decoder.cls_emb"].expand(len(images), -1, -1)], 1
    )
    for index in range(2):
        tokens = _block(state, f"decoder.blocks.{index}", tokens, heads)
    tokens = _norm(state, "decoder.decoder_norm", tokens)
    pixels, classes = tokens[:, :count] @ state["decoder.proj_patch"], tokens[:, count:] @ state["decoder.proj_classes"]
    pixels, classes = (part / part.norm(dim=-1, keepdim=True) for part in (pixels, classes))
    return _norm(state, "decoder.mask_norm", pixels @ classes.transpose(1, 2))


def _linear(state: dict[str, Tensor], name: str, tokens: Tensor) -> Tensor:
    return tokens @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def _norm(state: dict[str, Tensor], name: str, tokens: Tensor) -> Tensor:
    centred = tokens - tokens.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def _block(state: dict[str, Tensor], name: str, tokens: Tensor, heads: int) -> Tensor:
    normed = _norm(state, f"{name}.norm1", tokens)
    query, key, value = (
        part.unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in _linear(state, f"{name}.attn.qkv", normed).chunk(3, -1)
    )
    attention = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1)
    tokens = tokens + _linear(state, f"{name}.attn.proj", (attention @ value).transpose(1, 2).flatten(2))
    hidden = torch.nn.functional.gelu(_linear(state, f"{name}.mlp.fc1", _norm(state, f"{name}.norm2", tokens)))
    return tokens + _linear(state, f"{name}.mlp.fc2", hidden)
