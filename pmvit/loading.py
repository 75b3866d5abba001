"""A model from a name (timm, Hugging Face, torchvision, Segmenter, what pmvit saved), or the original of a compressed
one.

Nothing is ever unpickled unchecked.
"""

import copy
import pickle
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from pmvit.compression import Original, compression_of, decompress, resize
from pmvit.data.demo import DEMO, demo_model
from pmvit.errors import PmvitError
from pmvit.hosts import TimmFeatures, TimmNaFlex, find_host, host_of, smp
from pmvit.hosts.hf import model as hf
from pmvit.hosts.host import AnyModule
from pmvit.hosts.making import AS_FILE, at_most, check_known, check_numbers, fetching, one_line, sides_of
from pmvit.hosts.segmenter import checkpoint as segmenter_checkpoint
from pmvit.hosts.segmenter.model import create_segmenter
from pmvit.hosts.timm.model import ARGUMENTS, TimmModel, resize_weights
from pmvit.hosts.timm.vit import select_weights
from pmvit.saving.hub import fetch
from pmvit.saving.models import load, load_tensors
from pmvit.saving.parts import MODEL_FILE
from pmvit.saving.sizes import check_made
from pmvit.tensors import read_shapes, read_tensors
from pmvit.wrapping import fingerprint

Tensors = dict[str, Tensor]
OR_THE_DOWNLOAD = ". If the download failed, pass the weights as a file (--weights)"
HERE = ("torchvision", "segmenter")  # what makes an architecture of its name without asking a hub
# What a file may say that a model was made with; others have a library read other files, or fetch them.
FROM_FILES = ARGUMENTS | {"classes", "decoder", "image_size", "norm_eps", "num_labels", "ignore_mismatched_sizes"}
MOST_PARAMETERS = 10_000  # tensors of a model that a file names


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


def create_model(
    name: str, weights: str | Path | None = None, *, needs_host: bool = True, **arguments: Any
) -> nn.Module:
    """Make a model in evaluation mode.

    Args:
        name: A folder or file that pmvit saved; one of timm's architectures; `hf-hub:owner/name` for either of these on
            the hub (`@revision` behind it names a branch, tag or commit): pmvit's if its `config.json` says so, else
            timm's; `hf:owner/name`, or a folder, for Hugging Face transformers; `torchvision:name`; `segmenter:name`
            for a Segmenter on one of timm's vision transformers; or a folder that a DPT of
            segmentation_models_pytorch was saved in.
        weights: A file with the weights; without it the library fetches its pretrained ones.
        needs_host: Whether it has to be a model that pmvit knows, which is found out before anything is fetched; a
            teacher need not be.
        arguments: More for `timm.create_model`, `from_pretrained`, torchvision's model or `create_segmenter`. With
            timm the number of classes is taken from the weights if not given; another number gives the model a new
            head. `img_size` (timm) or `image_size` (the others) is the side of its images; position embeddings of the
            weights are resized to it. Of what pmvit saved, `img_size` is all that may be given, as to `load`.

    Raises:
        PmvitError: If there is no such model, or the weights do not fit it.
    """
    library, _, rest = name.partition(":")
    if library == "hf" or hf.is_folder(Path(name)):
        if weights is not None:
            raise PmvitError(f"{name} brings its weights; got {weights} beside it: leave them out")
        model: nn.Module = hf.load_pretrained(rest if library == "hf" else name, arguments, needs_host)
        return model
    saved = fetch(name, AS_FILE) if library == "hf-hub" else Path(name)
    if saved is not None and saved.exists():
        sized = {} if smp.is_folder(saved) else {key: value for key, value in arguments.items() if key == "img_size"}
        if weights is not None or len(arguments) > len(sized):
            raise PmvitError(f"{name} is a saved model and brings its weights and arguments; got others beside it")
        if not smp.is_folder(saved):
            return load(saved, **sized)
        weights = saved / MODEL_FILE
        check_made(lambda: smp.from_folder(saved), read_shapes(weights), name)
        model = smp.from_folder(saved)
        load_tensors(model, read_weights(weights), name)
        return model
    tensors = read_weights(Path(weights)) if weights is not None else None
    if library == "torchvision":
        return _torchvision_model(rest, tensors, str(weights), arguments)
    if library == "segmenter":
        return _segmenter(rest, tensors, str(weights), arguments)
    return _timm_model(name, tensors, str(weights), arguments, needs_host)


def _no_such_model(name: str) -> str:
    """What was perhaps meant by the name of an architecture that timm does not have, to end an error with."""
    close = get_close_matches(name, timm.list_models(), n=3)
    return f"got {name!r}" + (f": did you mean {' or '.join(close)}?" if close else "")


def _timm_model(
    name: str, tensors: Tensors | None, where: str, arguments: dict[str, Any], needs_host: bool
) -> nn.Module:
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
    is_fetched = tensors is None or ":" in name
    with (
        one_line(f"timm could not make {name!r} with {arguments or 'its defaults'}", OR_THE_DOWNLOAD),
        fetching(name) if is_fetched else nullcontext(),
    ):
        if needs_host and is_fetched:
            check_known(partial(timm.create_model, name, pretrained=False, **arguments))
        model: nn.Module = timm.create_model(name, pretrained=tensors is None, **arguments)
    host = find_host(model)
    if "img_size" in arguments and isinstance(host, TimmNaFlex):
        host.set_size(*sides_of(arguments["img_size"]))
    if tensors is None:
        return model.eval()
    if "img_size" in arguments and isinstance(host, TimmModel):
        tensors = resize_weights(host.encoder, tensors)
    if isinstance(host, TimmFeatures):
        tensors = select_weights(model, tensors)
    elif classes is not None and arguments["num_classes"] != classes:
        head = {key: value for key, value in model.state_dict().items() if key.startswith("head.")}
        tensors = {**tensors, **head}
    load_tensors(model, tensors, where)
    return model.eval()


def _torchvision_model(name: str, tensors: Tensors | None, where: str, arguments: dict[str, Any]) -> nn.Module:
    """One of torchvision's vision transformers or Swins, with its default weights or with those that are given."""
    from torchvision.models import get_model, get_model_weights, list_models
    from torchvision.models.vision_transformer import interpolate_embeddings

    names = [*list_models(include="vit_*"), *list_models(include="swin_*")]
    if name not in names:
        raise PmvitError(f"expected one of torchvision's {', '.join(names)}; got {name!r}")
    side, is_vit = arguments.get("image_size"), name.startswith("vit")
    taken = {key: value for key, value in arguments.items() if is_vit or key != "image_size"}
    with (
        one_line(f"torchvision could not make {name!r} with {arguments or 'its defaults'}", OR_THE_DOWNLOAD),
        fetching(name) if tensors is None else nullcontext(),
    ):
        model: AnyModule = get_model(name, weights=None, **taken)
        state: Any = tensors
        if tensors is None:
            weights: Any = get_model_weights(name).DEFAULT
            state = weights.get_state_dict(progress=True, check_hash=True, weights_only=True)
        if is_vit and side is not None and "encoder.pos_embedding" in state:
            state = interpolate_embeddings(side, model.patch_size, state)
        if tensors is None:
            model.load_state_dict(state)
    if tensors is not None:
        load_tensors(model, state, where)
    if side is not None:
        model.image_size = side  # where a Swin, which takes any, has the one that its plan is for
    model.pretrained_cfg = {}  # where --data-arg leaves what differs from torchvision's preparation
    ready: nn.Module = model.eval()
    return ready


def _segmenter(name: str, tensors: Tensors | None, where: str, arguments: dict[str, Any]) -> nn.Module:
    """A Segmenter with the weights of a checkpoint, which says itself what it was made with where nothing was said."""
    if not timm.is_model(name.split(".")[0]):
        raise PmvitError(f"expected one of timm's architectures after segmenter:, {_no_such_model(name)}")
    if tensors is None:
        with torch.device("meta"):
            create_segmenter(name, **arguments)  # an encoder that it cannot have is refused before it is fetched
        return create_segmenter(name, pretrained=True, **arguments)
    model = create_segmenter(name, **segmenter_checkpoint.arguments_of(tensors, name, arguments))
    load_tensors(model, segmenter_checkpoint.fit(tensors, model), where)
    return model


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
    size = host_of(model).input_size()
    for found in _candidates(compression.original):
        plain = found if compression_of(found) is None else decompress(found)
        is_it = wanted is None or fingerprint(plain) == wanted
        if host_of(plain).input_size() != size:  # the model was brought to another size since, or before
            with suppress(PmvitError):
                resize(plain, (size[-2], size[-1]))
            is_it = is_it or fingerprint(plain) == wanted
        if is_it:
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
        if not is_here or set(arguments) - FROM_FILES:
            continue
        try:
            check_numbers(arguments, name)
            with at_most(MOST_PARAMETERS, name):
                found = create_model(name, weights, **arguments)
            yield found
        except PmvitError:  # it is another model now, or none
            continue
