"""The demo, whole: what `make demo` runs."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

import pmvit
from pmvit.cli import demo_run as demo
from pmvit.data.demo import demo_loader


def test_the_demo_shows_accuracy_and_speed_and_leaves_a_model_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "TUNING", replace(demo.TUNING, epochs=1))
    few = partial(demo_loader, count=100)
    monkeypatch.setattr(demo, "demo_loader", few)
    monkeypatch.setattr("pmvit.data.demo.demo_loader", few)
    console = Console(record=True, width=100)
    demo.run(tmp_path / "out", console)
    text = console.export_text()
    for words in (
        "top-1",
        "agreement with the original",
        "GFLOPs (MACs)",
        "speed, batch of 16",
        "fine-tuned",
        "█ kept",
    ):
        assert words in text
    small = pmvit.load(tmp_path / "out")
    assert pmvit.flops(small).gflops < 0.18
    assert Image.open(tmp_path / "out" / "blocks.png").width > 600
    names = {path.name for path in (tmp_path / "out").iterdir()}
    model = {"model.safetensors", "adaptive.json", "config.json", "README.md", "metric.safetensors", "metrics.jsonl"}
    assert names == {*model, "blocks.png", "report.html", "report.json"}
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for title in ("Training loss", "Validation", "Token budget of each block", "top-1 accuracy"):
        assert title in page
