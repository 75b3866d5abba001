"""Grids of any number of axes: videos, spectrograms, NaFlexViT; what is particular about their models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmvit
from pmvit.data.opening import as_loader
from pmvit.hosts import host_of
from pmvit.hosts.hf.video import check_positions
from pmvit.hosts.outputs import predict
from pmvit.loading import create_model
from pmvit.measuring.merging import mirrored, neighbours
from pmvit.planning import Plan
from pmvit.planning.grouping import group_layer, smooth
from pmvit.planning.measured import merged_layer
from scripts.sweep import difference
from tests.hosts.hf_models import images_for
from tests.runtime.test_blocks import make

SHAPES = {
    "videomae": ((6, 3, 64, 48), (3, 4, 3), 0),
    "vjepa2": ((8, 3, 48, 48), (4, 3, 3), 0),
    "ast": ((126, 36), (3, 12), 2),
    "naflex": ((3, 96, 96), (6, 6), 1),
}
GRID = (2, 3, 4)


def outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.inference_mode():
        return predict(model, inputs)


@pytest.mark.parametrize("name", SHAPES)
def test_inputs_grids_and_files(name: str, tmp_path: Path) -> None:
    """What a host says is what the model has; both kinds of plan cost what they say and come back to the bit."""
    model = make(name)
    shape, grid, prefix = SHAPES[name]
    host = host_of(model)
    assert (host.input_size(), host.layout.grid, host.layout.num_prefix) == (shape, grid, prefix)
    inputs = images_for(model, 4)
    for method in ("adaptive", "measured", "scored"):
        options: dict[str, Any] = {"method": method, **({"loss": "predicted"} if method == "scored" else {})}
        measured: Any = pmvit.measure(model, [inputs], progress=False, **options)
        measured.save(tmp_path / "measured.safetensors")
        plan = pmvit.plan(type(measured).load(tmp_path / "measured.safetensors"), keep=0.6)
        small = pmvit.compress(model, plan)
        assert pmvit.flops(small).macs < pmvit.flops(model).macs
        if method == "adaptive":
            assert pmvit.flops(small).macs == measured.macs(plan.merges)
        pmvit.save(small, tmp_path / method)
        loaded = pmvit.load(tmp_path / method)
        assert host_of(loaded).input_size() == shape
        assert torch.equal(outputs(loaded, inputs), outputs(small, inputs))
        assert "x".join(map(str, grid)) in str(plan).replace(" ", "")


def test_a_video_model_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = make("vjepa2")
    plan = pmvit.plan(pmvit.measure(model, [images_for(model, 4)], progress=False), keep=0.6)
    done = pmvit.export(pmvit.compress(model, plan), tmp_path / "model.onnx")
    assert done.max_error < 1e-4


def test_the_predictor_reads_all_tokens() -> None:
    """Called as its library calls it, V-JEPA 2 runs its predictor on what the encoder puts out."""
    from transformers import VJEPA2Model

    model: Any = make("vjepa2")
    whole: Any = VJEPA2Model(model.config).eval()
    videos = images_for(whole, 2)
    with torch.inference_mode():
        expected = whole(videos)
        kept = pmvit.compress(whole, Plan.keep_all((4, 3, 3), 3))(videos)
        plan = pmvit.plan(pmvit.measure(whole, [videos], progress=False), keep=0.5)
        small = pmvit.compress(whole, plan)(videos)
    assert difference(kept.predictor_output.last_hidden_state, expected.predictor_output.last_hidden_state) < 1e-5
    assert small.predictor_output.last_hidden_state.shape == expected.predictor_output.last_hidden_state.shape
    assert small.last_hidden_state.shape == (2, 36, 96)


def test_dictionaries_of_processors_are_read() -> None:
    for name, key in (("videomae", "pixel_values"), ("vjepa2", "pixel_values_videos"), ("ast", "input_values")):
        model = make(name)
        inputs = images_for(model, 4)
        expected = pmvit.measure(model, [inputs], method="adaptive", progress=False).projections
        for data in ([{key: inputs[:2]}, {key: inputs[2:]}], {key: inputs}, inputs):
            found = pmvit.measure(model, as_loader(model, data), method="adaptive", progress=False)
            assert found.images == 4
            assert torch.allclose(found.projections.abs(), expected.abs(), atol=0.1 * float(expected.abs().max()))


def test_videos_and_spectrograms_are_not_generated() -> None:
    for name in ("videomae", "ast"):
        with pytest.raises(pmvit.PmvitError, match="expected a model that takes images; this one takes"):
            pmvit.measure(make(name), progress=False)
    assert pmvit.measure(make("naflex"), limit=2, progress=False).images == 2


def test_what_cannot_be_done_is_said_in_a_line(tmp_path: Path) -> None:
    from transformers import VideoMAEConfig, VideoMAEForPreTraining

    model, naflex = make("videomae"), make("naflex")
    with pytest.raises(pmvit.PmvitError, match="expected a model that sees all patches, got a VideoMAEForPreTraining"):
        host_of(VideoMAEForPreTraining(VideoMAEConfig(num_hidden_layers=1, image_size=32, num_frames=2))).layouts()
    large = {"num_frames": 2**20, "image_size": 224, "patch_size": 16, "tubelet_size": 2, "hidden_size": 768}
    with pytest.raises(pmvit.PmvitError, match=r"expected a VideoMAE with up to .* numbers for positions"):
        check_positions(large)
    with pytest.raises(pmvit.PmvitError, match="expected a VideoMAE with whole numbers"):
        check_positions({**large, "patch_size": 0})
    with pytest.raises(pmvit.PmvitError, match="expected a model that takes images; this one takes 6 x 3 x 64 x 48"):
        pmvit.visualize(pmvit.compress(model, Plan.keep_all((3, 4, 3), 3)), "demo", tmp_path)
    with pytest.raises(pmvit.PmvitError, match=r"expected images of shape \(6, 3, 64, 48\).*; got \(3, 64, 48\)"):
        pmvit.measure(model, [torch.zeros(2, 3, 64, 48)], progress=False)
    with pytest.raises(pmvit.PmvitError, match="expected a plan for 3 x 4 x 3 tokens, got one for 3 x 12"):
        pmvit.compress(model, Plan.keep_all((3, 12), 3))
    measured = pmvit.measure(naflex, [images_for(naflex)], progress=False)
    small: Any = pmvit.compress(naflex, pmvit.plan(measured, keep=0.6))
    places = torch.cartesian_prod(torch.arange(6), torch.arange(6))[None]
    patches = {"patches": torch.zeros(1, 36, 768), "patch_coord": places, "patch_valid": torch.ones(1, 36).bool()}
    with pytest.raises(pmvit.PmvitError, match="expected images as one tensor, all of the size that the plan is for"):
        small(patches)


def test_naflex_is_for_the_size_that_it_is_told(tmp_path: Path) -> None:
    model: Any = make("naflex")
    pmvit.save(pmvit.compress(model, Plan.keep_all((6, 6), 3)), tmp_path / "small")
    pmvit.load(tmp_path / "small")
    model.pretrained_cfg["input_size"] = (3, 64, 96)
    assert host_of(model).layout.grid == (4, 6)
    weights = tmp_path / "weights.safetensors"
    pmvit.tensors.write_tensors(weights, dict(model.state_dict()), {})
    sizes: dict[str, Any] = {"embed_dim": 48, "depth": 3, "num_heads": 3}
    made = create_model("naflexvit_base_patch16_map", weights, img_size=160, **sizes)
    assert host_of(made).layout.grid == (10, 10)


# The mathematics, by hand and by brute force


def places() -> list[tuple[int, ...]]:
    return [tuple(place) for place in torch.cartesian_prod(*map(torch.arange, GRID)).tolist()]


def test_neighbours_are_one_step_away_along_one_axis() -> None:
    near = neighbours(GRID)
    for one, first in enumerate(places()):
        for other, second in enumerate(places()):
            steps = sum(abs(a - b) for a, b in zip(first, second, strict=True))
            assert near[one, other] == (steps == 1)
    assert int(near.sum()) == 2 * (1 * 12 + 2 * 8 + 3 * 6)


def test_a_mirrored_video_has_its_columns_turned_around() -> None:
    effects = torch.arange(24.0)[:, None] * 100 + torch.arange(24.0)
    swapped = mirrored(effects, GRID)
    turned = {place: number for number, place in enumerate(places())}
    for number, (time, row, column) in enumerate(places()):
        assert swapped[number, 0] == effects[turned[time, row, 3 - column], 3]


@pytest.mark.parametrize("grouping", ["grid", "row"])
def test_groups_join_the_nearest_along_all_axes(grouping: Any) -> None:
    """In a row: the nearest on the same line of the last axis, if there is a kept one."""
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(24, generator=generator) < 0.25
    layer = group_layer(torch.ones(24), kept, torch.zeros(24).bool(), GRID, grouping, "average")
    where = places()
    for token, group in enumerate(layer.groups):
        found = layer.centres[group]

        def distance(centre: int, token: int = token) -> tuple[bool, int]:
            is_other_row = grouping == "row" and where[centre][:-1] != where[token][:-1]
            return is_other_row, sum((a - b) ** 2 for a, b in zip(where[centre], where[token], strict=True))

        assert distance(found) == min(map(distance, layer.centres))


def test_scores_are_smoothed_along_all_axes() -> None:
    point = torch.zeros(27, dtype=torch.float64)
    point[13] = 1.0
    smoothed = smooth(point, (3, 3, 3)).view(3, 3, 3)
    line = torch.exp(-torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64) / 2)
    line /= line.sum()
    assert torch.allclose(smoothed, line[:, None, None] * line[:, None] * line)


def test_a_group_stands_at_the_member_next_to_its_middle() -> None:
    from pmvit.measuring import Merge

    joined = [Merge(0, "block", 0, token, 0.0) for token in (12, 1, 4)]  # above 0: in time, beside and below it
    layer = merged_layer(joined, GRID)
    assert layer.centres[layer.groups[12]] == 0
    assert layer.num_kept == 21
