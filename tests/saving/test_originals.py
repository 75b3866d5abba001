"""The original of a compressed model is found by its weights, wherever it still is, or said not to be at hand."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import pmvit
from pmvit.compression import Original, compression_of, record_source
from pmvit.data.demo import DEMO, demo_model
from pmvit.loading import original_model
from pmvit.wrapping import fingerprint
from tests.helpers import QUIET, compressed, pmvit_here, small_plan, small_vit, tome

FIXTURES = Path(__file__).parents[1] / "fixtures"


def tuned(model: nn.Module) -> nn.Module:
    """The model with other weights, as after fine-tuning."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model


def recorded(model: nn.Module) -> Original:
    compression = compression_of(model)
    assert compression is not None
    return compression.original


def is_original(found: nn.Module | None) -> bool:
    assert found is None or compression_of(found) is None
    return found is not None and fingerprint(found) == fingerprint(small_vit())


def test_it_is_the_model_itself_until_its_weights_change(tmp_path: Path) -> None:
    for small in (compressed(), tome(small_vit(), 4)):
        assert recorded(small).fingerprint == fingerprint(small_vit())
        assert is_original(original_model(small))
        assert compression_of(small) is not None
        assert original_model(tuned(small)) is None
        pmvit.save(small, tmp_path / "saved")
        assert original_model(pmvit.load(tmp_path / "saved")) is None
    with pytest.raises(pmvit.PmvitError, match="is not compressed"):
        original_model(small_vit())


def test_it_is_found_in_a_model_that_was_saved_on_the_way(tmp_path: Path, small_batches: Any) -> None:
    pmvit.save(compressed(), tmp_path / "here" / "out")
    small = pmvit.load(tmp_path / "here" / "out")
    pmvit.finetune(small, train=small_batches, output=tmp_path / "here" / "tuned", epochs=1, lr=1e-2, **QUIET)
    assert is_original(original_model(small))
    (tmp_path / "here").rename(tmp_path / "there")  # they are moved together
    loaded = pmvit.load(tmp_path / "there" / "tuned")
    assert is_original(original_model(loaded))
    assert not is_original(pmvit.decompress(loaded))
    pmvit.save(tuned(pmvit.load(tmp_path / "there" / "out")), tmp_path / "there" / "out")  # it is another model now
    assert original_model(pmvit.load(tmp_path / "there" / "tuned")) is None


def test_it_is_opened_from_where_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(small_vit().state_dict(), tmp_path / "weights.safetensors")
    arguments = {"img_size": 96, "embed_dim": 48, "depth": 3, "num_heads": 3}
    options = [part for name, value in arguments.items() for part in ("--model-arg", f"{name}={value}")]
    made = pmvit_here(
        "compress", "vit_tiny_patch16_224", "--weights", "weights.safetensors", *options,
        "--method", "tome", "--r", 4, "-o", "out", cwd=tmp_path,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    small = pmvit.load("out")
    original = recorded(small)
    assert (original.source, original.arguments) == ("vit_tiny_patch16_224", arguments)
    monkeypatch.chdir("/")
    pmvit.save(tuned(small), tmp_path / "tuned")
    shutil.rmtree(tmp_path / "out")
    assert is_original(original_model(pmvit.load(tmp_path / "tuned")))
    (tmp_path / "weights.safetensors").unlink()
    assert original_model(pmvit.load(tmp_path / "tuned")) is None


def test_a_file_cannot_have_other_files_read(tmp_path: Path) -> None:
    save_file(small_vit().state_dict(), tmp_path / "weights.safetensors")
    small = tuned(compressed())
    arguments = {"img_size": 96, "embed_dim": 48, "depth": 3, "num_heads": 3}
    places = ("vit_tiny_patch16_224", "hf-hub:somebody/something")
    for name, more, found in (
        (places[0], {}, True),
        (places[0], {"checkpoint_path": "x.pth"}, False),
        (places[1], {}, False),
    ):
        record_source(small, name, str(tmp_path / "weights.safetensors"), {**arguments, **more})
        assert is_original(original_model(small)) is found


def test_a_name_alone_is_not_fetched_and_the_demo_is_at_hand() -> None:
    small = tuned(compressed())
    record_source(small, "vit_tiny_patch16_224")
    assert original_model(small) is None
    demo = tuned(pmvit.compress(demo_model(), small_plan(demo_model())))
    record_source(demo, DEMO)
    found = original_model(demo)
    assert found is not None
    assert fingerprint(found) == fingerprint(demo_model())


def test_models_of_version_1_know_where_it_used_to_be(tmp_path: Path) -> None:
    original = fingerprint(pmvit.load(FIXTURES / "saved_original"))
    for name in ("saved_model", "saved_method", "saved_model.safetensors"):
        found = original_model(pmvit.load(FIXTURES / name))
        assert found is not None
        assert fingerprint(found) == original
    shutil.copytree(FIXTURES / "run", tmp_path / "run")
    found = original_model(pmvit.load(tmp_path / "run"))
    assert found is not None
    assert fingerprint(found) == fingerprint(pmvit.decompress(pmvit.load(FIXTURES / "run" / "compressed")))
    shutil.rmtree(tmp_path / "run" / "compressed")
    assert original_model(pmvit.load(tmp_path / "run")) is None
