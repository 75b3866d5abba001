"""Saving checks once and then only writes; versions are told apart; nothing is written that cannot be loaded."""

import hashlib
import json
import shutil
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import nn

import pmvit
from pmvit.compression import wrap_blocks
from pmvit.config import PlanConfig
from pmvit.hosts import host_of
from pmvit.hosts.outputs import predict
from pmvit.hosts.timm.model import TimmModel
from pmvit.methods import PsVit
from pmvit.planning import Plan
from pmvit.saving.models import check_savable
from pmvit.saving.parts import RECIPES
from pmvit.wrapping import WrappedBlock
from tests.helpers import QUIET, compressed, make_pictures, small_plan, small_vit, tome

FIXTURES = Path(__file__).parents[1] / "fixtures"


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


def loaded(path: Path) -> Any:
    return pmvit.load(path)


def relu_vit() -> nn.Module:
    """Its shapes do not tell that it was made with another activation."""
    return small_vit(act_layer="relu")


def test_a_model_is_built_again_once_and_not_at_every_save(tmp_path: Path) -> None:
    small: Any = compressed()
    with patch.object(TimmModel, "make", autospec=True, side_effect=TimmModel.make) as make:
        check_savable(small)
        builds = make.call_count
        assert builds > 0
        for number in range(3):
            with torch.no_grad():
                small.head.weight.add_(0.1)
            pmvit.save(small, tmp_path / str(number))
        assert make.call_count == builds
    assert torch.equal(loaded(tmp_path / "2").head.weight, small.head.weight)
    assert not torch.equal(loaded(tmp_path / "1").head.weight, small.head.weight)


def test_a_model_that_changed_since_it_was_checked_is_checked_again(tmp_path: Path) -> None:
    small: Any = compressed()
    pmvit.save(small, tmp_path / "out")
    small.pretrained_cfg["crop_pct"] = 0.5
    pmvit.save(small, tmp_path / "out")
    assert loaded(tmp_path / "out").pretrained_cfg["crop_pct"] == 0.5
    small.blocks[1].block.mlp.act = nn.ReLU()
    with pytest.raises(pmvit.PmvitError, match="gives another output than this model"):
        pmvit.save(small, tmp_path / "out")
    check_savable(pmvit.load(tmp_path / "out"))  # what was there is whole


def test_arguments_are_remembered(tmp_path: Path) -> None:
    model = relu_vit()
    check_savable(model, {"act_layer": "relu"})
    pmvit.save(model, tmp_path / "out")
    image = torch.randn(1, 3, 96, 96)
    with torch.inference_mode():
        assert torch.equal(pmvit.load(tmp_path / "out")(image), model(image))


def test_a_model_that_cannot_be_saved_is_refused_before_the_work(tmp_path: Path) -> None:
    model = relu_vit()
    small = pmvit.compress(model, small_plan(model))
    nothing: Any = ()  # no image is looked at
    for work in (pmvit.finetune, pmvit.calibrate):
        images = {"train": nothing} if work is pmvit.finetune else {"data": nothing}
        with pytest.raises(pmvit.PmvitError, match="gives another output than this model"):
            work(small, output=tmp_path / "out", **images, **QUIET)
    pictures = str(make_pictures(tmp_path / "pictures", 14))
    with pytest.raises(pmvit.PmvitError, match="gives another output than this model"):
        pmvit.run(model, train=pictures, val=pictures, output=tmp_path / "out", plan_config=PlanConfig(keep=0.5))
    assert not (tmp_path / "out").exists()


def test_files_say_what_they_are_in_words_that_last(tmp_path: Path) -> None:
    pmvit.save(compressed(), tmp_path / "plan")
    pmvit.save(tome(small_vit(), 4), tmp_path / "method")
    pmvit.save(small_vit(), tmp_path / "original")
    for name, kind in (("plan", "plan"), ("method", "method"), ("original", None)):
        config = config_of(tmp_path / name)
        assert (config["version"], config["host"]) == (2, "timm-vit")
        assert (config["compression"] or {}).get("kind") == kind
        files = {path.name for path in (tmp_path / name).iterdir()}
        assert files == {"model.safetensors", "config.json", "README.md", *([] if kind is None else [f"{kind}.json"])}
    assert json.loads((tmp_path / "method" / "method.json").read_text())["name"] == "tome"


def test_version_1_becomes_version_2_when_it_is_saved_again(tmp_path: Path) -> None:
    for name in ("saved_model", "saved_method", "saved_original"):
        before = config_of(FIXTURES / name)
        pmvit.save(pmvit.load(FIXTURES / name), tmp_path / name)
        after = config_of(tmp_path / name)
        assert (before["version"], after["version"]) == (1, 2)
        assert before["model"] == after["model"]
        assert before["sha256"]["model.safetensors"] == after["sha256"]["model.safetensors"]


def test_options_that_have_another_name_now_are_read(tmp_path: Path) -> None:
    blocks = tuple(2 if patch % 3 else 1 for patch in range(36))
    small: Any = pmvit.compress(small_vit(), PsVit(0.5, blocks))
    pmvit.save(small, tmp_path / "out")
    text = (tmp_path / "out" / "method.json").read_text()
    (tmp_path / "out" / "method.json").write_text(text.replace("blocks_per_patch", "lives"))
    config = config_of(tmp_path / "out")
    config["sha256"]["method.json"] = hashlib.sha256((tmp_path / "out" / "method.json").read_bytes()).hexdigest()
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert loaded(tmp_path / "out").compression.what == small.compression.what


def test_kinds_and_versions_that_are_not_there_yet_are_refused(tmp_path: Path) -> None:
    pmvit.save(compressed(), tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "later")
    config = config_of(tmp_path / "later")
    (tmp_path / "later" / "config.json").write_text(json.dumps({**config, "version": 3}))
    with pytest.raises(pmvit.PmvitError, match="expected version 2 of pmvit-model, got 3: a newer pmvit wrote it"):
        pmvit.load(tmp_path / "later")


@dataclass(frozen=True, eq=False)
class Shifting:
    """A kind of compression that pmvit does not know: it adds a vector to the tokens behind a block."""

    shift: torch.Tensor
    kind: ClassVar[str] = "shifting"
    title: ClassVar[str] = "Shifting"

    def to_json(self) -> str:
        return "{}"

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"shift": self.shift}

    @staticmethod
    def from_json(text: str, where: str, tensors: dict[str, torch.Tensor]) -> "Shifting":
        return Shifting(tensors["shift"])


class ShiftedBlock(WrappedBlock):
    def __init__(self, block: nn.Module, shift: torch.Tensor) -> None:
        super().__init__()
        self.block, self.shift = block, shift

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.block(tokens) + self.shift


@wrap_blocks.register
def _(what: Shifting, model: Any, learn: str) -> list[Any]:
    model.blocks[1] = ShiftedBlock(model.blocks[1], what.shift)
    return []


def test_a_new_kind_of_compression_needs_no_change_to_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tensors that it has; what is no tensor of its kind is refused."""
    monkeypatch.setitem(RECIPES, "shifting", f"{__name__}:Shifting.from_json")
    small = pmvit.compress(small_vit(), Shifting(torch.randn(48)))
    images = torch.randn(2, 3, 96, 96)
    for name in ("out", "out.safetensors"):
        pmvit.save(small, tmp_path / name)
        again = pmvit.load(tmp_path / name)
        assert torch.equal(predict(again, images), predict(small, images))
    assert not torch.equal(predict(pmvit.decompress(again), images), predict(small, images))
    monkeypatch.setitem(RECIPES, "shifting", f"{__name__}:of_nothing")
    with pytest.raises(pmvit.PmvitError, match=r"unexpected tensor 'pmvit\.shift', which is not of its .*Merge"):
        pmvit.load(tmp_path / "out")


def of_nothing(text: str, where: str, tensors: dict[str, torch.Tensor]) -> Plan:
    return small_plan(small_vit())


def with_head(head: nn.Module, **arguments: Any) -> Any:
    model: Any = small_vit(**arguments)
    model.head = head
    return model


def test_a_head_of_torchs_layers_is_saved(tmp_path: Path) -> None:
    layers = OrderedDict(
        norm=nn.LayerNorm(48, eps=1e-3),
        wide=nn.Linear(48, 8, bias=False),
        batch=nn.BatchNorm1d(8),
        act=nn.GELU(approximate="tanh"),
        drop=nn.Dropout(0.3),
        out=nn.Linear(8, 7),
    )
    model = with_head(nn.Sequential(layers)).eval()
    model.head.batch.running_var.fill_(2.0)
    image = torch.randn(2, 3, 96, 96)
    pmvit.save(pmvit.compress(model, small_plan(model)), tmp_path / "out")
    again = loaded(tmp_path / "out")
    pmvit.save(again, tmp_path / "again")
    with torch.inference_mode():
        for found in (again, loaded(tmp_path / "again")):
            assert torch.equal(pmvit.decompress(found)(image), model(image))
            assert found.head.drop.p == 0.3


@pytest.mark.parametrize("name", ["saved_hf", "saved_torchvision", "saved_swin"])
def test_heads_of_other_libraries_are_saved_alike(name: str, tmp_path: Path) -> None:
    if name == "saved_hf":
        pytest.importorskip("transformers")
    model = loaded(FIXTURES / name)
    where = {"saved_hf": "classifier", "saved_torchvision": "heads", "saved_swin": "head.fc"}[name]
    width = 16 if name == "saved_swin" else 8
    model.set_submodule(where, nn.Sequential(nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, 3)))
    pmvit.save(model, tmp_path / "out")
    image = torch.randn(1, *host_of(model).input_size())
    with torch.inference_mode():
        assert torch.equal(predict(loaded(tmp_path / "out"), image), predict(model, image))


def test_a_head_that_cannot_be_saved_names_the_way_that_works(tmp_path: Path) -> None:
    for head in (
        nn.Linear(48, 9),
        nn.Sequential(nn.PReLU(), nn.Linear(48, 7)),
        nn.Sequential(nn.Sequential(nn.Linear(48, 7))),
    ):
        with pytest.raises(pmvit.PmvitError, match=r"first difference: head\..*as num_classes; a head of your own"):
            pmvit.save(with_head(head), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    pmvit.save(with_head(nn.Linear(48, 9)), tmp_path / "out", arguments={"num_classes": 9})
    assert loaded(tmp_path / "out").head.out_features == 9


@pytest.mark.parametrize(
    "layers",
    [
        [["0", "Linear", {"in_features": 10**9, "out_features": 7}]],
        [["0", "Linear", {"in_features": 48, "out_features": 7, "device": "cuda"}]],
        [["0", "Module", {}]],
        [["a.b", "Identity", {}]],
        [["0", "Identity"]],
        "Identity",
        [[["0"], "Identity", {}]],
        [["0", ["Identity"], {}]],
    ],
    ids=str,
)
def test_heads_in_files_are_checked(layers: Any) -> None:
    model = host_of(small_vit())
    with pytest.raises(pmvit.PmvitError):
        type(model).build({**model.describe(), "head": layers})
