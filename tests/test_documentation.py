"""What the documentation and the examples show runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pmvit
from pmvit.models import adapter as adapters

ROOT = Path(__file__).parents[1]


def test_the_adapter_of_the_documentation_works(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/adapters.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    lines = code[code.index("@register") : code.index("model = MyViT()")].strip().splitlines()
    assert len(lines) <= 30
    before = list(adapters._adapters)
    try:
        exec(code, {})  # noqa: S102  # the very text that users are shown
    finally:
        adapters._adapters[:] = before
    whole, arrow, small, *shape = capsys.readouterr().out.split()
    assert arrow == "->"
    assert int(small) < int(whole)
    assert " ".join(shape) == "torch.Size([8, 5])"


def test_the_clip_example_runs_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [
        sys.executable,
        "examples/clip_image_tower.py",
        "--random",
        "--images",
        "64",
        "-o",
        str(tmp_path / "small"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    found = re.search(r"mean ([0-9.]+), lowest ([0-9.]+), (\d+) images", result.stdout)
    assert found is not None
    mean, lowest, count = (float(number) for number in found.groups())
    assert 0.9 < mean < 1
    assert lowest <= mean
    assert count == 32
    assert type(pmvit.load(tmp_path / "small")).__name__ == "CLIPModel"
