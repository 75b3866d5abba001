"""Models from names: what is refused before anything is fetched, and what is said where nothing can be."""

import time
from pathlib import Path

import pytest
from huggingface_hub import constants

import pmvit
from pmvit.loading import create_model


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that refuses connections, and caches without a file."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("vit_tiny_patch16_224", r"pass them as a file \(--weights\)"),
        ("hf-hub:timm/vit_tiny_patch16_224.augreg_in21k", r"pass them as a file \(--weights\)"),
        ("segmenter:vit_tiny_patch16_224", r"pass them as a file \(--weights\)"),
        ("hf:google/vit-base-patch16-224", "pass a folder with a model that `save_pretrained` wrote"),
    ],
)
@pytest.mark.usefixtures("offline")
def test_without_a_network_it_is_said_at_once_what_to_pass(name: str, instead: str) -> None:
    """Libraries try again and again, for more than a minute."""
    begun = time.monotonic()
    with pytest.raises(pmvit.PmvitError, match=rf"not on this machine and cannot be fetched \(.*\): {instead}") as said:
        create_model(name)
    assert time.monotonic() - begun < 15
    assert "\n" not in str(said.value)
    assert not constants.HF_HUB_OFFLINE  # as it was


@pytest.mark.usefixtures("offline")
def test_an_architecture_that_nobody_knows_is_refused_before_it_is_fetched() -> None:
    with pytest.raises(pmvit.PmvitError, match=r"no host knows a timm\.models\.resnet\.ResNet"):
        create_model("resnet18")
    with pytest.raises(pmvit.PmvitError, match="cannot be fetched"):
        create_model("resnet18", needs_host=False)  # a teacher may be any model
    with pytest.raises(pmvit.PmvitError, match="is it a plain vision transformer"):
        create_model("segmenter:resnet18")
    with pytest.raises(pmvit.PmvitError, match="expected one of torchvision's"):
        create_model("torchvision:resnet18")
