"""A model from a name (timm, Hugging Face, torchvision, Segmenter, what pmvit saved), or the original of a compressed
one; images prepared for a model.

Nothing is ever unpickled unchecked.
"""

import copy
import pickle
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import timm
import torch
from torch import Tensor, nn

from pmvit.compression import Original, compression_of, decompress
from pmvit.data.batches import EveryNth
from pmvit.data.demo import DEMO, demo_model
from pmvit.data.loaders import ImageLoader, create_loader
from pmvit.data.segmentation import Split, has_masks, open_pairs
from pmvit.data.sources import Source, Stream, open_source
from pmvit.errors import PmvitError
from pmvit.hosts import TimmFeatures, find_host, host_of, smp
from pmvit.hosts.hf import model as hf
from pmvit.hosts.making import FORBIDDEN_ARGUMENTS, one_line
from pmvit.hosts.segmenter import checkpoint as segmenter_checkpoint
from pmvit.hosts.segmenter.model import create_segmenter
from pmvit.hosts.timm.vit import select_weights
from pmvit.saving.models import load, load_tensors
from pmvit.tensors import read_tensors
from pmvit.wrapping import fingerprint

Tensors = dict[str, Tensor]
OR_THE_DOWNLOAD = ". If it was the download that failed, pass the weights as a file"
HERE = ("torchvision", "segmenter")  # what makes an architecture of its name without asking a hub


def read_weights(path: Path) -> Tensors:
    """Read a state dict: safetensors, or a PyTorch checkpoint through `weights_only=True`."""
    if not path.is_file():
        raise PmvitError(f"expected a weights file at {path}; there is none")
    if path.suffix == ".safetensors":
        return read_tensors(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        raise PmvitError(
            f"expected plain tensors in {path}; it holds something else or is cut short, and pmvit does not unpickle "
            "code: convert it to safetensors"
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
        name: A folder or file that pmvit saved; one of timm's architectures, or `hf-hub:owner/name` for its hub;
            `hf:owner/name`, or a folder, for Hugging Face transformers; `torchvision:name`; `segmenter:name` for a
            Segmenter on one of timm's vision transformers; or a folder that a DPT of segmentation_models_pytorch was
            saved in.
        weights: A file with the weights; without it the library fetches its pretrained ones.
        arguments: More for `timm.create_model`, `from_pretrained`, torchvision's model or `create_segmenter`. With
            timm the number of classes is taken from the weights if not given; another number gives the model a new
            head.

    Raises:
        PmvitError: If there is no such model, or the weights do not fit it.
    """
    library, _, rest = name.partition(":")
    if library == "hf" or hf.is_folder(Path(name)):
        if weights is not None:
            raise PmvitError(f"{name} brings its weights; got {weights} beside it: leave them out")
        model: nn.Module = hf.load_pretrained(rest if library == "hf" else name, arguments)
        return model
    if Path(name).exists():
        if weights is not None or arguments:
            raise PmvitError(f"{name} is a saved model and brings its weights and arguments; got others beside it")
        if not smp.is_folder(Path(name)):
            return load(name)
        model = smp.from_folder(Path(name))
        load_tensors(model, read_weights(Path(name) / "model.safetensors"), name)
        return model
    tensors = read_weights(Path(weights)) if weights is not None else None
    if library == "torchvision":
        return _torchvision_model(rest, tensors, str(weights), arguments)
    if library == "segmenter":
        return _segmenter(rest, tensors, str(weights), arguments)
    return _timm_model(name, tensors, str(weights), arguments)


def _no_such_model(name: str) -> str:
    """What was perhaps meant by the name of an architecture that timm does not have, to end an error with."""
    close = get_close_matches(name, timm.list_models(), n=3)
    return f"got {name!r}" + (f": did you mean {' or '.join(close)}?" if close else "")


def _timm_model(name: str, tensors: Tensors | None, where: str, arguments: dict[str, Any]) -> nn.Module:
    """One of timm's models, with its pretrained weights or with those that are given."""
    if ":" not in name and not timm.is_model(name.split(".")[0]):
        raise PmvitError(
            f"expected a saved model, a timm architecture, hf-hub:owner/name (timm), hf:owner/name (transformers), "
            f"torchvision:name or segmenter:name; {_no_such_model(name)}"
        )
    heads = [key for key in ("head.weight", "head.fc.weight") if tensors is not None and key in tensors]
    classes = tensors[heads[0]].shape[0] if tensors is not None and heads else None
    if classes is not None:
        arguments = {"num_classes": classes, **arguments}
    with one_line(f"timm could not make {name!r} with {arguments or 'its defaults'}", OR_THE_DOWNLOAD):
        model: nn.Module = timm.create_model(name, pretrained=tensors is None, **arguments)
    if tensors is None:
        return model.eval()
    if isinstance(find_host(model), TimmFeatures):
        tensors = select_weights(model, tensors)
    elif classes is not None and arguments["num_classes"] != classes:
        head = {key: value for key, value in model.state_dict().items() if key.startswith("head.")}
        tensors = {**tensors, **head}
    load_tensors(model, tensors, where)
    return model.eval()


def _torchvision_model(name: str, tensors: Tensors | None, where: str, arguments: dict[str, Any]) -> nn.Module:
    """One of torchvision's vision transformers or Swins, with its default weights or with those that are given."""
    from torchvision.models import get_model, get_model_weights, list_models

    names = [*list_models(include="vit_*"), *list_models(include="swin_*")]
    if name not in names:
        raise PmvitError(f"expected one of torchvision's {', '.join(names)}; got {name!r}")
    with one_line(f"torchvision could not make {name!r} with {arguments or 'its defaults'}", OR_THE_DOWNLOAD):
        model: nn.Module = get_model(name, weights=None, **arguments)
        if tensors is None:
            weights: Any = get_model_weights(name).DEFAULT
            model.load_state_dict(weights.get_state_dict(progress=True, check_hash=True, weights_only=True))
    cast("Any", model).pretrained_cfg = {}  # where --data-arg leaves what differs from torchvision's preparation
    if tensors is not None:
        load_tensors(model, tensors, where)
    return model.eval()


def _segmenter(name: str, tensors: Tensors | None, where: str, arguments: dict[str, Any]) -> nn.Module:
    """A Segmenter with the weights of a checkpoint, which says itself what it was made with where nothing was said."""
    if not timm.is_model(name.split(".")[0]):
        raise PmvitError(f"expected one of timm's architectures after segmenter:, {_no_such_model(name)}")
    if tensors is None:
        return create_segmenter(name, pretrained=True, **arguments)
    traits = segmenter_checkpoint.read_traits(tensors)
    found = {"classes": traits.classes, "decoder": traits.decoder, "norm_eps": traits.norm_eps}
    arguments = {**{key: value for key, value in found.items() if value is not None}, **arguments}
    if "image_size" not in arguments:
        with torch.device("meta"):
            side = segmenter_checkpoint.image_side(traits, create_segmenter(name, **arguments).patch_size)
        arguments |= {} if side is None else {"image_size": side}
    model = create_segmenter(name, **arguments)
    load_tensors(model, segmenter_checkpoint.fit(tensors, model), where)
    return model


def num_classes_of(model: nn.Module) -> int | None:
    """How many classes a model tells apart; `None` if it is no classifier."""
    host = find_host(model)
    return getattr(model, "num_classes", None) or None if host is None else host.outputs().num_classes


def open_images(
    model: nn.Module,
    data: str | Path,
    *,
    labels: bool = True,
    split: Split = "train",
    first_label: int | None = None,
) -> Source | Stream:
    """Find the images that a path names: the one place where a path gets a meaning, which depends on the model.

    Args:
        model: Whose classes count: of images, or of pixels.
        data: What `open_source` knows; for a model that labels pixels, what `open_pairs` knows.
        labels: Whether labels will be used, so that the classes have to be those of the model.
        split: What images with masks are for, where `data` does not say.
        first_label: The number of the first class in plain masks.
    """
    classes = host_of(model).outputs().pixel_classes
    if classes is not None and (labels or has_masks(data)):
        return open_pairs(data, classes, split, first_label)
    if first_label is not None:
        raise PmvitError(f"first_label is for images with masks; got it for {data}")
    return open_source(data, num_classes_of(model) if labels else None)


def open_loader(
    model: nn.Module,
    data: str | Path,
    *,
    labels: bool = True,
    whole: bool = False,
    split: Split = "train",
    first_label: int | None = None,
    batch_size: int | None = None,
    workers: int = 2,
    shuffle: bool = False,
    seed: int = 0,
    strict: bool = False,
    limit: int | None = None,
    process: tuple[int, int] = (0, 1),
) -> ImageLoader:
    """Make a loader of the images that a path names, prepared for the model.

    See `open_images` for what the path may be, `labels`, `split` and `first_label`, and `create_loader` for the rest.
    """
    return create_loader(
        open_images(model, data, labels=labels, split=split, first_label=first_label),
        host_of(model).data_config(),
        whole=whole,
        batch_size=batch_size,
        workers=workers,
        shuffle=shuffle,
        seed=seed,
        strict=strict,
        limit=limit,
        process=process,
    )


def open_validation(
    model: nn.Module, data: Any, labels: bool, workers: int, process: tuple[int, int], first_label: int | None
) -> Any:
    """Batches for one of several processes to validate on, again and again: of a path, a loader, or `None` if `None`.

    Images with masks come whole; of others, every process gets 64 at a time.
    """
    count = process[1]
    if not isinstance(data, (str, Path)):
        return data if data is None or count == 1 else EveryNth(data, process)
    return open_loader(
        model,
        data,
        labels=labels,
        whole=True,
        split="val",
        first_label=first_label,
        batch_size=64 * count,
        workers=workers,
        process=process,
    )


def original_model(model: nn.Module) -> nn.Module | None:
    """The true original of a compressed model, on the same device and in evaluation mode; `None` if it is not at hand.

    That is the model itself, uncompressed, if its weights are still those that were compressed; else a model on this
    machine that has them: one that was saved on the way (`compression_of(model).original.saved`), or what was named
    when it was compressed (`source`, `weights`). Nothing is fetched. Weights are told by their fingerprint; of a model
    that version 0.1 saved there is none, and what is found where the original used to be is taken for it.

    Raises:
        PmvitError: If the model is not compressed.
    """
    compression = compression_of(model)
    if compression is None:
        raise PmvitError("expected a compressed model to find the original of; this one is not compressed")
    device, wanted = next(model.parameters()).device, compression.original.fingerprint
    if wanted is not None:
        same = decompress(copy.deepcopy(model))
        if fingerprint(same) == wanted:
            return same.eval()
    for found in _candidates(compression.original):
        plain = found if compression_of(found) is None else decompress(found)
        if wanted is None or fingerprint(plain) == wanted:
            return plain.to(device).eval()
    return None


def _candidates(original: Original) -> Iterator[nn.Module]:
    """Models on this machine that may be the original, each made when it is asked for.

    What is opened is written in a file, perhaps somebody else's: it may not have code run, or anything fetched.
    """
    if original.source == DEMO:
        yield demo_model()
    named = [(original.source, original.weights)] if original.source is not None else []
    for name, weights in [*((saved, None) for saved in original.saved), *named]:
        library, colon, _ = name.partition(":")
        is_here = Path(name).exists() if weights is None else Path(weights).exists() and (not colon or library in HERE)
        arguments = original.arguments if name == original.source else {}
        if not is_here or FORBIDDEN_ARGUMENTS & set(arguments):
            continue
        try:
            yield create_model(name, weights, **arguments)
        except PmvitError:  # it is another model now, or none
            continue
