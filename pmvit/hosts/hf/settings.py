"""Which of transformers' models are made from what a file says, and which of their settings: nothing else reaches it.

transformers builds any of its classes from any configuration, and some fetch weights, load kernels or open other files
while they are built. These do not.
"""

import textwrap
from dataclasses import fields
from importlib import import_module
from typing import Any

from pmvit.errors import PmvitError
from pmvit.hosts.making import import_library

ATTENTION = ("eager", "sdpa")  # any other name may be that of a kernel on the hub
MODEL_TYPES = frozenset(
    (
        *("vit", "vit_msn", "vit_mae", "ijepa", "deit", "beit", "data2vec-vision"),
        *("dinov2", "dinov2_with_registers", "dinov3_vit", "pixio", "yolos", "eomt", "eomt_dinov3"),
        *("clip", "clip_vision_model", "metaclip_2", "metaclip_2_vision_model", "siglip", "siglip_vision_model"),
        *("swin", "swinv2"),
        *("sam", "sam_vision_model", "sam_hq", "sam_hq_vision_model", "vitdet"),
        *("videomae", "vjepa2", "audio-spectrogram-transformer"),
        *("dpt", "depth_anything", "prompt_depth_anything", "zoedepth", "upernet", "mask2former"),
        *("llava", "llava_next", "llava_onevision", "paligemma", "gemma3", "internvl", "idefics3", "smolvlm"),
        *("internvl_vision", "idefics3_vision", "smolvlm_vision"),
        *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),  # what reads the images' tokens
    )
)
UNDECLARED = ("num_labels", "vision_use_head")  # settings that classes read and do not say they have


def config_class(model_type: Any) -> Any:
    """The class of transformers' configurations of a type; `PmvitError` if pmvit makes no model of it."""
    import_library("transformers", "hf")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise PmvitError(f"expected a model of transformers of one of the types {known}; got {model_type!r}")
    return import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING[model_type]


def model_class(model_type: Any, architecture: Any) -> Any:
    """One of transformers' models of a type, by the name of its class."""
    made_of = config_class(model_type)
    module = import_module(made_of.__module__.replace(".configuration_", ".modeling_"))
    found = getattr(module, architecture, None) if isinstance(architecture, str) else None
    if not isinstance(found, type) or getattr(found, "config_class", None) is not made_of:
        raise PmvitError(
            f"expected one of transformers' models, got {architecture!r} of type {model_type}: is transformers too old "
            "for it?"
        )
    return found


def own_settings(settings: Any, made_of: Any = None) -> dict[str, Any]:
    """Of a configuration, and of those inside it, what its class says there is; the rest is left out.

    Args:
        settings: The configuration as JSON data.
        made_of: Its class, if that is known; else its `model_type` says it.

    Raises:
        PmvitError: If one is of a type that pmvit does not make.
    """
    if not isinstance(settings, dict):
        raise PmvitError(f"expected an object as configuration of a model, got {settings!r}")
    made_of = made_of or config_class(settings.get("model_type"))
    known = {*UNDECLARED, *(field.name for field in fields(made_of)), *made_of().to_dict()} - {"_name_or_path"}
    own = {name: value for name, value in settings.items() if name in known}
    for name, inner in made_of.sub_configs.items():
        if own.get(name) is not None:
            own[name] = own_settings(own[name], inner if hasattr(inner, "model_type") else None)
    return own


def check_settings(settings: Any) -> None:
    """Raise `PmvitError` if a configuration holds more than `own_settings`."""
    own = own_settings(settings)
    for name, value in settings.items():
        if name not in own or own[name] != value:
            told = textwrap.shorten(f"{name}={value!r}", 100)
            raise PmvitError(
                f"expected the settings of a {settings['model_type']}, got {told}: nothing else is handed to "
                "transformers. Was it saved with another version of it?"
            )
