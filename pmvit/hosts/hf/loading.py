"""Models of Hugging Face transformers from a hub name, a folder or a description, and how their images are prepared."""

import inspect
import json
from pathlib import Path
from typing import Any

import torch

from pmvit.errors import PmvitError
from pmvit.files import check_fields
from pmvit.hosts.hf.tower import FAMILIES, Tower, find_tower
from pmvit.hosts.host import DATA_KEYS, AnyModule, find_host

RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # as Pillow numbers them
ATTENTION = ("eager", "sdpa")  # any other name may be that of a kernel on the hub
# What makes transformers or timm fetch weights or open other files while a model is built from a configuration.
FETCHING = ("auto_map", "backbone", "checkpoint_path", "pretrained_cfg", "use_pretrained_backbone", "use_timm_backbone")
FORBIDDEN_ARGUMENTS = {"trust_remote_code", "use_safetensors", "config", "state_dict"}  # they run or read other files


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise PmvitError(
            f"expected the package transformers for models of Hugging Face; it cannot be imported ({error}): "
            "pip install 'pmvit[hf]'"
        ) from None
    return transformers


def is_folder(path: Path) -> bool:
    """Whether a folder holds a model that `save_pretrained` of transformers wrote."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config and "format" not in config


def load_pretrained(name: str, arguments: dict[str, Any]) -> AnyModule:
    """Load a model, as the class its configuration names, from a folder or the hub; weights in safetensors only.

    Raises:
        PmvitError: If it cannot be found or loaded, or is not one that pmvit knows.
    """
    transformers = _transformers()
    if forbidden := FORBIDDEN_ARGUMENTS & set(arguments):
        raise PmvitError(f"expected arguments that describe the model, got {', '.join(sorted(forbidden))}")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        architecture = (config.architectures or ["none"])[0]
        model_class = _model_class(transformers, architecture)
        model, report = model_class.from_pretrained(name, use_safetensors=True, output_loading_info=True, **arguments)
    except (ImportError, OSError, ValueError, TypeError, RuntimeError, KeyError) as error:
        reason = str(error).strip().splitlines()
        raise PmvitError(
            f"transformers could not load {name!r} with {arguments or 'its defaults'} "
            f"({reason[0] if reason else error!r}): expected a folder or owner/name with weights in safetensors"
        ) from None
    if report["missing_keys"] and not arguments:
        raise PmvitError(f"{name}: the weights of {sorted(report['missing_keys'])[0]} are missing: are they complete?")
    model.pretrained_cfg = _processor_config(name, local_files_only=False)
    return model.eval()


def _model_class(transformers: Any, architecture: Any) -> Any:
    found = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise PmvitError(f"expected one of transformers' models, got {architecture!r}: is transformers too old for it?")
    return found


def describe(model: AnyModule, data: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """What `build` needs to make the same model again."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)
    takes = inspect.signature(type(model).__init__).parameters
    modules = dict(model.named_modules())
    embeddings = find_tower(model)
    traits = {
        "add_pooling_layer": modules.get("pooler") is not None,
        "use_mask_token": embeddings is not None and getattr(embeddings.embeddings, "mask_token", None) is not None,
    }
    implementation = model.config._attn_implementation
    return {
        "architecture": type(model).__name__,
        "arguments": {**{name: value for name, value in traits.items() if name in takes}, **arguments},
        "attention": implementation if implementation in ATTENTION else "sdpa",
        "config": config,
        "data": data,
    }


def build(description: dict[str, Any]) -> AnyModule:
    """Make the model that `describe` described, with any weights and without a network."""
    check_fields(
        description, ("architecture", "arguments", "attention", "config", "data"), "the description of the model"
    )
    transformers = _transformers()
    architecture, arguments, config = (description[name] for name in ("architecture", "arguments", "config"))
    model_class = _model_class(transformers, architecture)
    if not isinstance(arguments, dict) or FORBIDDEN_ARGUMENTS & set(arguments):
        raise PmvitError(f"expected arguments that describe the architecture, got {arguments!r}")
    attention = description["attention"]
    if attention not in ATTENTION:
        raise PmvitError(f"expected {' or '.join(ATTENTION)} as attention of a saved model, got {attention!r}")
    _check_self_contained(config, architecture)
    try:
        made = model_class.config_class.from_dict(config)
        model: AnyModule = model_class._from_config(
            made, attn_implementation=attention, dtype=torch.float32, **arguments
        )
    except (ImportError, TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        reason = str(error).strip().splitlines()
        raise PmvitError(
            f"transformers cannot make {architecture} with {arguments} ({reason[0] if reason else error!r})"
        ) from None
    if find_host(model) is None:
        raise PmvitError(f"expected a model with one of {', '.join(FAMILIES)}; {architecture} has none")
    model.pretrained_cfg = check_fields(description["data"], DATA_KEYS, "the model's data configuration")
    return model.eval()


def _check_self_contained(config: Any, architecture: str) -> None:
    """Raise `PmvitError` if building a model from a file's configuration would open or fetch anything else."""
    if architecture.startswith("Timm"):
        raise PmvitError(f"expected a model of transformers' own, got {architecture}, which opens files of timm")
    if isinstance(config, (list, tuple)):
        for entry in config:
            _check_self_contained(entry, architecture)
    if not isinstance(config, dict):
        return
    if named := [name for name in FETCHING if config.get(name)]:
        raise PmvitError(f"expected a configuration that names nothing to fetch, got {named[0]}={config[named[0]]!r}")
    if str(config.get("model_type", "")).startswith("timm"):
        raise PmvitError(f"expected a model of transformers' own, got one on a {config['model_type']} of timm")
    for entry in config.values():
        _check_self_contained(entry, architecture)


def input_size(model: AnyModule, tower: Tower) -> tuple[int, int, int]:
    """Channels, height and width: those of the configuration, or of the image processor if the model takes any."""
    channels = tower.projection.in_channels
    size = tower.config.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    if tower.family.any_size and (wanted := _prepared(model).get("input_size")) is not None:
        _, height, width = wanted
    return channels, int(height), int(width)


def data_config(model: AnyModule, tower: Tower) -> dict[str, Any]:
    """How images are prepared: as the model's image processor says if it is at hand, else as its family's."""
    mean, std = tower.family.statistics
    found: dict[str, Any] = {
        "interpolation": "bicubic",
        "mean": mean,
        "std": std,
        "crop_pct": 1.0,
        "crop_mode": "center",
    }
    found = {**found, **_prepared(model), "input_size": input_size(model, tower)}
    for key in ("mean", "std"):
        if len(found[key]) != tower.projection.in_channels:  # made for other channels: their mean serves for each
            found[key] = (sum(found[key]) / len(found[key]),) * tower.projection.in_channels
    return {key: list(v) if isinstance(v := found[key], tuple) else v for key in DATA_KEYS}


def _prepared(model: AnyModule) -> dict[str, Any]:
    """What is known of the image processor: left on the model when it was loaded, or lying where it came from."""
    if getattr(model, "pretrained_cfg", None) is None:
        name = getattr(model, "name_or_path", "")
        model.pretrained_cfg = _processor_config(name, local_files_only=True) if name else {}
    known: dict[str, Any] = model.pretrained_cfg
    return known


def _processor_config(name: str, local_files_only: bool) -> dict[str, Any]:
    """The configuration of the image processor at a place, in timm's words; nothing if there is none."""
    from transformers.image_processing_base import ImageProcessingMixin

    try:
        processor, _ = ImageProcessingMixin.get_image_processor_dict(name, local_files_only=local_files_only)
    except (OSError, ValueError):
        return {}
    size, crop = _size(processor.get("size")), _size(processor.get("crop_size"))
    crops = processor.get("do_center_crop", crop is not None) and crop is not None
    result: dict[str, Any] = {"crop_mode": "center" if crops else "squash", "crop_pct": 1.0}
    if (seen := crop if crops else size) is not None:
        result["input_size"] = (3, *seen)
    if crops and size is not None and crop is not None:
        result["crop_pct"] = min(1.0, crop[0] / min(size))
    if processor.get("resample") in RESAMPLING:
        result["interpolation"] = RESAMPLING[processor["resample"]]
    if not processor.get("do_normalize", True):
        result.update(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    elif "image_mean" in processor and "image_std" in processor:
        result.update(mean=tuple(processor["image_mean"]), std=tuple(processor["image_std"]))
    return result


def _size(size: Any) -> tuple[int, int] | None:
    """Height and width from any of the ways in which image processors have written a size."""
    if isinstance(size, int):
        return size, size
    if isinstance(size, dict) and "height" in size:
        return int(size["height"]), int(size["width"])
    if isinstance(size, dict) and "shortest_edge" in size:
        return int(size["shortest_edge"]), int(size["shortest_edge"])
    return None
