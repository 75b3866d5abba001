"""What the classes of a model are called: as a file, the model or the images say, and never by its shape."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timm.data.imagenet_info import ImageNetInfo
from torch import nn

from pmvit.data import demo
from pmvit.data.sources import FileSource, open_source
from pmvit.errors import PmvitError
from pmvit.hosts import host_of
from pmvit.hosts.outputs import num_classes_of

IMAGENET = "in1k"  # in the tag of weights that timm has trained or tuned on ImageNet-1k


def class_names(model: nn.Module, file: str | Path | None = None, data: str | Path | None = None) -> tuple[str, ...]:
    """The names of a model's classes, one for each.

    They come from a text file; else from the class folders of `data`; else from the model: `id2label` of a Hugging Face
    configuration, `label_names` of timm's `pretrained_cfg`, or its tag, if that says ImageNet-1k; else they are
    `class 0`, `class 1` and so on. A file that does not have one name for each class is a `PmvitError`.
    """
    pixel_classes = host_of(model).outputs().pixel_classes
    classes = pixel_classes or num_classes_of(model) or 0
    if file is not None:
        return _read_names(Path(file), classes)
    found = _folder_names(data, classes) if data is not None and (pixel_classes is None or data == demo.DEMO) else ()
    found = found or _recorded(model, classes)
    return found if len(found) == classes else tuple(f"class {number}" for number in range(classes))


def name_of(number: int, names: Sequence[str]) -> str:
    """What a class is called; its number, if it has no name."""
    return names[number] if number < len(names) else f"class {number}"


def _recorded(model: nn.Module, classes: int) -> tuple[str, ...]:
    by_number: Any = getattr(getattr(model, "config", None), "id2label", None) or {}
    if isinstance(by_number, dict) and any(name != f"LABEL_{number}" for number, name in by_number.items()):
        return tuple(str(by_number.get(number, number)) for number in range(classes))
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    if config.get("label_names"):
        descriptions = config.get("label_descriptions") or {}
        return tuple(str(descriptions.get(name, name)) for name in config["label_names"])
    imagenet = ImageNetInfo()
    if classes == imagenet.num_classes() == config.get("num_classes") and IMAGENET in str(config.get("tag")):
        return tuple(imagenet.index_to_description(number) for number in range(classes))
    return ()


def _folder_names(data: str | Path, classes: int) -> tuple[str, ...]:
    """The names of class folders, if there is one for each class of the model and they say more than numbers do."""
    if data == demo.DEMO:
        return demo.CLASSES
    source = open_source(data, classes or None)
    if not isinstance(source, FileSource) or source.labels is None:
        return ()
    folders = [path.relative_to(data).parts[0] for path in source.files]
    found = dict(zip(source.labels, folders, strict=True))
    names = tuple(found.get(number, "") for number in range(classes))
    return names if all(name and not name.removeprefix("n").isdecimal() for name in names) else ()


def _read_names(path: Path, classes: int) -> tuple[str, ...]:
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise PmvitError(f"expected names of classes in {path}, one a line; it cannot be read ({error})") from None
    if len(names) != classes:
        raise PmvitError(f"{path}: expected {classes} names, one a line for each class of the model; got {len(names)}")
    return names
