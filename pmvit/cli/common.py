"""What several verbs do: make models and loaders of what the user named, measure, show what it costs."""

import atexit
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pmvit.cli.options import ReadingOptions
from pmvit.cli.screen import console, fail
from pmvit.config import ScoreConfig
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from pmvit.data.loaders import Broken, ImageLoader
    from pmvit.measuring import MeasureConfig, Measured
    from pmvit.planning import AnyPlan


def join_processes(device: str) -> tuple[str, bool]:
    """Connect the processes that `accelerate launch` or torchrun started; where this one computes, and if it prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return device, True
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu")
    atexit.register(state.destroy_process_group)
    console.is_quiet = state.process_index > 0
    return str(state.device), state.process_index == 0


def meter(model: "nn.Module") -> "Callable[[AnyPlan], float]":
    """Measures speed on random images of the model's size; nothing is measured before a plan has to be."""
    import torch

    from pmvit.hosts import host_of
    from pmvit.runtime.bench.timing import speedup_meter

    device = next(model.parameters()).device
    return speedup_meter(model, torch.randn(16, *host_of(model).input_size(), device=device))


def open_model(name: str, making: dict[str, Any], device: str = "cpu") -> "nn.Module":
    """Make a model of what the user named, with the `ModelOptions` that were given."""
    from pmvit.loading import create_model

    model = create_model(name, making.get("weights"), **source_of(name, making)["arguments"])
    cast("Any", model).pretrained_cfg.update(pairs("--data-arg", making.get("data_arg")))
    return model.to(device)


def source_of(name: str, making: dict[str, Any]) -> dict[str, Any]:
    """Where a model is from, as `record_source` takes it."""
    names = {"size": "image_size", "decoder": "decoder", "classes": "classes"}
    more = {names[option]: value for option, value in making.items() if option in names}
    if more and not name.startswith("segmenter:"):
        raise PmvitError(f"{', '.join(more)}: expected beside segmenter:NAME alone; got the model {name}")
    weights = making.get("weights")
    return {
        "source": name,
        "weights": None if weights is None else str(weights),
        "arguments": {**pairs("--model-arg", making.get("model_arg")), **more},
    }


def pairs(option: str, texts: tuple[str, ...] | list[str] | None) -> dict[str, Any]:
    """Options given as name=value, the values as JSON where they are."""
    result = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise PmvitError(f"{option}: expected name=value, got {name!r}")
        try:
            result[name] = json.loads(value)
        except json.JSONDecodeError:
            result[name] = value
    return result


def measured_on(
    data: str, config: "MeasureConfig", model: "nn.Module", output: Path, reading: dict[str, Any]
) -> "Measured":
    """Measure and write what comes out; say which images could not be read."""
    from pmvit.pipeline import measure_path

    try:
        found, broken = measure_path(config, model, data, output, **asdict(ReadingOptions(**reading)))
    except KeyboardInterrupt:
        goes_on = " goes on from the last batch" if isinstance(config, ScoreConfig) else " measures anew"
        fail(f"stopped; the same command{goes_on}", code=130)
    warn_of(broken)
    return found


def open_images(
    model: "nn.Module", data: str, reading: dict[str, Any], limit: int | None, *, strict: bool = False
) -> "ImageLoader":
    """Images to evaluate on, some of all if there is a limit: in batches, or whole with the masks that they have."""
    from pmvit.data.segmentation import has_masks
    from pmvit.evaluation.segmentation import labels_pixels
    from pmvit.loading import open_loader

    how = {**asdict(ReadingOptions(**reading)), "limit": limit, "shuffle": limit is not None, "strict": strict}
    return open_loader(model, data, labels=not labels_pixels(model) or has_masks(data), whole=True, split="val", **how)


def warn_of(broken: "Broken", **options: Any) -> None:
    """Say which images could not be read, if any."""
    if broken:
        console.warn(broken.summary(**options))
