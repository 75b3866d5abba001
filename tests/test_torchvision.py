"""torchvision imports beside a PyTorch it was not built for, and nothing is defined where nothing is missing."""

import subprocess
import sys


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_importing_pmvit_first_is_enough() -> None:
    result = run("import pmvit, timm; print(timm.create_model('vit_tiny_patch16_224', depth=1).embed_dim)")
    assert result.stdout.strip() == "192", result.stderr


def test_importing_pmvit_imports_neither() -> None:
    assert run("import sys, pmvit; sys.exit('torch' in sys.modules or 'torchvision' in sys.modules)").returncode == 0


def test_operators_that_exist_are_left_alone() -> None:
    code = """
import torch
from importlib.util import find_spec
from pmvit._torchvision import define_missing_operators
library = torch.library.Library("torchvision", "FRAGMENT")
spec = find_spec("torchvision")
first = define_missing_operators(spec)
again = define_missing_operators(spec)
assert not again, again
assert hasattr(torch.ops.torchvision, "nms") and hasattr(torch.ops.torchvision, "qnms")
import torchvision
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
