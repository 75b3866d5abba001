"""Let torchvision import beside a PyTorch it was not built for.

When torchvision's compiled library does not load (a CUDA build beside a CPU-only PyTorch, say), importing it stops
with "operator torchvision::nms does not exist", and timm and transformers stop with it, although neither needs that
operator. Defining the two schemas is enough. This is done at the moment somebody imports torchvision and not before,
so `import pmvit` stays fast, and never where the operators exist: defining them twice would be an error of its own.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept_alive: list[object] = []  # a library's definitions vanish with the object that made them


def define_missing_operators(torchvision: ModuleSpec) -> list[str]:
    """Define those of `nms` and `qnms` that torchvision's own library does not bring; return their names."""
    import torch

    for folder in torchvision.submodule_search_locations or []:
        for library in sorted(Path(folder).glob("_C.*")):
            try:
                torch.ops.load_library(str(library))
            except OSError:
                continue
    missing = [name for name in ("nms", "qnms") if not hasattr(torch.ops.torchvision, name)]
    if missing:
        fragment = torch.library.Library("torchvision", "FRAGMENT")
        for name in missing:
            fragment.define(name + _SCHEMA)
        _kept_alive.append(fragment)
    return missing


class _BeforeTorchvision:
    """An import hook that finds nothing itself: it acts once, just before torchvision is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            spec = PathFinder.find_spec(name, path)
            if spec is not None:
                define_missing_operators(spec)
        return None


def install() -> None:
    """Arrange for the missing operators to be defined, unless torchvision is imported already."""
    if "torchvision" not in sys.modules and find_spec("torchvision") is not None:
        sys.meta_path.insert(0, _BeforeTorchvision())
