"""What the shell completes: names of models and values of options, without loading anything that takes seconds."""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

FAMILIES = (
    *("vision_transformer", "deit", "vision_transformer_hybrid", "vision_transformer_relpos", "beit", "eva"),
    *("swin_transformer", "swin_transformer_v2"),
)
TORCHVISION = ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14")
MethodName = Literal[
    "measured", "scored", "paper",
    "act", "dynamic-vit", "evit", "evo-vit", "expedite", "ia-red2", "ps-vit",
    "random", "tofu", "tome", "top-k", "tps", "uniform", "zero-tprune",
]  # fmt: skip
Runtime = Literal["onnx", "openvino", "torch-export", "aot-inductor", "torchscript", "executorch", "litert"]
METHODS = get_args(MethodName)[3:]  # not ours
BENCHMARKED = ("eager", "compile", "onnxruntime", *get_args(Runtime)[1:])
VARIANTS = ("original", "original-optimized", "compressed", "optimized", "bound", "direct", "tome")
Completer = Callable[[str], list[str]]


def timm_names() -> list[str]:
    """The architectures that the installed timm has of those families, read off its source: importing it is slow."""
    spec = find_spec("timm")
    if spec is None or spec.origin is None:
        return []
    files = [Path(spec.origin).parent / "models" / f"{family}.py" for family in FAMILIES]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return sorted(name for text in texts for name in re.findall(r"^@register_model\s+def (\w+)", text, re.MULTILINE))


def complete_model(incomplete: str) -> list[str]:
    """Architectures, prefixes of other libraries, and what lies at the path that was begun."""
    library, colon, _ = incomplete.partition(":")
    if colon:
        known = timm_names() if library == "segmenter" else TORCHVISION if library == "torchvision" else ()
        return [f"{library}:{name}" for name in known if f"{library}:{name}".startswith(incomplete)]
    names = [*timm_names(), "hf-hub:", "hf:", "segmenter:", "torchvision:"]
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
