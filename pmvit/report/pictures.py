"""What each block keeps of an image: kept patches as they are, merged ones in one colour, pruned ones white."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from pmvit.planning import LayerPlan, Plan
from pmvit.prune_merge import PRUNED

TILE = 200
MARGIN = 12
CAPTION = 36


def compressed_view(image: Tensor, layer: LayerPlan, grid: tuple[int, int]) -> Tensor:
    """Paint an image (channels, height, width; 0 to 1) the way a block with this plan sees it."""
    rows, columns = grid
    if image.shape[1] % rows or image.shape[2] % columns:  # a grid that was padded on the way
        sides = [-(-side // cells) * cells for side, cells in zip(image.shape[1:], grid, strict=True)]
        image = F.interpolate(image[None], size=sides, mode="nearest")[0]
    channels, height, width = image.shape
    patch_height, patch_width = height // rows, width // columns
    patches = image.view(channels, rows, patch_height, columns, patch_width).permute(1, 3, 0, 2, 4)
    patches = patches.reshape(rows * columns, channels, patch_height, patch_width).clone()
    for members in layer.members():
        if len(members) > 1:
            weights = torch.tensor([abs(layer.weights[token]) for token in members])
            colours = patches[members].mean((2, 3))
            merged = (weights[:, None] * colours).sum(0) / weights.sum()
            centre = layer.centres[layer.groups[members[0]]]
            others = [token for token in members if token != centre]
            patches[others] = merged[None, :, None, None].expand(len(others), -1, patch_height, patch_width)
    patches[[token for token, group in enumerate(layer.groups) if group == PRUNED]] = 1.0
    tiled = patches.view(rows, columns, channels, patch_height, patch_width).permute(2, 0, 3, 1, 4)
    return tiled.reshape(channels, height, width)


def plan_picture(image: Tensor, plan: Plan) -> Image.Image:
    """The image and, beside it, what every block keeps of it, with captions."""
    tiles = [("the image", "", image)]
    for index in range(plan.depth):
        layer = plan.layers.get(index, LayerPlan.keep_all(plan.num_patches(index)))
        counts = f"{layer.num_kept} kept, {layer.num_merged} merged, {layer.num_pruned} pruned"
        tiles.append((f"block {index}", counts, compressed_view(image, layer, plan.grids[index])))
    columns = math.ceil(math.sqrt(len(tiles) * 1.6))
    rows = math.ceil(len(tiles) / columns)
    size = (MARGIN + columns * (TILE + MARGIN), MARGIN + rows * (TILE + CAPTION + MARGIN))
    canvas = Image.new("RGB", size, (226, 229, 234))
    pen = ImageDraw.Draw(canvas)
    bold, small = ImageFont.load_default(15), ImageFont.load_default(12)
    for number, (title, caption, tile) in enumerate(tiles):
        left = MARGIN + number % columns * (TILE + MARGIN)
        top = MARGIN + number // columns * (TILE + CAPTION + MARGIN)
        canvas.paste(_to_pil(tile).resize((TILE, TILE), Image.Resampling.NEAREST), (left, top))
        pen.text((left, top + TILE + 2), title, fill=(20, 20, 20), font=bold)
        pen.text((left, top + TILE + 19), caption, fill=(70, 70, 70), font=small)
    return canvas


def _to_pil(image: Tensor) -> Image.Image:
    array = (image.clamp(0, 1) * 255).round().to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0).numpy()
    return Image.fromarray(np.ascontiguousarray(array))
