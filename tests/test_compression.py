"""Compress and decompress are inverse; saved models come back to the last bit; foreign files are refused."""

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import pmvit
from pmvit.compression import compression_of
from pmvit.config.planning import Reconstruct
from pmvit.config.training import Learn
from pmvit.errors import PmvitWarning
from pmvit.hosts import TimmViT
from pmvit.loading import create_model, read_weights
from pmvit.planning import Plan
from pmvit.planning.planner import read_plan
from pmvit.prune_merge import PruneMerge
from pmvit.wrapping import fingerprint
from tests.helpers import small_vit

from timm.models.vision_transformer import VisionTransformer  # isort: skip

IMAGES = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def plan(small_model: nn.Module) -> Plan:
    return pmvit.plan(pmvit.measure(small_model, [], method="scored", scorer="random"), keep=0.5, prune=0.1)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(IMAGES)
    return result


def test_a_plan_of_another_model_is_named_beside_this_one(small_model: nn.Module, tmp_path: Path) -> None:
    other = small_vit(num_classes=5)
    scored = {"method": "scored", "loss": "predicted"}
    choices: tuple[dict[str, Any], ...] = (scored, {"method": "measured"}, {"rank": 8})
    for number, options in enumerate(choices):
        measured = pmvit.measure(other, [IMAGES], progress=False, **options)
        made = pmvit.plan(measured, keep=0.6)
        path = tmp_path / ("plan.safetensors" if "rank" in options else "plan.json")
        made.save(path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            small = pmvit.compress(other, read_plan(path))
        with pytest.warns(PmvitWarning) as said:
            pmvit.compress(small_model, read_plan(path))
        assert all(fingerprint(each) in str(said[0].message) for each in (other, small_model))
        pmvit.save(small, tmp_path / f"{number}")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pmvit.load(tmp_path / f"{number}")


def test_no_warning_after_calibration_of_the_same_run(small_model: nn.Module, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PmvitWarning)
        metric = pmvit.measure(small_model, [IMAGES], method="adaptive", rank=8, progress=False)
        small = pmvit.compress(small_model, pmvit.plan(metric, keep=0.7))
        pmvit.calibrate(small, [IMAGES], output=tmp_path / "out", distill=False, progress=False)
        pmvit.set_budget(pmvit.load(tmp_path / "out"), keep=0.5)


def test_the_given_model_is_untouched(small_model: VisionTransformer, plan: Plan) -> None:
    expected = logits(small_model)
    blocks = list(small_model.blocks)
    small = pmvit.compress(small_model, plan)
    assert type(small) is type(small_model)
    assert all(isinstance(block, PruneMerge) for block in small.blocks)
    assert all(a is b for a, b in zip(small_model.blocks, blocks, strict=True))
    assert torch.equal(logits(small_model), expected)
    assert not torch.allclose(logits(small), expected)
    assert not small.training


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "beit_base_patch16_224", "vit_relpos_small_patch16_224"])
def test_decompress_gives_the_very_same_objects(name: str, plan: Plan) -> None:
    model = small_vit(name)
    expected = logits(model)
    modules = dict(model.named_modules())
    state = {key: value.data_ptr() for key, value in model.state_dict().items()}
    small = pmvit.compress(model, plan, inplace=True)
    assert small is model
    assert not torch.allclose(logits(small), expected)
    assert pmvit.decompress(small) is model
    assert all(found is modules[path] for path, found in model.named_modules())
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == state
    assert torch.equal(logits(model), expected)
    assert compression_of(model) is None


def test_dense_tokens_come_out_for_dense_tasks(small_model: Any, plan: Plan) -> None:
    small = pmvit.compress(small_model, plan)
    features, intermediates = small.forward_intermediates(IMAGES)
    assert features.shape == (2, 37, 48)
    assert [tuple(feature.shape) for feature in intermediates] == [(2, 48, 6, 6)] * 3


def test_a_plan_that_does_not_fit_is_named(small_model: nn.Module, plan: Plan) -> None:
    with pytest.raises(pmvit.PmvitError, match="expected a plan for 4 x 4 tokens, got one for 6 x 6"):
        pmvit.compress(small_vit(img_size=64), plan)
    with pytest.raises(pmvit.PmvitError, match="expected a plan for 2 blocks, got one for 3"):
        pmvit.compress(small_vit(depth=2), plan)
    with pytest.raises(pmvit.PmvitError, match="learn: expected group or dense"):
        pmvit.compress(small_model, plan, learn="all")  # type: ignore[arg-type]  # the mistake
    small = pmvit.compress(small_model, plan)
    with pytest.raises(pmvit.PmvitError, match="compressed already"):
        pmvit.compress(small, plan)
    with pytest.raises(pmvit.PmvitError, match="is not compressed"):
        pmvit.decompress(small_model)
    with pytest.raises(ValueError, match="a fixed plan is for one image size"):
        pmvit.compress(small_vit(dynamic_img_size=True), plan)(torch.randn(1, 3, 128, 128))


@pytest.mark.parametrize("learn", ["group", "dense"])
@pytest.mark.parametrize("reconstruct", ["pinv", "residual"])
@pytest.mark.parametrize("target", ["folder", "model.safetensors"])
def test_saved_models_come_back_to_the_last_bit(
    small_model: nn.Module, tmp_path: Path, learn: Learn, reconstruct: Reconstruct, target: str
) -> None:
    scores = pmvit.measure(small_model, [], method="scored", scorer="random")
    plan = pmvit.plan(scores, keep=0.5, prune=0.1, reconstruct=reconstruct)
    small = pmvit.compress(small_model, plan, learn=learn)
    with torch.no_grad():
        for parameter in small.parameters():  # as if fine-tuned
            parameter.add_(0.01 * torch.randn_like(parameter))
    pmvit.save(small, tmp_path / target)
    loaded: Any = pmvit.load(tmp_path / target)
    assert torch.equal(logits(loaded), logits(small))
    compression = compression_of(loaded)
    assert compression is not None
    assert compression.what == plan
    assert compression.learn == learn
    assert loaded.pretrained_cfg["input_size"] == [3, 96, 96]


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "vit_relpos_small_patch16_224", "deit3_small_patch16_224"])
def test_position_biases_come_back_too(name: str, tmp_path: Path, plan: Plan) -> None:
    model = small_vit(name)
    small = pmvit.compress(model, plan)
    pmvit.save(small, tmp_path / "out")
    loaded = pmvit.load(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(small))
    assert torch.equal(logits(pmvit.decompress(loaded)), logits(model))


def test_arguments_are_read_off_or_asked_for(tmp_path: Path, plan: Plan) -> None:
    plain = pmvit.compress(small_vit(in_chans=1, num_heads=4, global_pool="avg"), plan)
    pmvit.save(plain, tmp_path / "plain")
    arguments = json.loads((tmp_path / "plain" / "config.json").read_text())["model"]["arguments"]
    assert arguments["in_chans"] == 1
    assert arguments["num_heads"] == 4
    image = torch.randn(1, 1, 96, 96)
    with torch.inference_mode():
        assert torch.equal(pmvit.load(tmp_path / "plain")(image), plain(image))
    odd = pmvit.compress(small_vit(reg_tokens=4), plan)
    with pytest.raises(pmvit.PmvitError, match="pass `arguments=` with what else it was created with"):
        pmvit.save(odd, tmp_path / "odd")
    assert not (tmp_path / "odd").exists()
    pmvit.save(odd, tmp_path / "odd", arguments={"reg_tokens": 4})
    assert torch.equal(logits(pmvit.load(tmp_path / "odd")), logits(odd))
    same_shapes = pmvit.compress(small_vit(act_layer="relu"), plan)
    with pytest.raises(pmvit.PmvitError, match="gives another output than this model"):
        pmvit.save(same_shapes, tmp_path / "relu")
    assert not (tmp_path / "relu").exists()
    pmvit.save(same_shapes, tmp_path / "relu", arguments={"act_layer": "relu"})
    assert torch.equal(logits(pmvit.load(tmp_path / "relu")), logits(same_shapes))


def test_a_model_made_by_hand_cannot_be_saved(tmp_path: Path, plan: Plan) -> None:
    by_hand = VisionTransformer(img_size=96, embed_dim=48, depth=3, num_heads=3, num_classes=7)
    with pytest.raises(pmvit.PmvitError, match=r"expected a model made by timm\.create_model"):
        pmvit.save(pmvit.compress(by_hand, plan), tmp_path / "out")


def test_weights_follow_the_block_in_type(small_model: nn.Module, plan: Plan) -> None:
    half = small_model.half()
    half.get_submodule("blocks.0.norm1").float()  # as mixed-precision models have it
    small = pmvit.compress(half, plan)
    assert small.get_parameter("blocks.0.block.norm1.weight").dtype == torch.float32
    assert small.get_parameter("blocks.1.merge_weights").dtype == torch.float16


def test_original_models_and_half_precision_are_saved_too(small_model: nn.Module, tmp_path: Path) -> None:
    pmvit.save(small_model, tmp_path / "original")
    assert torch.equal(logits(pmvit.load(tmp_path / "original")), logits(small_model))
    plan = pmvit.plan(pmvit.measure(small_model, [], method="scored", scorer="random"), keep=0.5)
    half = small_model.half()
    half.norm.float()  # as mixed-precision models have it
    small = pmvit.compress(half, plan)
    pmvit.save(small, tmp_path / "half")
    loaded = pmvit.load(tmp_path / "half")
    for got, expected in zip(loaded.parameters(), small.parameters(), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def saved_folder(model: nn.Module, plan: Plan, folder: Path) -> Path:
    pmvit.save(pmvit.compress(model, plan), folder)
    return folder


def test_nothing_but_these_files_is_left(small_model: nn.Module, plan: Plan, tmp_path: Path) -> None:
    folder = saved_folder(small_model, plan, tmp_path / "out")
    expected = {"model.safetensors", "plan.json", "config.json", "README.md"}
    assert {path.name for path in folder.iterdir()} == expected
    saved_folder(small_model, plan, folder)
    assert {path.name for path in folder.iterdir()} == expected


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", lambda data: data[:-1000], "expected a whole safetensors file"),
        (
            "model.safetensors",
            lambda data: data[:-1] + bytes([data[-1] ^ 1]),
            "model.safetensors is not what was saved",
        ),
        (
            "plan.json",
            lambda data: data.replace(b'"reconstruct": "residual"', b'"reconstruct": "pinv"'),
            "plan.json is not what",
        ),
        ("config.json", lambda data: data.replace(b'"crop_pct": 0.9', b'"crop_pct": 0.8'), "config.json is not what"),
        ("config.json", lambda data: data[:50], "breaks off or is malformed"),
        ("config.json", lambda data: data.replace(b'"version": 2', b'"version": 9'), "expected version 2"),
        ("config.json", lambda data: data.replace(b'"host"', b'"guest"'), "the field 'host' is missing"),
        ("config.json", lambda data: data.replace(b"timm-vit", b"timm-swin"), "config.json is not what was saved"),
        ("config.json", lambda data: b"\xff\xfe\x00", "cannot be read"),
        ("config.json", None, "has no config.json"),
        ("model.safetensors", None, "it is missing"),
    ],
)
def test_damaged_folders_are_refused(
    small_model: nn.Module,
    plan: Plan,
    tmp_path: Path,
    name: str,
    damage: Callable[[bytes], bytes] | None,
    message: str,
) -> None:
    folder = saved_folder(small_model, plan, tmp_path / "out")
    if damage is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
    with pytest.raises(pmvit.PmvitError, match=message):
        pmvit.load(folder)


def test_a_single_file_that_was_changed_is_refused(small_model: nn.Module, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    pmvit.save(pmvit.compress(small_model, plan), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(pmvit.PmvitError, match="is not what was saved"):
        pmvit.load(path)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"architecture": "resnet_nope"}, "expected one of timm's architectures"),
        ({"architecture": "hf-hub:somebody/something"}, "expected one of timm's architectures"),
        ({"arguments": "depth"}, "expected arguments that describe"),
        ({"arguments": {"checkpoint_path": "evil.pth"}}, "expected arguments that describe"),
        ({"arguments": {"colour": "blue"}}, "expected arguments that describe the architecture, got 'colour'"),
        ({"data": {}}, "the field 'crop_mode' is missing"),
    ],
)
def test_descriptions_are_checked_before_they_are_built(description: dict[str, object], message: str) -> None:
    data = {
        "input_size": [3, 9, 9],
        "interpolation": "bicubic",
        "mean": [0, 0, 0],
        "std": [1, 1, 1],
        "crop_pct": 1,
        "crop_mode": "center",
    }
    whole = {"architecture": "vit_tiny_patch16_224", "arguments": {"depth": 1}, "data": data}
    assert TimmViT.build(whole).embed_dim == 192
    with pytest.raises(pmvit.PmvitError, match=message):
        TimmViT.build({**whole, **description})


def test_foreign_files_are_refused(small_model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(pmvit.PmvitError, match="there is none"):
        pmvit.load(tmp_path / "nothing")
    save_file({"a": torch.zeros(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(pmvit.PmvitError, match="holds weights but no pmvit model"):
        pmvit.load(tmp_path / "weights.safetensors")
    (tmp_path / "noise.safetensors").write_bytes(b"not a model")
    with pytest.raises(pmvit.PmvitError, match="expected a whole safetensors file"):
        pmvit.load(tmp_path / "noise.safetensors")


class Boom:
    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return (Path.touch, (Path("boom"),))


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Boom()))
    torch.save({"model": Boom()}, tmp_path / "evil2.pth")
    for name in ("evil.pth", "evil2.pth"):
        with pytest.raises(pmvit.PmvitError, match="pmvit does not unpickle code"):
            read_weights(tmp_path / name)
    assert not (tmp_path / "boom").exists()


@pytest.mark.data
def test_weights_of_both_kinds_make_the_model(data: Path, deit_tiny: nn.Module, tmp_path: Path) -> None:
    tensors = load_file(data / "weights" / "deit_tiny_patch16_224.safetensors")
    torch.save({"model": {f"module.{name}": value for name, value in tensors.items()}}, tmp_path / "deit.pth")
    model = create_model("deit_tiny_patch16_224", tmp_path / "deit.pth")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), deit_tiny.parameters(), strict=True))
    with pytest.raises(pmvit.PmvitError, match=r"expected 'cls_token' of shape \(1, 1, 384\), got \(1, 1, 192\)"):
        create_model("deit_small_patch16_224", tmp_path / "deit.pth")
    with pytest.raises(pmvit.PmvitError, match="did you mean deit_tiny_patch16_224"):
        create_model("deit_tinny_patch16_224", tmp_path / "deit.pth")
    with pytest.raises(pmvit.PmvitError, match="expected a weights file at"):
        create_model("deit_tiny_patch16_224", tmp_path / "none.pth")
