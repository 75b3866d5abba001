"""Pictures of patches show what happens to them, and figures are whole as PNG and SVG."""

import base64
import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from pmvit.config.planning import Reconstruct
from pmvit.numbers.colours import NEUTRAL
from pmvit.planning import LayerPlan
from pmvit.prune_merge import PruneMerge, pseudo_inverse
from pmvit.reporting.pictures.figure import BACKGROUND, Layer, PixelFigure, in_lines, shortened, text_width
from pmvit.reporting.pictures.patches import (
    borders,
    group_map,
    group_sizes,
    merged_map,
    reconstructed,
    size_map,
    value_map,
)
from pmvit.reporting.pictures.tiles import tile_size

SVG, HREF = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
LAYER = LayerPlan(groups=(0, 0, -1, 1), centres=(0, 3), weights=(3.0, 1.0, 0.0, 1.0))


def pixels(picture: Any) -> np.ndarray:
    return np.asarray(picture)


def test_what_lies_over_an_image_by_hand() -> None:
    image = torch.zeros(3, 4, 4)
    image[0, :2, :2], image[1, :2, 2:] = 0.8, 0.4
    cells = pixels(merged_map(image, LAYER, (2, 2)))
    assert cells.shape == (2, 2, 4)
    assert cells[0, 0, 3] == cells[1, 1, 3] == 0  # kept: the image is seen
    assert cells[0, 1].tolist() == [153, 26, 0, 255]  # 3/4 of 0.8 red, 1/4 of 0.4 green
    assert cells[1, 0].tolist() == [255, 255, 255, 255]


@pytest.mark.parametrize("size", [(6, 8), (5, 8)])
@pytest.mark.parametrize("reconstruct", ["pinv", "residual"])
def test_nothing_is_lost_where_all_is_kept(size: tuple[int, int], reconstruct: Reconstruct) -> None:
    image = torch.rand(3, *size)
    back = reconstructed(image, LayerPlan.keep_all(12), (3, 4), (1.0,) * 12, reconstruct)
    assert back.shape == (3, 6, 8)
    if size == (6, 8):
        assert torch.equal(back, image)


class Unchanged(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens


def test_what_is_reconstructed_is_what_the_module_computes() -> None:
    image = torch.randn(3, 4, 4)
    groups, centres, weights = LAYER.tensors()
    returns = pseudo_inverse(groups, weights, 2).tolist()
    tokens = image.view(3, 2, 2, 2, 2).permute(1, 3, 0, 2, 4).reshape(1, 4, 12)
    with torch.no_grad():
        expected = PruneMerge(Unchanged(), groups, centres, weights, reconstruct="pinv")(tokens)
    back = reconstructed(image, LAYER, (2, 2), returns, "pinv")
    assert torch.allclose(back.view(3, 2, 2, 2, 2).permute(1, 3, 0, 2, 4).reshape(1, 4, 12), expected, atol=1e-6)
    mean = reconstructed(image, LAYER, (2, 2), (1.0, 1.0, 0.0, 1.0), "residual")
    assert torch.allclose(mean[:, :2, :2], 0.75 * image[:, :2, :2] + 0.25 * image[:, :2, 2:], atol=1e-6)
    assert torch.equal(mean[:, 2:], image[:, 2:])  # the pruned patch and the one that is alone


def test_maps_by_hand() -> None:
    assert group_sizes(LAYER) == [2, 2, 0, 1]
    low, middle, high = pixels(value_map((1.0, 2.0, 3.0), (1, 3)))[0, :, :3].astype(int).sum(-1)
    assert low < middle < high
    sizes = pixels(size_map(LAYER, (2, 2), 2))
    assert sizes[0, 0].tolist() == sizes[0, 1].tolist() != sizes[1, 1].tolist()
    assert sizes[1, 0].tolist() == [255, 255, 255, 255]
    groups = pixels(group_map(LAYER, (2, 2)))
    half = groups.shape[0] // 2
    assert groups[0, 0].tolist() == groups[0, half].tolist()
    assert groups[half // 2, half // 2].tolist() == [0, 0, 0, 255]  # the dot on the kept patch
    assert groups[half // 2, half + half // 2].tolist() == groups[0, 0].tolist()
    assert tuple(groups[half, half, :3]) == NEUTRAL
    assert tuple(groups[half, 0, :3]) == (255, 255, 255)


def test_groups_beside_each_other_have_other_colours() -> None:
    groups = tuple(4 * (row // 2) + column // 2 for row in range(8) for column in range(8))
    centres = tuple(groups.index(group) for group in range(16))
    cells = pixels(group_map(LayerPlan(groups, centres, (1.0,) * 64), (8, 8)))
    cell = cells.shape[0] // 8
    colours = cells[::cell, ::cell, :3][::2, ::2].astype(int)  # one patch of each group
    for down, right in ((0, 1), (1, 0), (1, 1)):
        apart = colours[: 4 - down, : 4 - right] - colours[down:, right:]
        assert np.abs(apart).sum(-1).min() > 0


def test_lines_are_between_labels_and_nowhere_else() -> None:
    lines = pixels(borders((0, 0, 1, 0, 0, 1), (2, 3)))[..., 3] > 0
    cell = lines.shape[0] // 2
    assert lines[:, 2 * cell].all()
    assert lines.sum() == 2 * cell


def test_a_figure_as_pixels_and_as_svg(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    photo = Layer(noise, smooth=True)
    cells = Layer(np.array([[[0, 0, 255, 255], [0, 0, 0, 0]]], dtype=np.uint8))
    figure = PixelFigure(120, "a <title>")
    for left in (0, 61):
        figure.picture((left, 10, 40, 30), photo, cells)
    figure.rectangle((0, 60, 10, 10), (1, 2, 3), (200, 0, 0))
    figure.text(20, 60, "kept & $merged$ of a_b", 11)
    figure.height = 80
    svg = figure.save(tmp_path / "figure.svg", "svg")
    with Image.open(figure.save(tmp_path / "figure.png", "png")) as drawn:
        assert drawn.size == (120, 80)
        found = pixels(drawn)
    for left in (0, 61):  # to the pixel, also after an SVG was written
        assert (found[10:40, left : left + 20] == (0, 0, 255)).all()
        assert np.array_equal(found[10:40, left + 20 : left + 40], noise[:, 20:])
        assert tuple(found[9, left]) == tuple(found[40, left]) == tuple(found[20, left + 40]) == BACKGROUND
    assert [tuple(found[at, at - 60]) for at in (60, 61, 68, 69)] == [(200, 0, 0), (1, 2, 3), (1, 2, 3), (200, 0, 0)]
    assert tuple(found[70, 5]) == BACKGROUND
    root = ElementTree.parse(svg).getroot()  # noqa: S314  # our own file
    assert root.tag == f"{SVG}svg"
    assert [text.text for text in root.iter(f"{SVG}text")] == ["kept & $merged$ of a_b"]
    assert root.findtext(f"{SVG}title") == "a <title>"
    stored = {image.get("id"): str(image.get(HREF)) for image in root.iter(f"{SVG}image")}
    assert [use.get(HREF) for use in root.iter(f"{SVG}use")] == ["#picture0", "#picture1"] * 2  # each is stored once
    assert stored["picture0"].startswith("data:image/jpeg;base64,")
    kind, _, content = stored["picture1"].partition(";base64,")
    assert kind == "data:image/png"
    with Image.open(io.BytesIO(base64.b64decode(content))) as picture:
        assert np.array_equal(pixels(picture), cells.pixels)


@pytest.mark.parametrize("grid", [(14, 14), (16, 16), (37, 37), (96, 96), (9, 13)])
def test_patches_have_whole_pixels(grid: tuple[int, int]) -> None:
    width, height = tile_size([(grid[0] // 2, grid[1] // 2), grid])
    assert (width % grid[1], height % grid[0]) == (0, 0)
    assert width // grid[1] == height // grid[0] >= 3
    assert group_map(LayerPlan.keep_all(grid[0] * grid[1]), grid).shape[:2] == (height, width)


def test_words_fit() -> None:
    assert shortened("block 3", 12, 100) == "block 3"
    cut = shortened("a-very-long-name-of-a-file-that-goes-on-and-on.jpg", 12, 100)
    assert cut.startswith("a-very")
    assert cut.endswith(".jpg")
    assert "..." in cut
    lines = in_lines("every patch of a group gets the mean of the group", 12, 100)
    assert " ".join(lines) == "every patch of a group gets the mean of the group"
    assert all(text_width(line, 12) <= 100 for line in lines)
    assert len(lines) > 2
