"""The auto classes of transformers for models that pmvit saved: `AutoModelForImageClassification.from_pretrained`."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from pmvit.errors import PmvitError
from pmvit.hosts.making import import_library
from pmvit.saving.hub import PREFIX
from pmvit.saving.models import load
from pmvit.saving.parts import FOR_TRANSFORMERS

OF_AUTO = ("_from_auto", "_from_pipeline", "name_or_path", "adapter_kwargs", "trust_remote_code")  # said by no user


def register_auto_classes() -> None:
    """Let `AutoModel.from_pretrained` and its like open what pmvit saved of transformers' models, compressed or not.

    What they give is what `pmvit.load` gives, a folder's or that of the hub. Of their options, `revision` and `dtype`
    are known; others are refused. Called again, it does nothing.
    """
    transformers = import_library("transformers", "hf")
    model_type = FOR_TRANSFORMERS["model_type"]
    own = {"model_type": model_type, "from_dict": classmethod(_from_dict)}
    config = type("PmvitConfig", (transformers.PreTrainedConfig,), own)
    transformers.AutoConfig.register(model_type, config, exist_ok=True)
    autos = vars(import_library("transformers.models.auto.modeling_auto", "hf"))
    for name, auto in ((name, auto) for name, auto in autos.items() if name.startswith("AutoModel")):
        opener = type(f"Pmvit{name}", (), {"config_class": config, "from_pretrained": partial(_open, auto)})
        auto.register(config, opener, exist_ok=True)


def _from_dict(cls: Any, _: dict[str, Any], /, return_unused_kwargs: bool = False, **options: Any) -> Any:
    """The configuration, which only says whose model it is: `load` reads the rest."""
    rest = {name: value for name, value in options.items() if name not in OF_AUTO}
    return (cls(), rest) if return_unused_kwargs else cls()


def _open(auto: Any, name: str | Path, *_: Any, config: Any, revision: str | None = None, **options: Any) -> Any:
    """The model that an auto class was asked for."""
    dtype = options.pop("dtype", options.pop("torch_dtype", None))
    unknown = [option for option, value in options.items() if option not in OF_AUTO and value not in (None, False)]
    if unknown:
        raise PmvitError(
            f"{auto.__name__} of a model that pmvit saved takes revision and dtype, and not {', '.join(unknown)}"
        )
    place = str(name) if Path(name).exists() else f"{PREFIX}{name}" + (f"@{revision}" if revision else "")
    model: Any = load(place)
    wanted = auto._model_mapping.get(type(getattr(model, "config", None)), ())
    if type(model) not in (wanted if isinstance(wanted, (list, tuple)) else (wanted,)):
        raise PmvitError(
            f"{name} holds a {type(model).__name__}, which is not what {auto.__name__} gives: open it with pmvit.load"
        )
    return model if dtype in (None, "auto") else model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
