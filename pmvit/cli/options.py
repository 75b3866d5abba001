"""What the verbs are told: options made from the classes of `pmvit.config`, and those of the command line alone."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from dataclasses import field as option_field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from pmvit.cli.completion import complete_model, value_of
from pmvit.cli.screen import console, print_json
from pmvit.config import (
    FinetuneConfig,
    FinetuneOptions,
    MeasureOptions,
    MergeCostConfig,
    MetricConfig,
    PlanConfig,
    PlanOptions,
    SpeedConfig,
    SpeedOptions,
)
from pmvit.config.base import choices
from pmvit.config.measuring import Method, ScoreConfig
from pmvit.errors import PmvitError, first_line
from pmvit.saving.commands import running_command


def verb(function: Callable[..., Any]) -> Callable[..., None]:
    """Make a command of a function.

    A parameter that is annotated with `Fields` becomes an option a field, and gets a dictionary of those that were
    given. What the function returns is the document that `--json` prints; one that returns nothing has no such option.
    Models that it saves get a record of the command.
    """
    signature = inspect.signature(function)
    marks = {name: get_args(parameter.annotation)[1] for name, parameter in signature.parameters.items()}
    own = {name: each for name, each in signature.parameters.items() if not isinstance(marks[name], Fields)}
    groups: dict[str, dict[str, Field[Any]]] = {}
    for group, mark in marks.items():
        if isinstance(mark, Fields):
            groups[group] = {name: field for name, (field, _) in mark.options.items() if name not in own}
            for name in groups[group]:
                annotation = mark.options[name][1]
                own[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    if signature.return_annotation is not None:
        own["as_json"] = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)

    def command(as_json: bool = False, **options: Any) -> None:
        for group, known in groups.items():
            values = {name: options.pop(name) for name in known}
            options[group] = {
                known[name].name: _value(known[name], value) for name, value in values.items() if value is not None
            }
        begun_with = options.get("resume") or options.get("model")
        with running_command(after=None if begun_with is None else Path(begun_with)):
            if not as_json:
                function(**options)
                return
            with console.for_json():
                result = function(**options)
        if result is not None and not console.is_quiet:
            print_json(result)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]  # what typer reads
        parameters=list(own.values()), return_annotation=None
    )
    command.__annotations__ = {name: parameter.annotation for name, parameter in own.items()}
    return command


class Fields:
    """Marks a parameter of a verb as standing for fields of configurations.

    Args:
        configs: Classes, or values of them that are shown as defaults. Of two fields with one name, the first counts.
        but: Fields to leave out.
        only: Fields to take, if not all.
    """

    def __init__(self, *configs: Any, but: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> None:
        self.options: dict[str, tuple[Field[Any], Any]] = {}
        for config in configs:
            kind = config if isinstance(config, type) else type(config)
            texts = attribute_texts(kind)
            for field in fields(kind):
                if field.name in (only or [field.name]) and field.name not in but:
                    asked, default = (
                        _asked(field.type),
                        field.default if config is kind else getattr(config, field.name),
                    )
                    option = typer.Option(
                        "/".join(_flags(field)),
                        *filter(None, [field.metadata.get("also")]),
                        help=texts.get(field.name),
                        show_default=_shown(field, default),
                        metavar="<text>" if asked == list[str] else None,
                    )
                    self.options.setdefault(_parameter(field), (field, Annotated[asked | None, option]))


def attribute_texts(config: type) -> dict[str, str]:
    """What the docstring of a class says of each attribute, in its first sentence."""
    _, _, text = inspect.cleandoc(config.__doc__ or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text, re.MULTILINE)
    sentences = {name: re.split(r"\.(?: (?=[A-Z`])|$)", " ".join(told.split()))[0] for name, told in found}
    return {name: told.replace("`", "") + "." for name, told in sentences.items()}


def _parameter(field: Field[Any]) -> str:
    return str(field.metadata.get("option", field.name))


def _flags(field: Field[Any]) -> list[str]:
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


def _shown(field: Field[Any], default: Any) -> str | bool:
    """The default as the help shows it."""
    if default in (None, MISSING, ()):
        return False
    if isinstance(default, bool):
        return _flags(field)[not default].removeprefix("--")
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _value(field: Field[Any], value: Any) -> Any:
    """What was given for a field, as its class takes it."""
    if isinstance(value, list):
        return tuple(value) if field.type == tuple[str, ...] else whole_numbers(_flags(field)[0], value)
    return None if value == "none" and field.default is None and not choices(field.type) else value


def refuse(why: str, *given: Mapping[str, Any]) -> None:
    """Raise `PmvitError` if options were given that would be ignored; `None` stands for one that was not."""
    renamed = {field.name: _parameter(field) for field in fields(PlanConfig)}
    if unused := [name for options in given for name, value in options.items() if value is not None]:
        flags = ", ".join("--" + renamed.get(name, name).replace("_", "-") for name in unused)
        raise PmvitError(f"{flags}: {why}")


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


def names_in(text: str) -> list[str]:
    """Names that were given with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def usable_device(context: typer.Context, device: str) -> str:
    """A device that this PyTorch computes on."""
    if device not in (None, "cpu") and not context.resilient_parsing:
        import torch

        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            told = f"{device} ({first_line(error)})"
            raise PmvitError(f"--device: expected one that PyTorch can use here; got {told}") from None
    return device


@dataclass(frozen=True)
class ModelOptions:
    """How a model that is named is made.

    Attributes:
        weights: Weights file; without it the library fetches its own.
        model_arg: More for timm.create_model, as name=value; may be repeated.
        data_arg: How images are prepared, as in mean=[0.5,0.5,0.5]; may be repeated.
        img_size: Side of its images, in pixels, if not the one it was made for: position embeddings are resized.
        decoder: segmenter: its decoder.
        classes: segmenter: classes of a pixel.
    """

    weights: Path | None = None
    model_arg: tuple[str, ...] = ()
    data_arg: tuple[str, ...] = ()
    img_size: int | None = option_field(default=None, metadata={"also": "--size"})
    decoder: Literal["mask", "linear"] | None = None
    classes: int | None = None


@dataclass(frozen=True)
class ReadingOptions:
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
    "A timm name; hf-hub:owner/name (timm, or pushed by pmvit); hf:owner/name (transformers); "
    "torchvision:name; segmenter:name; or a saved model."
)
METHOD_HELP = "adaptive (the default), measured (merge costs, a fixed plan), scored (Eq. 9; that of Swin) or paper"
DEVICES = value_of("cpu", "cuda", "mps")

Measuring = Annotated[MeasureOptions, Fields(MergeCostConfig, ScoreConfig, MetricConfig, but=("memory", "seed"))]
Planning = Annotated[PlanOptions, Fields(PlanConfig)]
Budget = Annotated[PlanOptions, Fields(PlanConfig, only=("keep", "gflops", "flops_share"))]  # of a saved model
Side = Annotated[
    int | None,
    typer.Option("--img-size", min=1, help="Side of its images, in pixels, if not the one it was saved with."),
]
Speed = Annotated[SpeedOptions, Fields(SpeedConfig)]
Tuning = Annotated[FinetuneOptions, Fields(FinetuneConfig, but=("cpu",))]
Making = Annotated[dict[str, Any], Fields(ModelOptions)]
Reading = Annotated[dict[str, Any], Fields(ReadingOptions)]

ModelName = Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=complete_model)]
Saved = Annotated[
    Path, typer.Argument(help="A model saved by pmvit: a folder, a .safetensors file, or hf-hub:owner/name.")
]
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
PlanMethod = Annotated[Method | None, typer.Option("--method", help=f"{METHOD_HELP}.")]
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
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; as many as PyTorch takes if left out.")]
Rounds = Annotated[int, typer.Option(min=3, help="Turns of each.")]
Names = Annotated[Path | None, typer.Option(help="A text file with the names of the classes, one a line.")]
Teacher = Annotated[str | None, typer.Option(help="Another teacher than the model uncompressed.")]
Original = Annotated[str | None, typer.Option(help="Where the original is, a path or a name; else where it came from.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
