"""What the shell completes: names of models and values of options, without loading anything that takes seconds."""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from pmvit.config.inference import RuntimeName

SWIN, VIT = "swin_transformer", "vision_transformer"
FILES = {  # of each library's models, those with architectures to offer
    "timm": (VIT, "deit", f"{VIT}_hybrid", f"{VIT}_relpos", "beit", "eva", SWIN, f"{SWIN}_v2"),
    "torchvision": (VIT, SWIN),
}
MethodName = Literal[
    "adaptive", "measured", "scored", "paper",
    "act", "diffrate", "dynamic-vit", "evit", "evo-vit", "expedite", "ia-red2", "mctf", "pitome", "ps-vit",
    "random", "tofu", "tome", "top-k", "tps", "uniform", "zero-tprune",
]  # fmt: skip
Runtime = Literal["onnx", "openvino", "torch-export", "aot-inductor", "torchscript", "executorch", "litert"]
METHODS = get_args(MethodName)[4:]  # not ours
BENCHMARKED = get_args(RuntimeName)
VARIANTS = ("original", "original-optimized", "compressed", "optimized", "bound", "direct", "tome")
Completer = Callable[[str], list[str]]


def architectures(library: str) -> list[str]:
    """Those of the installed timm or torchvision, read off its source: importing it is slow."""
    spec = find_spec(library)
    if spec is None or spec.origin is None:
        return []
    files = [Path(spec.origin).parent / "models" / f"{name}.py" for name in FILES[library]]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return sorted(name for text in texts for name in re.findall(r"^@register_model.*\n(?:@.*\n)*def (\w+)", text, re.M))


def complete_model(incomplete: str) -> list[str]:
    """Architectures, prefixes of other libraries, and what lies at the path that was begun."""
    library, colon, _ = incomplete.partition(":")
    if colon:
        source = {"segmenter": "timm", "torchvision": "torchvision"}.get(library)
        known = [f"{library}:{name}" for name in architectures(source)] if source is not None else []
        return [name for name in known if name.startswith(incomplete)]
    names = [*architectures("timm"), "hf-hub:", "hf:", "segmenter:", "torchvision:"]
    return [name for name in names if name.startswith(incomplete)] + _saved_models(incomplete)


def _saved_models(incomplete: str) -> list[str]:
    """Folders, and files that may be saved models."""
    begun = Path(incomplete)
    folder = begun if incomplete.endswith("/") or not incomplete else begun.parent
    if not folder.is_dir():
        return []
    found = sorted(path for path in folder.iterdir() if path.is_dir() or path.suffix == ".safetensors")
    return [str(path) for path in found if str(path).startswith(incomplete) and not path.name.startswith(".")]


def value_of(*values: str) -> Completer:
    """Complete one of these values; others are taken, too."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def some_of(*values: str) -> Completer:
    """Complete a list with commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        taken = before.split(",")
        return [f"{before}{comma}{value}" for value in values if value.startswith(last) and value not in taken]

    return complete
