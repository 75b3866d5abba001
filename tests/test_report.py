"""Pictures show what the plan says."""

import pytest
import torch

import pmvit
from pmvit.report.pictures import compressed_view, plan_picture
from pmvit.runtime.timing import interleave, speedup


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
    colours = picture.getcolors(picture.width * picture.height)
    assert colours is not None
    assert len(colours) >= 4


def test_speed_is_measured_in_turns() -> None:
    calls: list[str] = []
    times = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=5, warmup=1)
    assert calls.count("a") == calls.count("b") == 6
    assert all({calls[i], calls[i + 1]} == {"a", "b"} for i in range(0, 12, 2))
    ratio = speedup({"a": [1.0, 1.0, 1.0], "b": [2.0, 2.2, 1.8]}, "a", "b")
    assert ratio.median == pytest.approx(2.0)
    assert ratio.low <= ratio.median <= ratio.high
    assert len(times["a"]) == 5
