"""The model card: `README.md` beside a saved model, in the form of the Hugging Face hub."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from pmvit.compression import compression_of
from pmvit.errors import PmvitError
from pmvit.files import write_text
from pmvit.hosts import host_of
from pmvit.measuring.flops import Flops
from pmvit.numbers.measures import MEASURES
from pmvit.numbers.tables import format_number, markdown_table
from pmvit.planning import Plan
from pmvit.planning.adaptive import AdaptivePlan
from pmvit.planning.budget import reached_text
from pmvit.saving.commands import versions
from pmvit.wrapping import Compression, Recipe

CARD_FILE = "README.md"
MARK = "<!-- Written by pmvit when it saves the model; without this line the text stays as it is. -->"
SHOWN = ("top1", "top5", "miou", "pixel_accuracy", "agreement")


@dataclass(frozen=True)
class CardDetails:
    """What a model card says that cannot be read off the model.

    Attributes:
        measured: Evaluations as data, by what was evaluated: original, compressed, calibrated, fine-tuned.
        settings: What the model was made with, beside what its plan knows.
        command: What was typed to make it.
        base_model: The name on the hub of the model that was compressed.
        license: Of that model.
    """

    measured: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None
    base_model: str | None = None
    license: str | None = None


def write_card(
    folder: Path, model: nn.Module, config: Mapping[str, Any], costs: tuple[Flops, Flops], details: CardDetails
) -> None:
    """Write the card of a model, whose `config.json` says `config`, unless there is a text of somebody else's."""
    path = folder / CARD_FILE
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    compression = compression_of(model)
    what = compression.what if compression is not None else None
    summary = _summary(model, config, compression, costs)
    parts = [_header(model, what, details), MARK, *summary, *_accuracy(details.measured)]
    if isinstance(what, AdaptivePlan):
        rows = zip(range(what.depth), what.merges, what.tokens, strict=True)
        parts += [
            "## Tokens in each block",
            "How many tokens merge before each block; which ones, every image chooses.",
        ]
        parts.append(table(("block", "merge before", "tokens"), (map(str, row) for row in rows)))
    elif isinstance(what, Plan):
        counts = ((index, layer.num_tokens, *layer.counts.values()) for index, layer in sorted(what.layers.items()))
        titles = ("block", "tokens", "kept", "kept in the MLP", "merged", "pruned")
        parts += ["## Tokens in each block", table(titles, (map(str, row) for row in counts))]
    parts += _use(model)
    parts += _making(config, compression, details)
    write_text(path, "\n\n".join(parts) + "\n")


def _header(model: nn.Module, what: Recipe | None, details: CardDetails) -> str:
    """The part that machines read; text in quotes is the same in JSON and in YAML."""
    tags = ["pmvit", "token-compression", "vision-transformer"]
    if what is not None:
        tags.append(what.title.lower().replace(" ", "-"))
    lines = ["---", "library_name: pmvit", f"tags: {json.dumps(tags)}", f"pipeline_tag: {_task(model)}"]
    if details.base_model is not None:
        lines.append(f"base_model: {json.dumps(details.base_model)}")
    lines.append(f"license: {json.dumps(details.license or 'unknown')}")
    return "\n".join([*lines, "---"])


def _task(model: nn.Module) -> str:
    host = host_of(model)
    if host.outputs().pixel_classes is not None:
        return "image-segmentation"
    return "image-feature-extraction" if host.outputs().num_classes is None else "image-classification"


def _summary(
    model: nn.Module, config: Mapping[str, Any], compression: Compression | None, costs: tuple[Flops, Flops]
) -> list[str]:
    before, after = costs
    architecture = escaped(str(config["model"].get("architecture", type(model).__name__)))
    if compression is None:
        cost = f"{format_number(before.gflops, '.3f')} GFLOPs (multiply-accumulates) an image"
        return [f"# {architecture}", f"A model saved by pmvit, not compressed: {cost}."]
    rows = [
        ("GFLOPs (multiply-accumulates)", *(format_number(cost.gflops, ".3f") for cost in costs)),
        ("parameters", *(f"{format_number(cost.parameters / 1e6, '.3f')} M" for cost in costs)),
    ]
    ratio = format_number(before.macs / after.macs, ".2f")
    what = compression.what
    said = f"Tokens compressed by {escaped(what.title)}: {ratio}x fewer multiply-accumulates an image."
    reached = reached_text(what.made_by) if isinstance(what, Plan | AdaptivePlan) else None
    return [
        f"# {architecture}, {' and '.join(('compressed', *compression.tuned))}",
        said if reached is None else f"{said} Measured when it was made: {escaped(reached)}.",
        table(("", "original", "compressed"), rows),
    ]


def _accuracy(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not measured:
        return ["Accuracy: not measured."]
    found = [name for name in SHOWN if any(row.get(name) is not None for row in measured.values())]
    rows = [
        (stage, *(MEASURES[name].text(row.get(name)) for name in found), str(row.get("images", "-")))
        for stage, row in measured.items()
    ]
    titles = ["agreement with the original" if name == "agreement" else MEASURES[name].title for name in found]
    return ["## Accuracy", table(("", *titles, "images"), rows)]


def _use(model: nn.Module) -> list[str]:
    host = host_of(model)
    shape = " x ".join(map(str, host.input_size()))
    said = f"It takes images of {shape}."
    with suppress(PmvitError):  # a host need not know how images are prepared
        config = host.data_config()
        said = f"It takes images of {shape}, normalised with mean {config.get('mean')} and std {config.get('std')}."
    code = "import pmvit\n\nmodel = pmvit.load('folder')  # of these files, downloaded; no network, nothing unpickled"
    return ["## Use", fenced(code, "python"), escaped(said)]


def _making(config: Mapping[str, Any], compression: Compression | None, details: CardDetails) -> list[str]:
    settings: dict[str, Any] = {}
    if compression is not None and isinstance(compression.what, Plan):
        settings = {"learn": compression.learn, **compression.what.made_by}
    elif compression is not None and isinstance(compression.what, AdaptivePlan):
        settings = dict(compression.what.made_by)
    elif compression is not None:
        settings = {compression.what.kind: json.loads(compression.what.to_json())}
    settings |= details.settings
    parts = ["## How it was made"]
    if details.command is not None:
        parts.append(fenced(details.command, "sh"))
    if settings:
        parts.append(fenced(json.dumps(settings, indent=1, default=str), "json"))
    used = {**versions(), "pmvit": config["pmvit"]}
    parts.append(f"Made with {', '.join(f'{name} {number}' for name, number in used.items())}.")
    return [*parts, f"SHA-256 of the tensors: `{config['sha256']['model.safetensors']}`"]


def table(titles: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown; what stands in it is taken as text."""
    return markdown_table([escaped(title) for title in titles], ([escaped(cell) for cell in row] for row in rows))


def escaped(text: str) -> str:
    """Text that Markdown and HTML show as it is, on one line."""
    one_line = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", one_line.replace("&", "&amp;"))


def fenced(text: str, language: str) -> str:
    """Text as a block of code, whatever it holds."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
