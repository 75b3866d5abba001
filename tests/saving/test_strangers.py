"""A saved model or run from somebody else: opening it runs nothing and fetches nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pmvit
from pmvit.cli import app
from pmvit.hosts import HuggingFaceViT

FIXTURES = Path(__file__).parents[1] / "fixtures"


def description() -> dict[str, Any]:
    """That of the Hugging Face model among the fixtures."""
    found: dict[str, Any] = json.loads((FIXTURES / "saved_hf" / "config.json").read_text(encoding="utf-8"))["model"]
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": "owner/kernel"}, "expected eager or sdpa"),
        ({"architecture": "TimmBackbone"}, "opens files of timm"),
        ({"config": {"backbone": "owner/name"}}, "nothing to fetch, got backbone"),
        ({"config": {"use_timm_backbone": True}}, "nothing to fetch, got use_timm_backbone"),
        ({"config": {"backbone_config": {"model_type": "timm_backbone"}}}, "on a timm_backbone of timm"),
        ({"config": {"backbone_config": {"pretrained_cfg": {"url": "http://x"}}}}, "nothing to fetch, got pretrained"),
        ({"config": {"auto_map": {"AutoModel": "code.Model"}}}, "nothing to fetch, got auto_map"),
    ],
)
def test_what_would_fetch_or_open_something_is_refused_before_it_is_built(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    model = description()
    config = {**model["config"], **change.pop("config", {})}
    HuggingFaceViT.build(model)

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(transformers.PreTrainedModel, "_from_config", forbidden)
    with pytest.raises(pmvit.PmvitError, match=message):
        HuggingFaceViT.build({**model, "config": config, **change})


def test_a_run_whose_data_is_a_command_is_not_resumed(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "finetune", tmp_path / "run")
    record = json.loads((tmp_path / "run" / "finetune.json").read_text(encoding="utf-8"))
    record["command"]["data"] = f"pipe:touch {tmp_path}/ran"
    (tmp_path / "run" / "finetune.json").write_text(json.dumps(record), encoding="utf-8")
    result = CliRunner().invoke(app, ["finetune", "--resume", str(tmp_path / "run")])
    assert isinstance(result.exception, pmvit.PmvitError)
    assert "which a file may not name" in str(result.exception)
    assert not (tmp_path / "ran").exists()


def test_a_folder_of_segmentation_models_pytorch_names_no_other_file(tmp_path: Path) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    from pmvit.hosts import smp

    config = {"_model_class": "DPT", "encoder_name": "tu-vit_tiny_patch16_224", "checkpoint_path": "code.pt"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(pmvit.PmvitError, match="expected arguments that describe the architecture"):
        smp.from_folder(tmp_path)
