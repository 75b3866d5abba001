"""What several verbs do: make models and loaders of what the user named, measure, show what it costs."""

import atexit
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from pmvit.cli.options import ModelOptions, Reading, given, options_of
from pmvit.cli.screen import console, fail
from pmvit.config import FinetuneConfig, MergeCostConfig, PlanConfig, ScoreConfig
from pmvit.config.measuring import PAPER_SCORES
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from torch import nn

    from pmvit.config import MeasureOptions
    from pmvit.data.loaders import Broken, ImageLoader
    from pmvit.measuring import MergeCosts, Scores
    from pmvit.planning import Plan
    from pmvit.saving.card import CardDetails

app = typer.Typer()  # the verbs register here
MEASURE_OPTIONS = options_of(MergeCostConfig, but=("memory", "seed")) | options_of(ScoreConfig, but=("limit", "seed"))
PLAN_OPTIONS = options_of(PlanConfig, but=("method",))
FINETUNE_OPTIONS = options_of(FinetuneConfig, but=("cpu",))


def join_processes(device: str) -> tuple[str, bool]:
    """Connect the processes that `accelerate launch` or torchrun started; where this one computes, and if it prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return device, True
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu")
    atexit.register(state.destroy_process_group)
    console.quiet = state.process_index > 0
    return str(state.device), state.process_index == 0


def training_device(device: str | None) -> str:
    """Where training computes: on the CPU if told so, else on the GPU that accelerate takes if there is one."""
    import torch

    if device not in (None, "cpu", "cuda", "mps"):
        raise PmvitError(f"--device: expected cpu, cuda or mps to train on; got {device}: see `accelerate launch`")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def split_folders(data: str, val: str | None) -> tuple[str, str | None]:
    """Training and validation images: as named, `train` and `val` (or `test`) below one folder, or parts with masks."""
    from pmvit.data.segmentation import has_masks, has_validation

    if has_masks(data):
        return data, val or (data if has_validation(data) else None)
    if (Path(data) / "train").is_dir():
        found = [Path(data) / name for name in ("val", "validation", "test") if (Path(data) / name).is_dir()]
        return str(Path(data) / "train"), val or (str(found[0]) if found else None)
    return data, val


def meter(model: "nn.Module") -> "Callable[[Plan], float]":
    """Measures speed on random images of the model's size; nothing is measured before a plan has to be."""
    import torch

    from pmvit.hosts import host_of
    from pmvit.runtime.bench.timing import speedup_meter

    device = next(model.parameters()).device
    return speedup_meter(model, torch.randn(16, *host_of(model).input_size(), device=device))


def open_model(name: str, options: ModelOptions, device: str) -> "nn.Module":
    """Make a model of what the user named."""
    from pmvit.loading import create_model

    model = create_model(name, options.weights, **source_of(name, options)["arguments"])
    cast("Any", model).pretrained_cfg.update(pairs("--data-arg", options.data_arg))
    return model.to(device)


def source_of(name: str, options: ModelOptions) -> dict[str, Any]:
    """Where a model is from, as `record_source` takes it."""
    sizes = {"image_size": options.size, "decoder": options.decoder, "classes": options.classes}
    more = {key: value for key, value in sizes.items() if value is not None}
    if more and not name.startswith("segmenter:"):
        raise PmvitError(f"{', '.join(more)}: expected beside segmenter:NAME alone; got the model {name}")
    arguments = {**pairs("--model-arg", options.model_arg), **more}
    return {
        "source": name,
        "weights": None if options.weights is None else str(options.weights),
        "arguments": arguments,
    }


def card_details(model: "nn.Module", name: str, weights: Path | None) -> "CardDetails":
    """What a model card may say of a model that was named so: the command, and where its weights are from if known."""
    from pmvit.saving.card import CardDetails

    command = shlex.join(["pmvit", *sys.argv[1:]])
    library, colon, rest = name.partition(":")
    if weights is not None or Path(name).exists():
        return CardDetails(command=command)
    if colon:
        return CardDetails(command=command, base_model=rest if library in ("hf", "hf-hub") else None)
    known = getattr(model, "pretrained_cfg", {})
    return CardDetails(command=command, base_model=known.get("hf_hub_id"), license=known.get("license"))


def pairs(option: str, texts: tuple[str, ...] | list[str] | None) -> dict[str, Any]:
    """Options given as name=value, the values as JSON where they are."""
    parts = [text.partition("=") for text in texts or []]
    for name, equals, _ in parts:
        if not (name and equals):
            raise PmvitError(f"{option}: expected name=value, got {name!r}")
    return {name: _value(text) for name, _, text in parts}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def names_in(text: str) -> list[str]:
    """Names that were given with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def refuse(options: dict[str, Any], names: Iterable[str], why: str) -> None:
    """Raise `PmvitError` if an option was given that would be ignored."""
    if unused := [name for name in names if options.get(name) not in (None, False)]:
        raise PmvitError(f"{', '.join('--' + name.replace('_', '-') for name in unused)}: {why}")


def measure_options(options: dict[str, Any], method: str | None = None) -> "MeasureOptions":
    """Keywords of `measure` that were given, over the paper's choices if the method is its."""
    paper = PAPER_SCORES if method == "paper" else {}
    found = {**paper, **given(options, ScoreConfig), **given(options, MergeCostConfig)}
    return cast("MeasureOptions", {name: value for name, value in found.items() if name in MEASURE_OPTIONS})


def measured_on(
    data: str, config: ScoreConfig | MergeCostConfig, model: "nn.Module", output: Path, reading: Reading
) -> "Scores | MergeCosts":
    """Measure and write what comes out; say which images could not be read."""
    from pmvit.pipeline import measure_path

    try:
        found, broken = measure_path(config, model, data, output, **asdict(reading))
    except KeyboardInterrupt:
        goes_on = " goes on from the last batch" if isinstance(config, ScoreConfig) else " measures anew"
        fail(f"stopped; the same command{goes_on}", code=130)
    print_broken(broken)
    return found


def open_images(
    model: "nn.Module", data: str, reading: Reading, limit: int | None, *, strict: bool = False
) -> "ImageLoader":
    """Images to evaluate on, some of all if there is a limit: in batches, or whole with the masks that they have."""
    from pmvit.data.segmentation import has_masks
    from pmvit.hosts import host_of
    from pmvit.loading import open_loader

    how: dict[str, Any] = {**asdict(reading), "limit": limit, "shuffle": limit is not None, "strict": strict}
    if host_of(model).outputs().pixel_classes is not None:
        how |= {"labels": has_masks(data), "whole": has_masks(data), "split": "val"}
    return open_loader(model, data, **how)


def print_broken(broken: "Broken", **options: Any) -> None:
    """Say which images could not be read, if any."""
    if broken:
        console.print(broken.summary(**options), style="yellow")
