"""A compressed model is compared with its true original, also after its weights have changed, or it is said."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import pmvit
from pmvit.cli import app
from pmvit.compression import record_source
from pmvit.data.demo import DEMO, demo_loader, demo_model
from pmvit.evaluation.classification import evaluate
from pmvit.evaluation.reference import reference_for
from tests.helpers import small_plan, small_vit

IMAGES = demo_loader("test", 50, 100)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a compressed model, `out`, and what calibration made of it, `better`."""
    folder = tmp_path_factory.mktemp("models")
    model = demo_model()
    pmvit.save(pmvit.compress(model, small_plan(model, keep=0.4)), folder / "out")
    small = pmvit.load(folder / "out")
    pmvit.calibrate(small, demo_loader("train", 25, 50), distill=False, progress=False)
    pmvit.save(small, folder / "better")
    return folder


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(IMAGES[0][0])
    return logits


def test_after_calibration_the_reference_is_the_untouched_original(calibrated: Path) -> None:
    small = pmvit.load(calibrated / "better")
    reference = reference_for(small)
    assert (reference.name, reference.title) == ("original", "the original")
    assert torch.equal(outputs(reference.model), outputs(demo_model()))
    assert not torch.equal(outputs(reference.model), outputs(pmvit.decompress(pmvit.load(calibrated / "better"))))
    result = evaluate(small, IMAGES, reference=reference, progress=False)
    assert result.reference == "original"
    assert result.reference_top1 == evaluate(demo_model(), IMAGES, progress=False).top1


def test_what_is_not_the_original_is_not_called_so(calibrated: Path, tmp_path: Path) -> None:
    shutil.copytree(calibrated / "better", tmp_path / "alone")
    small = pmvit.load(tmp_path / "alone")
    own = outputs(pmvit.decompress(pmvit.load(tmp_path / "alone")))
    (calibrated / "out").rename(calibrated / "elsewhere")
    try:
        reference = reference_for(small)
        assert (reference.name, reference.title) == ("uncompressed", "the same weights uncompressed")
        assert torch.equal(outputs(reference.model), own)
        assert reference_for(small, calibrated / "elsewhere").name == "original"
        assert reference_for(small, tmp_path / "alone").name == "other"
        assert reference_for(small, demo_model()).name == "original"
    finally:
        (calibrated / "elsewhere").rename(calibrated / "out")
    with pytest.raises(pmvit.PmvitError, match="not compressed"):
        reference_for(small_vit())


def test_the_command_line_says_what_it_compares_with(calibrated: Path, tmp_path: Path) -> None:
    def run(*arguments: Any) -> Any:
        result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result

    folder = tmp_path / "images"
    images(folder)
    reading = ("--data", folder, "--workers", 0)
    found = json.loads(run(calibrated / "better", *reading, "--json").stdout)
    assert found["reference"] == "original"
    assert re.search(r"compared with +│ +the original\n  its top-1", run(calibrated / "better", *reading).output)
    shutil.copytree(calibrated / "better", tmp_path / "alone")
    (calibrated / "out").rename(calibrated / "elsewhere")
    try:
        shown = run(tmp_path / "alone", *reading).output
        assert re.search(r"compared with +│ +the same weights uncompressed\n  its top-1", shown)
        assert "original" not in shown
        named = json.loads(run(tmp_path / "alone", *reading, "--original", calibrated / "elsewhere", "--json").stdout)
        assert named["reference"] == "original"
        assert named["agreement"] == found["agreement"]
    finally:
        (calibrated / "elsewhere").rename(calibrated / "out")


def images(folder: Path) -> None:
    """Ten of the demo's images, in a folder a class."""
    from PIL import Image

    from pmvit.data.demo import demo_images

    pixels, labels = demo_images("test", 10)
    for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        path = folder / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.squeeze().numpy()).save(path)


def test_a_source_that_was_written_down_is_opened() -> None:
    model = demo_model()
    small = pmvit.compress(model, small_plan(model))
    record_source(small, DEMO)
    with torch.no_grad():
        next(small.parameters()).add_(0.1)
    assert torch.equal(outputs(reference_for(small).model), outputs(model))
