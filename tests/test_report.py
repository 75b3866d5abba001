"""Pictures show what the plan says."""

import torch

import pmvit
from pmvit.report.pictures import compressed_view, plan_picture


def test_a_view_by_hand() -> None:
    image = torch.tensor([[[0.1, 0.2], [0.3, 0.4]]]).repeat_interleave(2, 1).repeat_interleave(2, 2)
    layer = pmvit.LayerPlan(groups=(0, 0, -1, 1), centres=(0, 3), weights=(0.75, 0.25, 0.0, 1.0))
    view = compressed_view(image, layer, (2, 2))
    colours = view[0, ::2, ::2]
    merged = 0.75 * 0.1 + 0.25 * 0.2
    assert torch.allclose(colours, torch.tensor([[0.1, merged], [1.0, 0.4]]))


def test_a_picture_has_a_tile_for_every_block() -> None:
    plan = pmvit.Plan.keep_all((2, 2), 5)
    picture = plan_picture(torch.rand(3, 8, 8), plan)
    assert picture.mode == "RGB"
    assert picture.width > 3 * 200
    red = torch.zeros(3, 8, 8)
    red[0] = 1
    colours = {colour: count for count, colour in plan_picture(red, plan).getcolors(10**6)}
    assert colours[255, 0, 0] == 6 * 200 * 200  # the image and five blocks that keep all of it
