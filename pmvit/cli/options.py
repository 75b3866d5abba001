"""What the verbs are told: options made from the classes of `pmvit.config`, and those of the command line alone."""

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from pmvit.cli.completion import complete_model, value_of
from pmvit.cli.screen import keep_output_for_json
from pmvit.config import choices
from pmvit.errors import PmvitError

Config = TypeVar("Config")
Command = TypeVar("Command", bound=Callable[..., None])


def attribute_texts(config: type) -> dict[str, str]:
    """What the docstring of a class says of each attribute, in its first sentence."""
    _, _, text = inspect.cleandoc(config.__doc__ or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text, re.MULTILINE)
    sentences = {name: re.split(r"\.(?: (?=[A-Z`])|$)", " ".join(told.split()))[0] for name, told in found}
    return {name: told.replace("`", "") + "." for name, told in sentences.items()}


def options_of(config: Any, *, but: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Options for the fields of a configuration, each `None` if not given, by the names of their parameters.

    Args:
        config: The class, or a value of it whose fields are shown as defaults.
        but: Fields to leave out.
        only: Fields to take, if not all.
    """
    kind = config if isinstance(config, type) else type(config)
    texts, result = attribute_texts(kind), {}
    for field in fields(kind):
        if field.name in (only or [field.name]) and field.name not in but:
            default = field.default if config is kind else getattr(config, field.name)
            asked, shown = _asked(field.type), _shown(field, default)
            metavar = "<text>" if asked == list[str] else None
            option = typer.Option(
                "/".join(_flags(field)), help=texts.get(field.name), show_default=shown, metavar=metavar
            )
            result[_parameter(field)] = Annotated[asked | None, option]
    return result


def _parameter(field: Any) -> str:
    return str(field.metadata.get("option", field.name))


def _flags(field: Any) -> list[str]:
    name = _parameter(field).replace("_", "-")
    return [f"--{name}", *([f"--{field.metadata.get('off', f'no-{name}')}"] if field.type is bool else [])]


def _asked(annotation: Any) -> Any:
    """What the command line asks for in place of a type."""
    if values := choices(annotation):
        return Literal[values]
    kinds = [part for part in get_args(annotation) if part is not NoneType]
    if get_origin(annotation) is tuple:
        return list[str] if kinds[-1] is ... else annotation
    return _asked(kinds[0]) if kinds else annotation


def _shown(field: Any, default: Any) -> str | bool:
    """The default as the help shows it."""
    if default in (None, MISSING, ()):
        return False
    if isinstance(default, bool):
        return _flags(field)[not default].removeprefix("--")
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def given(options: dict[str, Any], config: type) -> dict[str, Any]:
    """Those fields of a configuration that options were given for."""
    found = [(field, options.get(_parameter(field))) for field in fields(config)]
    return {field.name: _value(field, value) for field, value in found if value is not None}


def made(config: type[Config], options: dict[str, Any]) -> Config:
    """A configuration of the options that were given."""
    return config(**given(options, config))


def _value(field: Any, value: Any) -> Any:
    if isinstance(value, list):
        is_text = field.type == tuple[str, ...]
        return tuple(value) if is_text else whole_numbers(f"--{field.name.replace('_', '-')}", value)
    return None if value == "none" and field.default is None and not choices(field.type) else value


def whole_numbers(option: str, texts: list[str]) -> tuple[int, ...]:
    """Numbers of blocks and the like, each a text or several with commas; `none` alone is none."""
    try:
        return () if texts == ["none"] else tuple(int(part) for text in texts for part in text.split(","))
    except ValueError:
        raise PmvitError(f"{option}: expected whole numbers, as in 1,16, or none; got {' '.join(texts)}") from None


def batch_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes that were given with commas."""
    sizes = whole_numbers("--batch", [text])
    if not sizes or min(sizes) < 1:
        raise PmvitError(f"--batch: expected batch sizes with commas, as in 1,16; got {text!r}")
    return sizes


def with_options(*groups: Any) -> Callable[[Command], Command]:
    """Give a command the options of these groups in place of its `**options`, all of them `None` if not given."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        own = {p.name: p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        for group in groups:
            for name, annotation in (group if isinstance(group, dict) else options_of(group)).items():
                parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
                own.setdefault(name, parameter)
        command.__signature__ = signature.replace(parameters=list(own.values()))  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in own.values()}
        return command

    return decorate


def usable_device(context: typer.Context, device: str) -> str:
    """A device that this PyTorch computes on."""
    if device not in (None, "cpu") and not context.resilient_parsing:
        import torch

        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0]
            raise PmvitError(f"--device: expected one that PyTorch can use here; got {device} ({reason})") from None
    return device


def cpu_alone(context: typer.Context, device: str) -> str:
    """The CPU, of a verb that computes nowhere else."""
    if device != "cpu":
        raise PmvitError(f"--device: expected cpu, all that {context.info_name} computes on; got {device}")
    return device


@dataclass(frozen=True)
class ModelOptions:
    """How a model that is named is made.

    Attributes:
        weights: Weights file; without it the library fetches its own.
        model_arg: More for timm.create_model, as name=value; may be repeated.
        data_arg: How images are prepared, as in mean=[0.5,0.5,0.5]; may be repeated.
        size: segmenter: side of its images and windows, in pixels.
        decoder: segmenter: its decoder.
        classes: segmenter: classes of a pixel.
    """

    weights: Path | None = None
    model_arg: tuple[str, ...] = ()
    data_arg: tuple[str, ...] = ()
    size: int | None = None
    decoder: Literal["mask", "linear"] | None = None
    classes: int | None = None


@dataclass(frozen=True)
class Reading:
    """How images are read.

    Attributes:
        batch_size: Images a batch.
        workers: Processes that read images.
        first_label: Number of the first class in plain masks; 0 if not given.
    """

    batch_size: int = 64
    workers: int = 2
    first_label: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.workers < 0:
            raise PmvitError(f"expected a batch of 1 or more and workers of 0 or more; got {self}")


DATA_HELP = "Folder of images, in one subfolder a class or alone; hf:NAME@SPLIT, hf-stream:NAME@SPLIT; or *.tar shards."
MASKS_HELP = "With a segmenter: a folder in the layout of ADE20K, Cityscapes, Pascal-Context, or images and masks."
MODEL_HELP = (
    "A timm name or hf-hub:owner/name; hf:owner/name (transformers); "
    "torchvision:name; segmenter:name; or a saved model."
)
DEVICES = value_of("cpu", "cuda", "mps")

ModelName = Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=complete_model)]
Saved = Annotated[Path, typer.Argument(help="A model saved by pmvit: a folder or a .safetensors file.")]
Data = Annotated[str, typer.Option("--data", help=f"{DATA_HELP} {MASKS_HELP}")]
MaybeData = Annotated[str | None, typer.Option("--data", help=f"{DATA_HELP} {MASKS_HELP}")]
Validation = Annotated[str | None, typer.Option("--val", help="Images to validate on; else --data/val or --data/test.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where to write.")]
ResultFolder = Annotated[Path | None, typer.Option("--output", "-o", help="A folder for JSON, Markdown and a chart.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Use so many images at most; else all.")]
SomeImages = Annotated[int, typer.Option("--limit", min=1, help="So many images at most, taken evenly from all.")]
Workers = Annotated[int, typer.Option("--workers", min=0, help="Processes that read images.")]
FirstLabel = Annotated[int | None, typer.Option(min=0, max=255, help="Number of the first class in plain masks; 0.")]
EpochImages = Annotated[int | None, typer.Option(min=1, help="Images that make an epoch, if not all; for streams.")]
Learning = Annotated[
    Literal["group", "dense"] | None,
    typer.Option("--learn", help="What tuning may change of M and R.", show_default="group"),
]
Device = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:1, mps, ...", autocompletion=DEVICES, callback=usable_device)
]
TrainingDevice = Annotated[
    str | None,
    typer.Option("--device", help="cpu; else a GPU if there is one.", autocompletion=DEVICES, callback=usable_device),
]
CpuDevice = Annotated[str, typer.Option("--device", help="cpu, and no other.", callback=cpu_alone)]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; as many as PyTorch takes if left out.")]
Rounds = Annotated[int, typer.Option(min=3, help="Turns of each.")]
Names = Annotated[Path | None, typer.Option(help="A text file with the names of the classes, one a line.")]
Teacher = Annotated[str | None, typer.Option(help="Another teacher than the model uncompressed.")]
Original = Annotated[str | None, typer.Option(help="Where the original is, a path or a name; else where it came from.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document and nothing else.", callback=keep_output_for_json)
]
