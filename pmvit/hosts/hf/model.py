"""What the hosts of all of transformers' models have in common: what these put out, and how they are made.

transformers is imported only where a model has to be made: whoever has one of its models has imported it.
"""

import inspect
import json
from contextlib import nullcontext
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pmvit.errors import PmvitError
from pmvit.hosts.hf.hooks import in_order, outside_inference_mode
from pmvit.hosts.hf.settings import ATTENTION, check_settings, model_class, own_settings
from pmvit.hosts.hf.tower import (
    CLASSIFIERS,
    PIXEL_CLASSIFIERS,
    WITH_LOGITS,
    Family,
    Tower,
    find_tower,
    is_of_transformers,
)
from pmvit.hosts.host import AnyModule, Outputs, find_host, for_one_size
from pmvit.hosts.making import (
    MadeModel,
    at_most,
    check_known,
    check_numbers,
    fetching,
    folder_config,
    import_library,
    one_line,
    sides_of,
)

RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # as Pillow numbers them
FORBIDDEN_ARGUMENTS = {"trust_remote_code", "use_safetensors", "config", "state_dict"}  # they run or read other files

MOST_PARAMETERS = 100_000  # tensors; the largest models have some thousands


class HuggingFaceModel(MadeModel):
    """A model of transformers with a vision transformer of some families somewhere in it."""

    library = "transformers"
    described: tuple[str, ...] = ("architecture", "arguments", "attention", "config", "data")
    accepted = frozenset(("add_pooling_layer", "use_mask_token"))
    head = "classifier"
    families: dict[str, Family]

    @classmethod
    def matches(cls, model: AnyModule) -> bool:
        return is_of_transformers(model) and find_tower(model, cls.families) is not None

    @cached_property
    def tower(self) -> Tower:
        """The vision transformer in the model; `PmvitError` if there is none of this family."""
        found = find_tower(self.model, self.families)
        if found is None:
            raise PmvitError(f"expected a model with a {self.family}; {type(self.model).__name__} has none")
        return found

    def call(self, images: Tensor) -> Any:
        asked = {"interpolate_pos_encoding": True} if self._has_to_interpolate(images) else {}
        with outside_inference_mode():
            if hasattr(self.model, "get_image_features"):
                return self.model.get_image_features(pixel_values=images, **asked)
            return self.model(images, **in_order(self.tower, images), **asked)

    def outputs(self) -> Outputs:
        name, config = type(self.model).__name__, self.model.config
        labels_pixels = any(ending in name for ending in PIXEL_CLASSIFIERS)
        return Outputs(
            gives_logits=any(ending in name for ending in WITH_LOGITS),
            num_classes=int(config.num_labels) if any(ending in name for ending in CLASSIFIERS) else None,
            pixel_classes=max(int(config.num_labels), 2) if labels_pixels else None,  # one logit tells two apart
            returns_tensor=False,
        )

    def input_size(self) -> tuple[int, ...]:
        """Channels, height and width: those of the configuration, or of the image processor if the model takes any."""
        height, width = self._own_size()
        if self.takes_any_size and (wanted := self._processor().get("input_size")) is not None:
            _, height, width = wanted
        return self.tower.projection.in_channels, int(height), int(width)

    @cached_property
    def takes_any_size(self) -> bool:
        """Whether the position embedding is resized to the image: always, or where the model is asked for it."""
        called = getattr(self.model, "get_image_features", self.model.forward)
        return self.tower.family.any_size or "interpolate_pos_encoding" in inspect.signature(called).parameters

    def set_size(self, height: int, width: int) -> None:
        """As `Resizable` has it."""
        if not self.takes_any_size:
            raise for_one_size(self.model)
        self._processor()["input_size"] = (self.tower.projection.in_channels, height, width)

    def _own_size(self) -> tuple[int, int]:
        """Height and width of the images that the position embedding is for."""
        size = self.tower.host.config.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return int(height), int(width)

    def _has_to_interpolate(self, images: Tensor) -> bool:
        """Whether a model has to be asked to resize its position embedding."""
        if self.tower.family.any_size or not self.takes_any_size:
            return False
        return tuple(images.shape[-2:]) != self._own_size()

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.checked(self.settings(arguments or {}))

    def settings(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The description, before it is seen that the model can be made of it."""
        model = self.model
        config = own_settings(json.loads(model.config.to_json_string(use_diff=False)))
        takes = inspect.signature(type(model).__init__).parameters
        traits = {
            "add_pooling_layer": getattr(model, "pooler", None) is not None,
            "use_mask_token": getattr(self.tower.embeddings, "mask_token", None) is not None,
        }
        implementation = model.config._attn_implementation
        return {
            "architecture": type(model).__name__,
            "arguments": {**{name: value for name, value in traits.items() if name in takes}, **arguments},
            "attention": implementation if implementation in ATTENTION else "sdpa",
            "config": config,
            "data": self.data_config(),
        }

    @classmethod
    def make(cls, description: dict[str, Any]) -> AnyModule:
        architecture, attention, config = (description[name] for name in ("architecture", "attention", "config"))
        if attention not in ATTENTION:
            raise PmvitError(f"expected {' or '.join(ATTENTION)} as attention of a saved model, got {attention!r}")
        check_numbers(config, "the model's configuration")
        check_settings(config)
        made_by = model_class(config["model_type"], architecture)
        options = {**description["arguments"], "attn_implementation": attention, "dtype": torch.float32}
        with import_module("transformers.initialization").no_init_weights():  # it gets others
            model: AnyModule = made_by._from_config(made_by.config_class.from_dict(config), **options)
        model.tie_weights()
        return model

    def preparation(self) -> dict[str, Any]:
        """As the model's image processor says if it is at hand, else as its family's."""
        mean, std = self.tower.family.statistics
        usual = {"interpolation": "bicubic", "mean": mean, "std": std, "crop_pct": 1.0, "crop_mode": "center"}
        return {**usual, **self._processor()}

    def _processor(self) -> dict[str, Any]:
        """What is known of the image processor: left on the model when it was loaded, or lying where it came from."""
        if getattr(self.model, "pretrained_cfg", None) is None:
            name = getattr(self.model, "name_or_path", "")
            self.remember(_processor_config(name, local_files_only=True) if name else {})
        known: dict[str, Any] = self.model.pretrained_cfg
        return known

    def remember(self, processor: dict[str, Any]) -> None:
        """Leave what is known of the image processor on the model; its size, where the model takes any unasked."""
        skipped = () if self.tower.family.any_size else ("input_size",)
        self.model.pretrained_cfg = {name: value for name, value in processor.items() if name not in skipped}


def is_folder(path: Path) -> bool:
    """Whether a folder holds a model that `save_pretrained` of transformers wrote."""
    config = folder_config(path)
    return "model_type" in config and "format" not in config


def load_pretrained(name: str, arguments: dict[str, Any], needs_host: bool = True) -> AnyModule:
    """Load a model, as the class its configuration names, from a folder or the hub; weights in safetensors only.

    If it needs a host, that is looked for before weights are fetched.

    Raises:
        PmvitError: If it cannot be found or loaded, or is not one that pmvit knows.
    """
    transformers = import_library("transformers", "hf")
    if forbidden := FORBIDDEN_ARGUMENTS & set(arguments):
        raise PmvitError(f"expected arguments that describe the model, got {', '.join(sorted(forbidden))}")
    side = arguments.get("image_size")
    arguments = {key: value for key, value in arguments.items() if key != "image_size"}
    if (Path(name) / "adapter_config.json").exists():  # it names another model, which would be fetched
        raise PmvitError(f"expected a model in {name}, got an adapter for one: merge it into its model, and save that")
    is_here, instead = Path(name).is_dir(), "pass a folder with a model that `save_pretrained` wrote"
    with (
        one_line(
            f"transformers could not load {name!r} with {arguments or 'its defaults'}",
            ": expected a folder or owner/name with weights in safetensors",
        ),
        nullcontext() if is_here else fetching(name, instead),
    ):
        written, _ = transformers.PreTrainedConfig.get_config_dict(name)
        if "format" in written:
            raise PmvitError(f"{name} holds a model that pmvit saved: open it as hf-hub:{name}")
        made_by = model_class(written.get("model_type"), next(iter(written.get("architectures") or ()), None))
        settings = own_settings(written)
        check_numbers(settings, name)
        config, others = made_by.config_class.from_dict(settings, return_unused_kwargs=True, **arguments)
        with at_most(MOST_PARAMETERS, name):
            if needs_host and not is_here:
                check_known(partial(made_by._from_config, config))
            model, report = made_by.from_pretrained(
                name, config=config, use_safetensors=True, output_loading_info=True, **others
            )
        model.pretrained_cfg = _processor_config(name, local_files_only=False)
    host = find_host(model)
    if isinstance(host, HuggingFaceModel):
        host.remember(model.pretrained_cfg)
    if report["missing_keys"] and not arguments:
        raise PmvitError(f"{name}: the weights of {sorted(report['missing_keys'])[0]} are missing: are they complete?")
    if side is not None and isinstance(host, HuggingFaceModel):
        host.set_size(*sides_of(side))
    return model.eval()


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
    if not isinstance(size, dict):
        size = {"shortest_edge": size} if isinstance(size, int) else {}
    edge = size.get("shortest_edge")
    height, width = size.get("height", edge), size.get("width", edge)
    return None if height is None or width is None else (int(height), int(width))
