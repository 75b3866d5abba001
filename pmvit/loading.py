"""A model from a name (timm's architectures and hub, what pmvit saved), and images prepared for a model.

Nothing is ever unpickled unchecked.
"""

import pickle
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from pmvit.compress import load, load_tensors, read_tensors
from pmvit.data.folder import FolderLoader, image_folder
from pmvit.errors import PmvitError
from pmvit.models import adapter_for


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict: safetensors, or a PyTorch checkpoint through `weights_only=True`."""
    if not path.is_file():
        raise PmvitError(f"expected a weights file at {path}; there is none")
    if path.suffix == ".safetensors":
        return read_tensors(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise PmvitError(
            f"expected plain tensors in {path}; it holds something else or is cut short, and pmvit does not unpickle "
            f"code ({str(error).splitlines()[0]}): convert it to safetensors"
        ) from None
    for key in ("state_dict_ema", "model_ema", "state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise PmvitError(f"expected a state dict of tensors in {path}; got {type(state).__name__}")
    return {name.removeprefix("module."): value for name, value in state.items()}


def create_model(name: str, weights: str | Path | None = None, **arguments: Any) -> nn.Module:
    """Make a model in evaluation mode.

    Args:
        name: A folder or file that pmvit saved, one of timm's architectures, or `hf-hub:owner/name`.
        weights: A file with the weights; without it timm fetches its pretrained ones.
        arguments: More arguments for `timm.create_model`. The number of classes is taken from the weights if not given;
            another number gives the model a new head, as in timm.

    Raises:
        PmvitError: If there is no such model, or the weights do not fit it.
    """
    if Path(name).exists():
        if weights is not None or arguments:
            raise PmvitError(f"{name} is a saved model and brings its weights and arguments; got others beside it")
        return load(name)
    tensors = read_weights(Path(weights)) if weights is not None else None
    new_head = False
    head = next((name for name in ("head.weight", "head.fc.weight") if tensors is not None and name in tensors), None)
    if tensors is not None and head is not None:
        classes = tensors[head].shape[0]
        new_head = arguments.setdefault("num_classes", classes) != classes
    if ":" not in name and not timm.is_model(name.split(".")[0]):
        close = get_close_matches(name, timm.list_models(), n=3)
        hint = f": did you mean {' or '.join(close)}?" if close else ""
        raise PmvitError(f"expected a saved model, a timm architecture or hf-hub:owner/name; got {name!r}{hint}")
    try:
        model: nn.Module = timm.create_model(name, pretrained=tensors is None, **arguments)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise PmvitError(
            f"timm could not make {name!r} with {arguments or 'its defaults'} ({reason[0] if reason else error!r}). "
            "If it was the download that failed, pass the weights as a file"
        ) from None
    if tensors is not None:
        if new_head:
            tensors = {
                **tensors,
                **{name: value for name, value in model.state_dict().items() if name.startswith("head.")},
            }
        load_tensors(model, tensors, str(weights))
    return model.eval()


def num_classes_of(model: nn.Module) -> int | None:
    """How many classes a model tells apart; `None` if it is no classifier."""
    return getattr(model, "num_classes", None) or None


def open_loader(model: nn.Module, data: str | Path, *, labels: bool = True, **options: Any) -> FolderLoader:
    """Make a loader of images, prepared for the model: `image_folder` with what the model knows.

    Args:
        model: Whose size, mean and classes count.
        data: What `open_source` knows.
        labels: Whether labels will be used, so that the classes have to be those of the model.
        options: More for `image_folder`.
    """
    num_classes = num_classes_of(model) if labels else None
    return image_folder(data, adapter_for(model).data_config(model), num_classes=num_classes, **options)
