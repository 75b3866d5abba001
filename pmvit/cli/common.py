"""What several verbs do: make models and loaders of what the user named, measure, show what it costs."""

import ast
import atexit
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pmvit.cli.options import ReadingOptions, refuse
from pmvit.cli.screen import console, fail
from pmvit.config import ScoreConfig
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from torch import nn

    from pmvit.data.loaders import Broken, ImageLoader
    from pmvit.measuring import MeasureConfig, Measured


def join_processes(device: str) -> tuple[str, bool]:
    """Connect the processes that `accelerate-launch` or torchrun started; where this one computes, and if it prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return device, True
    from accelerate import PartialState

    from pmvit._system import meet_processes

    state = PartialState(cpu=device == "cpu")
    meet_processes(lambda: "launch the same command again, `finetune` with --resume: it goes on where it was")
    atexit.register(state.destroy_process_group)
    console.is_quiet = state.process_index > 0
    return str(state.device), state.process_index == 0


def open_model(name: str, making: dict[str, Any], device: str = "cpu", *, is_teacher: bool = False) -> "nn.Module":
    """Make a model of what the user named, with the `ModelOptions` that were given; pmvit need not know a teacher."""
    from pmvit.data.opening import prepare_as
    from pmvit.loading import create_model

    arguments = source_of(name, making)["arguments"]
    model = create_model(name, making.get("weights"), needs_host=not is_teacher, **arguments)
    prepare_as(model, pairs("--data-arg", making.get("data_arg")))
    return model.to(device)


def source_of(name: str, making: dict[str, Any]) -> dict[str, Any]:
    """Where a model is from, as `record_source` takes it."""
    more: dict[str, Any] = {option: making[option] for option in ("decoder", "classes") if option in making}
    if more and not name.startswith("segmenter:"):
        raise PmvitError(f"{', '.join(more)}: expected beside segmenter:NAME alone; got the model {name}")
    side = making.get("img_size", making.get("size"))  # as runs that were started before have it
    if side is not None:
        more["img_size" if name.partition(":")[0] in (name, "hf-hub") else "image_size"] = side
    weights = making.get("weights")
    return {
        "source": name,
        "weights": None if weights is None else str(weights),
        "arguments": {**pairs("--model-arg", making.get("model_arg")), **more},
    }


def pairs(option: str, texts: tuple[str, ...] | list[str] | None) -> dict[str, Any]:
    """Options given as name=value, the values as JSON or as Python writes them where they are either, else as text."""
    result = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise PmvitError(f"{option}: expected name=value, got {name!r}")
        result[name] = value
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError):
                result[name] = read(value)
                break
    return result


def measured_on(
    data: str | None, config: "MeasureConfig", model: "nn.Module", output: Path, reading: dict[str, Any]
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


def refuse_reading(reading: dict[str, Any], val: str | None) -> None:
    """Refuse options of files where images are generated, unless others are read from `val`."""
    of_files = {name: reading.get(name) for name in ("workers", "first_label")}
    refuse("no files are read without --data", {} if val else of_files)


def source_text(found: "Measured") -> str:
    """What something was measured on; of generated images, also that others are better."""
    from pmvit.data.generated import GeneratedImages

    text = f"measured on {found.images} images: {found.data}"
    return f"{text}. Images of your own keep more (--data)" if found.data.startswith(GeneratedImages.name) else text


def open_images(
    model: "nn.Module", data: str, reading: dict[str, Any], limit: int | None, *, strict: bool = False
) -> "ImageLoader":
    """Images to evaluate on, some of all if there is a limit: in batches, or whole with the masks that they have."""
    from pmvit.data.opening import evaluation_loader

    how = {**asdict(ReadingOptions(**reading)), "limit": limit, "shuffle": limit is not None, "strict": strict}
    return cast("ImageLoader", evaluation_loader(model, data, **how))


def split_folders(data: str, val: str | None) -> tuple[str, str | None]:
    """Training and validation images: as named, `train` and `val` (or `test`) below one folder, or parts with masks."""
    from pmvit.data.segmentation import has_masks, has_validation

    if has_masks(data):
        return data, val or (data if has_validation(data) else None)
    if (Path(data) / "train").is_dir():
        found = [Path(data) / name for name in ("val", "validation", "test") if (Path(data) / name).is_dir()]
        return str(Path(data) / "train"), val or (str(found[0]) if found else None)
    return data, val


def judged_on(data: str | None, val: str | None, max_drop: float | None) -> tuple[str | None, str | None]:
    """Images to measure on, and those to judge by what plans lose, which a budget in `max_drop` needs alone."""
    if max_drop is None:
        refuse("expected with --max-drop alone, to judge plans by", {"val": val})
        return data, None
    if data is not None:
        data, val = split_folders(data, val)
    if val is None:
        raise PmvitError("--max-drop: expected --val, images to judge by; or folders train and val below --data")
    return data, val


def warn_of(broken: "Broken", **options: Any) -> None:
    """Say which images could not be read, if any."""
    if broken:
        console.warn(broken.summary(**options))
