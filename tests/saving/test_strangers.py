"""A saved model from somebody else: opening it runs nothing, fetches nothing, reads nothing else, and takes no
more memory than its files are large."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import pmvit
from pmvit.compression import record_source
from pmvit.files import MOST_TEXT
from pmvit.hosts import host_class
from pmvit.hosts.making import MadeModel
from pmvit.loading import create_model, original_model
from pmvit.planning import Plan
from tests.helpers import small_plan, small_vit

FIXTURES = Path(__file__).parents[1] / "fixtures"
HOSTS = {
    "saved_original": "timm-vit",
    "saved_features": "timm-features",
    "saved_swin": "timm-swin",
    "saved_segmenter": "segmenter",
    "saved_hf": "hf-vit",
    "saved_hf_swin": "hf-swin",
    "saved_torchvision": "torchvision-vit",
    "saved_torchvision_swin": "torchvision-swin",
    "saved_dpt": "smp-dpt",
}
NEEDED = {"saved_hf": "transformers", "saved_hf_swin": "transformers", "saved_dpt": "segmentation_models_pytorch"}


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


def seal(folder: Path, config: dict[str, Any]) -> None:
    """Write a configuration whose checksums fit, as anybody can."""
    rest = json.dumps({name: value for name, value in config.items() if name != "sha256"}, sort_keys=True)
    config["sha256"]["config.json"] = hashlib.sha256(rest.encode()).hexdigest()
    for name in set(config["sha256"]) - {"config.json", "model.safetensors"}:
        config["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def forged(name: str, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a saved model whose description somebody changed."""
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    shutil.copytree(FIXTURES / name, folder / name)
    config = config_of(folder / name)
    change(config["model"])
    seal(folder / name, config)
    return folder / name


def refusal(load: Callable[[], object]) -> str:
    """What is said in the one line with which something is refused."""
    with pytest.raises(pmvit.PmvitError) as caught:
        load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- classes and arguments ---


@pytest.mark.parametrize(
    "argument",
    ["checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "device", "block_fn"],
)
@pytest.mark.parametrize("name", HOSTS)
def test_arguments_that_no_description_has_reach_no_library(
    name: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_class(HOSTS[name])
    assert issubclass(host, MadeModel)
    monkeypatch.setattr(host, "make", classmethod(lambda *_: pytest.fail("the library was called")))
    folder = forged(name, tmp_path, lambda model: model["arguments"].update({argument: "owner/name"}))
    assert "expected arguments that describe the architecture" in refusal(lambda: pmvit.load(folder))


def test_the_encoder_of_a_segmenter_is_checked_too(tmp_path: Path) -> None:
    def change(model: dict[str, Any]) -> None:
        model["arguments"]["encoder"]["checkpoint_path"] = "code.pt"

    folder = forged("saved_segmenter", tmp_path, change)
    assert "expected arguments that describe the architecture" in refusal(lambda: pmvit.load(folder))


@pytest.mark.parametrize("architecture", ["resnet18", "hf-hub:owner/name", "local-dir:/tmp", "os.system", None, 3])
def test_other_architectures_are_refused(architecture: Any, tmp_path: Path) -> None:
    folder = forged("saved_original", tmp_path, lambda model: model.update(architecture=architecture))
    assert "timm" in refusal(lambda: pmvit.load(folder))


TIMM_BACKBONE = {"model_type": "timm_backbone", "backbone": "resnet18", "use_pretrained_backbone": True}
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"attention": "owner/kernel"}, "expected eager or sdpa"),
    ({"architecture": "TimmBackbone"}, "expected one of transformers' models, got 'TimmBackbone'"),
    ({"architecture": "TimmBackbone", "config": {"model_type": "timm_backbone"}}, "got 'timm_backbone'"),
    ({"architecture": "TimmWrapperModel", "config": {"model_type": "timm_wrapper"}}, "got 'timm_wrapper'"),
    ({"architecture": "MraModel", "config": {"model_type": "mra"}}, "got 'mra'"),
    ({"config": {"model_type": "dpt", "backbone_config": TIMM_BACKBONE}}, "got 'timm_backbone'"),
    ({"config": {"model_type": "upernet", "backbone": "owner/name"}}, "got|settings"),
    ({"config": {"backbone": "owner/name"}}, "settings of a vit, got backbone='owner/name'"),
    ({"config": {"use_timm_backbone": True}}, "settings of a vit, got use_timm_backbone"),
    ({"config": {"backbone_config": TIMM_BACKBONE}}, "settings of a vit, got backbone_config"),
    ({"config": {"pretrained_cfg": {"url": "http://x"}}}, "settings of a vit, got pretrained_cfg"),
    ({"config": {"auto_map": {"AutoModel": "code.Model"}}}, "settings of a vit, got auto_map"),
    ({"config": {"attn_implementation": "owner/kernel"}}, "settings of a vit, got attn_implementation"),
    ({"config": {"quantization_config": {"quant_method": "x"}}}, "settings of a vit, got quantization_config"),
    ({"config": {"_name_or_path": "/etc"}}, "settings of a vit, got _name_or_path"),
    ({"arguments": {"experts_implementation": "owner/kernel"}}, "expected arguments that describe"),
]


def change_settings(change: dict[str, Any], model: dict[str, Any]) -> None:
    """Change the description of a model of transformers, and some of its settings."""
    model.update({**change, "config": {**model["config"], **change.get("config", {})}})


@pytest.mark.parametrize(("change", "message"), HOSTILE, ids=lambda value: str(value)[:60])
def test_what_transformers_would_fetch_or_run_is_refused_before_it_is_built(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = forged("saved_hf", tmp_path, partial(change_settings, change))
    monkeypatch.setattr(transformers.PreTrainedModel, "__init__", lambda *_: pytest.fail("a model was built"))
    with pytest.raises(pmvit.PmvitError, match=message):
        pmvit.load(folder)


def test_folders_of_other_libraries_are_checked_alike(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = pmvit.load(FIXTURES / "saved_hf")
    plain: Any = pmvit.decompress(model)
    plain.save_pretrained(tmp_path / "hf")
    written = config_of(tmp_path / "hf")
    assert type(create_model(str(tmp_path / "hf"))) is type(plain)
    harmless = {
        "backbone": "owner/name",
        "attn_implementation": "owner/kernel",
        "auto_map": {"AutoModel": "code.Model"},
    }
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**written, **harmless}))
    loaded: Any = create_model(str(tmp_path / "hf"))  # what its class does not know is left out
    assert loaded.config._attn_implementation == "sdpa"
    assert not hasattr(loaded.config, "backbone")
    changes: list[dict[str, Any]] = [{"model_type": "timm_backbone"}, {"architectures": ["TimmBackbone"]}]
    for change in [*changes, {"num_hidden_layers": 10**9}]:
        (tmp_path / "hf" / "config.json").write_text(json.dumps({**written, **change}))
        refusal(lambda: create_model(str(tmp_path / "hf")))
    (tmp_path / "hf" / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/name"}')
    assert "got an adapter" in refusal(lambda: create_model(str(tmp_path / "hf")))


def test_a_folder_of_segmentation_models_pytorch_names_no_other_file(tmp_path: Path) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    arguments = config_of(FIXTURES / "saved_dpt")["model"]["arguments"]
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"checkpoint_path": "code.pt"}, "expected arguments that describe the architecture"),
        ({"encoder_depth": 10**7}, "expected numbers up to"),
        ({"embed_dim": 1_000_000}, "which its description calls for"),
    ]
    for change, message in changes:
        config = {"_model_class": "DPT", **arguments, **change}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        assert message in refusal(lambda: create_model(str(tmp_path)))


def test_an_original_is_not_made_with_what_a_file_may_not_say(tmp_path: Path) -> None:
    model = small_vit()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    small: Any = pmvit.compress(model, small_plan(model))
    with torch.no_grad():
        small.head.weight.add_(1)
    arguments = {"img_size": 96, "embed_dim": 48, "depth": 3, "num_heads": 3}
    name, weights = "vit_tiny_patch16_224", str(tmp_path / "weights.safetensors")
    record_source(small, name, weights, arguments)
    assert original_model(small) is not None
    changes: list[dict[str, Any]] = [{"checkpoint_path": "code.pt"}, {"depth": 10**8}, {"depth": 3000}]
    for hostile in changes:
        record_source(small, name, weights, {**arguments, **hostile})
        assert original_model(small) is None


# --- sizes ---


SIZES: list[tuple[str, dict[str, Any]]] = [
    ("saved_original", {"depth": 3000}),
    ("saved_original", {"depth": 10**12}),
    ("saved_original", {"img_size": [400_000, 400_000]}),
    ("saved_original", {"embed_dim": 1_000_000}),
    ("saved_original", {"mlp_ratio": 1e300}),
    ("saved_original", {"patch_size": 0}),
    ("saved_swin", {"depths": [3000, 3000]}),
    ("saved_swin", {"img_size": [40_000, 40_000]}),
    ("saved_features", {"depth": 3000}),
    ("saved_torchvision", {"num_layers": 3000}),
    ("saved_torchvision", {"image_size": 400_000}),
    ("saved_torchvision_swin", {"depths": [3000, 3000]}),
    ("saved_torchvision_swin", {"image_size": [400_000, 400_000]}),
    ("saved_dpt", {"embed_dim": 1_000_000}),
]


@pytest.mark.parametrize(("name", "change"), SIZES, ids=str)
def test_models_larger_than_their_files_are_refused(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    folder = forged(name, tmp_path, lambda model: model["arguments"].update(change))
    refusal(lambda: pmvit.load(folder))


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 3000}, {"num_hidden_layers": 10**12}, {"image_size": 400_000}]
)
def test_models_of_transformers_larger_than_their_files_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    folder = forged("saved_hf", tmp_path, lambda model: model["config"].update(change))
    refusal(lambda: pmvit.load(folder))


def test_an_encoder_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    folder = forged("saved_segmenter", tmp_path, lambda model: model["arguments"]["encoder"].update(depth=3000))
    assert "tensors" in refusal(lambda: pmvit.load(folder))


@pytest.mark.parametrize(
    "change",
    [
        {"crop_pct": 0.001},
        {"crop_pct": -1},
        {"crop_pct": float("nan")},
        {"crop_pct": "1"},
        {"input_size": [3, 100_000, 100_000]},
        {"input_size": [3, 24]},
        {"mean": [0.5]},
        {"std": [0.0, 0.0, 0.0]},
        {"interpolation": "other"},
        {"crop_mode": 3},
    ],
    ids=str,
)
def test_images_are_prepared_within_bounds(change: dict[str, Any], tmp_path: Path) -> None:
    folder = forged("saved_original", tmp_path, lambda model: model["data"].update(change))
    assert "data configuration" in refusal(lambda: pmvit.load(folder))


@pytest.mark.parametrize("change", [{"grid": [100_000, 100_000]}, {"depth": 10**9}], ids=str)
def test_plans_stay_within_bounds(change: dict[str, Any], tmp_path: Path) -> None:
    folder = forged("saved_model", tmp_path, lambda _: None)
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    (folder / "plan.json").write_text(json.dumps({**plan, **change}), encoding="utf-8")
    seal(folder, config_of(folder))
    assert "expected" in refusal(lambda: pmvit.load(folder))


def test_matrices_that_are_not_in_the_file_are_not_made(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "saved_model", tmp_path / "saved")
    config = config_of(tmp_path / "saved")
    seal(tmp_path / "saved", {**config, "learn": "dense"})
    assert "expected matrices of" in refusal(lambda: pmvit.load(tmp_path / "saved"))


# --- files that are none ---


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
@pytest.mark.parametrize("part", ["config.json", "plan.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_not_read(part: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(FIXTURES / "saved_model", folder)
    (folder / part).unlink()
    if kind == "pipe":
        os.mkfifo(folder / part)
    else:
        (folder / part).symlink_to("/dev/zero")
    assert "a pipe, a socket or a device" in refusal(lambda: pmvit.load(folder))
    assert "a pipe, a socket or a device" in refusal(lambda: pmvit.load(folder / part))
    if part == "plan.json":
        assert "a pipe, a socket or a device" in refusal(lambda: Plan.load(folder / part))


def test_documents_without_an_end_are_not_read_to_it(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "saved_model", tmp_path / "saved")
    with (tmp_path / "saved" / "config.json").open("ab") as file:
        file.truncate(2**36)  # 64 GiB, of which the disk holds nothing
    assert f"at most {MOST_TEXT:,} characters" in refusal(lambda: pmvit.load(tmp_path / "saved"))


# --- the guard ---


def saved_here(folder: Path) -> list[Path]:
    """Models of families that no fixture has, and of other kinds of compression."""
    made: dict[str, nn.Module] = {}
    vit = small_vit(img_size=64, depth=4)
    images = [torch.randn(4, 3, 64, 64)]
    metric = pmvit.measure(vit, images, method="adaptive", rank=16, progress=False)
    made["adaptive"] = pmvit.compress(vit, pmvit.plan(metric, keep=0.7))
    made["eva"] = small_vit("eva02_tiny_patch14_224", img_size=56, depth=2)
    made["beit"] = small_vit("beit_base_patch16_224", depth=2)
    made["head"] = small_vit()
    made["head"].head = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 8), nn.GELU(), nn.Linear(8, 7))
    if find_spec("transformers") is not None:
        from tests.hosts.hf_models import FAMILIES, make

        made |= {family: make(family) for family in FAMILIES}
    for name, model in made.items():
        pmvit.save(model, folder / name)
    return [folder / name for name in made]


def test_opening_reaches_nothing_beyond_the_folder_and_the_packages(tmp_path: Path) -> None:
    """Sockets, processes, unpickling and other files are forbidden while all kinds of models are loaded, or refused."""
    there = [name for name in HOSTS if name not in NEEDED or find_spec(NEEDED[name]) is not None]
    good = [FIXTURES / name for name in (*there, "saved_model", "saved_model.safetensors", "saved_method")]
    good += saved_here(tmp_path / "saved")
    bad = []
    for number, (change, _) in enumerate(HOSTILE if "saved_hf" in there else ()):
        bad.append(forged("saved_hf", tmp_path / str(number), partial(change_settings, change)))
    result = guarded([*good, *bad], tmp_path)
    assert result.returncode == 0, result.stderr
    told = dict(line.split("\t") for line in result.stdout.splitlines() if "\t" in line)
    assert [path for path in map(str, good) if not told[path].startswith("loaded")] == []
    assert [path for path in map(str, bad) if not told[path].startswith("refused")] == []


def guarded(paths: list[Any], folder: Path) -> subprocess.CompletedProcess[str]:
    home = {"HOME": str(folder / "home"), "HF_HOME": str(folder / "home"), "TORCH_HOME": str(folder / "home")}
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, **home, "PYTHONPATH": root}
    command = [sys.executable, "-m", "tests.saving.guarded", *map(str, paths)]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=300)
