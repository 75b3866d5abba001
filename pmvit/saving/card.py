"""The model card: `README.md` beside a saved model, in the form of the Hugging Face hub."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import CardData, EvalResult, ModelCard, ModelCardData
from torch import nn

from pmvit.compression import compression_of
from pmvit.errors import PmvitError
from pmvit.files import write_text
from pmvit.hosts import host_of
from pmvit.measuring.flops import Flops
from pmvit.numbers.measures import MEASURES, REFERENCES
from pmvit.numbers.tables import format_number, markdown_table
from pmvit.planning import Plan
from pmvit.planning.adaptive import AdaptivePlan
from pmvit.planning.budget import reached_text
from pmvit.planning.drawing import sizes_text
from pmvit.saving.commands import versions
from pmvit.wrapping import Compression, Original

CARD_FILE = "README.md"
MARK = "<!-- Written by pmvit when it saves the model; without this line the text stays as it is. -->"
SHOWN = ("top1", "top5", "miou", "pixel_accuracy", "agreement")
METRICS = {
    "top1": "accuracy",
    "top5": "accuracy",
    "miou": "mean_iou",
    "pixel_accuracy": "accuracy",
}  # as the hub has them
# Of the relations that the hub knows (adapter, finetune, merge, quantized), that of a model made cheaper.
RELATION = "quantized"
NOT_MEASURED = "Accuracy: not measured."


@dataclass(frozen=True)
class CardDetails:
    """What a model card says that cannot be read off the model.

    Attributes:
        measured: Evaluations as data, by what was evaluated: original, compressed, calibrated, fine-tuned. The last one
            is that of the model.
        settings: What the model was made with, beside what its plan knows.
        command: What was typed to make it.
        base_model: The name on the hub of the model that was compressed; what it was opened from, if not given.
        license: Of that model.
        dataset: What was evaluated on, as the hub names it.
    """

    measured: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None
    base_model: str | None = None
    license: str | None = None
    dataset: str | None = None


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
    tags = ["pmvit", "token-compression", "vision-transformer"]
    tags += [what.title.lower().replace(" ", "-")] if what is not None else []
    header = ModelCardData(library_name="pmvit", tags=tags, pipeline_tag=_task(model), license="unknown")
    if compression is not None:
        base, its_license = _base_model(compression.original)
        details = replace(details, base_model=details.base_model or base, license=details.license or its_license)
    _say_more(header, details, _name(model, config))
    parts = [f"---\n{header.to_yaml()}\n---", MARK, *summary, *_accuracy(details.measured)]
    if isinstance(what, AdaptivePlan):
        rows = zip(range(what.depth), what.merges, what.tokens, strict=True)
        parts += [
            "## Tokens in each block",
            f"How many of {sizes_text(what)} patch tokens merge before each block; which ones, every image chooses.",
        ]
        parts.append(table(("block", "merge before", "tokens"), (map(str, row) for row in rows)))
    elif isinstance(what, Plan):
        counts = ((index, layer.num_tokens, *layer.counts.values()) for index, layer in sorted(what.layers.items()))
        titles = ("block", "tokens", "kept", "kept in the MLP", "merged", "pruned")
        parts += ["## Tokens in each block", table(titles, (map(str, row) for row in counts))]
    parts += _use(model)
    parts += _making(config, compression, details)
    write_text(path, "\n\n".join(parts) + "\n")


def completed(text: str, details: CardDetails) -> str:
    """A card that pmvit wrote, with what is known by now: what the model was made of, and how good it is.

    Raises:
        PmvitError: If the text is somebody else's.
    """
    if MARK not in text:
        raise PmvitError(
            f"expected a {CARD_FILE} that pmvit wrote, to complete it; this one is not, and stays as it is"
        )
    card = ModelCard(text)
    title = next((line.removeprefix("# ") for line in card.text.splitlines() if line.startswith("# ")), "model")
    _say_more(card.data, details, title.split(",")[0])
    body = card.text
    if details.measured:
        found = re.compile(rf"^{re.escape(NOT_MEASURED)}$|^## Accuracy\n\n(?:\|.*(?:\n|\Z))+", re.MULTILINE)
        section = "\n\n".join(_accuracy(details.measured))
        body = found.sub(lambda match: section + "\n" * match[0].endswith("\n"), body, count=1)
    return f"---\n{card.data.to_yaml()}\n---\n{body}"


def rows_of(evaluation: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """An evaluation of a model as data, which may hold that of its original, as `CardDetails.measured` takes it."""
    prefix = "reference_"
    original = {name.removeprefix(prefix): value for name, value in evaluation.items() if name.startswith(prefix)}
    rows: dict[str, Mapping[str, Any]] = {}
    if evaluation.get("reference") == "original":
        rows["original"] = {**original, "images": evaluation.get("images")}
    return {**rows, "this model": evaluation}


def _say_more(header: CardData, details: CardDetails, name: str) -> None:
    """Put into the part that machines read what the details say."""
    if details.base_model is not None:
        header["base_model"], header["base_model_relation"] = details.base_model, RELATION
    if details.license is not None:
        header["license"] = details.license
    row = list(details.measured.values())[-1] if details.measured else {}
    results = [
        EvalResult(
            task_type=header["pipeline_tag"],
            dataset_type=details.dataset or "unknown",
            dataset_name=details.dataset or f"{row.get('images', 'some')} images",
            metric_type=kind,
            metric_name=MEASURES[measure].full_title,
            metric_value=round(float(row[measure]), 5),
        )
        for measure, kind in METRICS.items()
        if row.get(measure) is not None
    ]
    if results:
        header["model_name"], header["eval_results"] = name, results


def _base_model(original: Original) -> tuple[str | None, str | None]:
    """The name on the hub of the model that was compressed, and its license, as far as what it was opened from says."""
    source = original.source
    if source is None or original.weights is not None or Path(source).exists():
        return None, None
    library, colon, rest = source.partition(":")
    if colon:
        return (rest.partition("@")[0] if library in ("hf", "hf-hub") else None), None
    known = timm.get_pretrained_cfg(source, allow_unregistered=True) if timm.is_model(source) else None
    return (None, None) if known is None else (known.hf_hub_id, known.license)


def _name(model: nn.Module, config: Mapping[str, Any]) -> str:
    return escaped(str(config["model"].get("architecture", type(model).__name__)))


def _task(model: nn.Module) -> str:
    host = host_of(model)
    if host.outputs().pixel_classes is not None:
        return "image-segmentation"
    return "image-feature-extraction" if host.outputs().num_classes is None else "image-classification"


def _summary(
    model: nn.Module, config: Mapping[str, Any], compression: Compression | None, costs: tuple[Flops, Flops]
) -> list[str]:
    before, after = costs
    architecture = _name(model, config)
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
        return [NOT_MEASURED]
    found = [name for name in SHOWN if any(row.get(name) is not None for row in measured.values())]
    rows = [
        (stage, *(MEASURES[name].text(row.get(name)) for name in found), str(row.get("images", "-")))
        for stage, row in measured.items()
    ]
    names = {row.get("reference") for row in measured.values() if row.get("agreement") is not None}
    reference = REFERENCES.get(names.pop() or "", "the reference") if len(names) == 1 else "the reference"
    titles = [MEASURES[name].against(reference) if name == "agreement" else MEASURES[name].title for name in found]
    return ["## Accuracy", table(("", *titles, "images"), rows)]


def _use(model: nn.Module) -> list[str]:
    host = host_of(model)
    shape = " x ".join(map(str, host.input_size()))
    said = f"It takes images of {shape}."
    with suppress(PmvitError):  # a host need not know how images are prepared
        config = host.data_config()
        said = f"It takes images of {shape}, normalised with mean {config.get('mean')} and std {config.get('std')}."
    code = "import pmvit\n\nmodel = pmvit.load('hf-hub:owner/name')  # or a folder of these files; nothing is unpickled"
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
