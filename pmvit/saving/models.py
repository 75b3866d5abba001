"""Keep models on disk and make them again: safetensors and JSON, never pickle."""

import copy
import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pmvit.compression import Original, compression_of, decompress, resize, set_budget, wrap
from pmvit.config import PlanOptions
from pmvit.errors import PmvitError
from pmvit.files import check_fields, check_regular, check_writable, config_from, read_document, write_text
from pmvit.hosts import OLD_FAMILIES, Host, host_class, host_of
from pmvit.hosts.modes import check_trainable
from pmvit.hosts.outputs import predict
from pmvit.locks import only_writer
from pmvit.measuring.flops import Flops, flops
from pmvit.saving.card import CardDetails, write_card
from pmvit.saving.commands import read_commands, record_commands, versions
from pmvit.saving.hub import local_path
from pmvit.saving.parts import (
    CONFIG_FILE,
    FOR_TRANSFORMERS,
    FORMAT,
    MODEL_FILE,
    RECIPES,
    VERSION,
    open_file,
    open_folder,
)
from pmvit.saving.sizes import check_fits, check_matrices
from pmvit.tensors import FLOATS, checksum, dtype_called, read_shapes, read_tensors, write_tensors
from pmvit.wrapping import Recipe, Tuned

if TYPE_CHECKING:
    from typing_extensions import Unpack

OF_RECIPE = "pmvit."  # what the names of tensors begin with that a recipe brings


def save(
    model: nn.Module,
    path: str | Path,
    *,
    arguments: dict[str, Any] | None = None,
    card: CardDetails | None = None,
    portable: bool = False,
) -> None:
    """Write a model, compressed (by a plan or another method) or not, so that `load` makes it again without a network.

    A model that `check_savable` has not seen is checked before anything is written.

    Args:
        model: What `compress` returned, or an original model.
        path: A folder, which gets `model.safetensors`, `config.json`, `plan.json` (`adaptive.json`, `method.json`) and
            a model card, `README.md`; or a single file that ends in `.safetensors` and holds the first three. A command
            that makes the model is written down beside it, in `commands.json`.
        arguments: What the host library's model was created with, as far as it cannot be read off the model; an error
            asks for it where it is needed.
        card: What the model card says that cannot be read off the model: accuracy, how it was made.
        portable: Leave out where on this machine the original is, which is of no use elsewhere.

    Raises:
        PmvitError: If the model cannot be described so that it can be built again.
    """
    path = Path(path)
    check_trainable(model)
    check_output(path)
    described = check_savable(model, arguments)
    compression = compression_of(model)
    documents: dict[str, str] = {}
    record: dict[str, Any] | None = None
    if compression is not None:
        documents[f"{compression.what.kind}.json"] = compression.what.to_json()
        original = compression.original
        original = _without_places(original) if portable else _moved(original, path, to_file=True)
        record = {"kind": compression.what.kind, "learn": compression.learn, "original": asdict(original)}
        record["tuned"] = compression.tuned
    tensors = dict(model.state_dict())
    for name in tied_parameters(model):
        del tensors[name]
    if compression is not None:
        tensors |= {f"{OF_RECIPE}{name}": value for name, value in compression.what.tensors().items()}
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    config = {
        "format": FORMAT,
        "version": VERSION,
        "pmvit": versions().get("pmvit", "unknown"),
        "host": described.host,
        "model": described.model,
        "compression": record,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
    if names := (getattr(model, "pretrained_cfg", None) or {}).get("label_names"):
        config["label_names"] = list(names)
    config |= FOR_TRANSFORMERS
    config["sha256"] = {MODEL_FILE: checksum(tensors), **_checksums(config, documents)}
    documents[CONFIG_FILE] = json.dumps(config, indent=1) + "\n"
    if path.suffix == ".safetensors":
        write_tensors(path, tensors, documents, sealed=False)
        record_commands(path)
        return
    with only_writer(path):
        write_tensors(path / MODEL_FILE, tensors, sealed=False)
        write_card(path, model, config, described.costs, card or CardDetails())
        for name, text in documents.items():  # the configuration last: with its checksums it vouches for the others
            write_text(path / name, text)
        record_commands(path)


@dataclass(frozen=True)
class Described:
    """What is written of a model beside its tensors, and found out once."""

    structure: str  # what the model was made of then
    arguments: dict[str, Any]  # that were given
    host: str  # its key
    model: dict[str, Any]  # from which the host builds the uncompressed model again
    costs: tuple[Flops, Flops]  # of the uncompressed model and of the model


_described: WeakKeyDictionary[nn.Module, Described] = WeakKeyDictionary()


def check_savable(model: nn.Module, arguments: dict[str, Any] | None = None) -> Described:
    """See that a model, compressed or not, can be built again from its description, and compare both on an image.

    The answer holds as long as the model is made of the same modules; asked again, it costs next to nothing.

    Raises:
        PmvitError: If the model cannot be described so that it can be built again.
    """
    parts = (model, getattr(model, "pretrained_cfg", None), getattr(model, "config", None))
    known, structure = _described.get(model), "\n".join(map(repr, parts))
    if known is not None and known.structure == structure and arguments in (None, known.arguments):
        return known
    plain = copy.deepcopy(model).cpu()
    for patched in ("forward", "_original_forward"):  # what accelerate puts on a model for mixed precision
        plain.__dict__.pop(patched, None)
    after = flops(plain.float())
    if compression_of(plain) is not None:
        decompress(plain)
    host = host_of(plain)
    description = host.describe(arguments)
    _check_description(host, plain, description)
    _described[model] = Described(structure, arguments or {}, host.key, description, (flops(plain), after))
    return _described[model]


def check_output(path: Path) -> None:
    """Raise `PmvitError` if a model cannot be saved there."""
    if path.suffix != ".safetensors" and path.exists() and not path.is_dir():
        raise PmvitError(f"expected a folder, a new name or a name in .safetensors to save to, got the file {path}")
    check_writable(path if path.suffix == ".safetensors" else path / MODEL_FILE)


def _check_description(host: Host, original: nn.Module, description: dict[str, Any]) -> None:
    """Build the model from its description and see that it gives the same output."""
    rebuilt = host.build(description)
    rebuilt.load_state_dict(original.state_dict(), assign=True)  # no second copy of a large model
    image = torch.randn(1, *host.input_size(), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, got = (predict(model.float().eval(), image) for model in (original, rebuilt))
    if not torch.allclose(got, expected, rtol=1e-4, atol=1e-4):
        raise PmvitError(
            f"{description['architecture']} with {description['arguments']} has the right weights but gives another "
            "output than this model: pass `arguments=` with what else it was created with"
        )


def _checksums(config: dict[str, Any], documents: dict[str, str]) -> dict[str, str]:
    """SHA-256 of each text, by the name of its file."""
    rest = json.dumps({key: value for key, value in config.items() if key != "sha256"}, sort_keys=True)
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in {CONFIG_FILE: rest, **documents}.items()}


def _check_unchanged(config: dict[str, Any], checksums: dict[str, str], path: Path) -> None:
    """Raise `PmvitError` if the checksums of parts are not those that were saved with them."""
    for name, found in checksums.items():
        if config["sha256"].get(name) != found:
            raise PmvitError(
                f"{path}: {name} is not what was saved (its SHA-256 differs): it was changed. Save the model again; to "
                "use an edited plan, load it with Plan.load and compress the original"
            )


def load(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    img_size: int | tuple[int, int] | None = None,
    **budget: "Unpack[PlanOptions]",
) -> nn.Module:
    """Make the model that `save` wrote, or `push_to_hub`: nothing unpickled or run, the same logits to the last bit.

    Args:
        path: What `save` wrote; or `hf-hub:owner/name` (`hf-hub:owner/name@revision`), which is fetched from the
            Hugging Face Hub once. Nothing else needs a network.
        device: Where the model goes.
        img_size: The side of its images in pixels, or height and width, if not that it was saved with: see `at_size`.
        budget: For a model with an adaptive plan, another budget than it was saved with, as `gflops=0.8`: see
            `set_budget`. With an `img_size`, it is for images of that.

    Raises:
        PmvitError: If a file is missing, cut short, changed since it was saved, or not pmvit's.
    """
    path = local_path(path)
    check_regular(path)
    if path.is_dir():
        config, documents, file = open_folder(path)
    elif path.is_file():
        config, documents, file = open_file(path)
    else:
        raise PmvitError(f"expected a folder or a .safetensors file written by pmvit at {path}; there is none")
    _check_unchanged(config, _checksums(config, documents), path)
    if config["version"] == 1:
        config = _upgraded(config, documents, path)
    host, shapes = host_class(config["host"]), read_shapes(file)
    check_fits(host, config["model"], shapes, str(path))
    tensors = read_tensors(file)
    _check_unchanged(config, {MODEL_FILE: checksum(tensors)}, path)
    dtype = dtype_called(config["dtype"], f"{path}: dtype", FLOATS)
    model = host.build(config["model"]).to(dtype)
    if "label_names" in config:
        cast("Any", model).pretrained_cfg["label_names"] = config["label_names"]
    if config["compression"] is not None:
        fields = ("kind", "learn", "original")
        record = check_fields(config["compression"], fields, f"{path}: compression", optional=("tuned",))
        kind = record["kind"]
        if kind not in RECIPES or f"{kind}.json" not in documents:
            raise PmvitError(f"{path}: expected a model with its {' or '.join(RECIPES)}; got one with {kind!r}")
        names = [name for name in tensors if name.startswith(OF_RECIPE)]
        brought = {name.removeprefix(OF_RECIPE): tensors.pop(name) for name in names}
        what: Recipe = resolve_name(RECIPES[kind])(documents[f"{kind}.json"], f"{path}: {kind}", brought)
        if odd := sorted(brought.keys() - what.tensors().keys()):
            raise PmvitError(f"{path}: unexpected tensor {OF_RECIPE + odd[0]!r}, which is not of its {what.title}")
        check_matrices(what, record["learn"], shapes, str(path))
        tuned = record.get("tuned", [])
        if not isinstance(tuned, list) or any(one not in get_args(Tuned) for one in tuned):
            raise PmvitError(f"{path}: expected a list of {' and '.join(get_args(Tuned))} as tuned; got {tuned!r}")
        wrap(model, what, record["learn"], _found(record["original"], path), tuple(tuned))
    load_tensors(model, tensors, str(path), assign=True)
    if img_size is not None:
        resize(model, img_size)
    if budget:
        set_budget(model, **budget)
    return model.to(device).eval()


def _upgraded(config: dict[str, Any], documents: dict[str, str], path: Path) -> dict[str, Any]:
    """The configuration of version 1 as version 2 has it: hosts were sentences, methods in it, originals nowhere."""
    kind = "plan" if "plan.json" in documents else "method" if "method" in config else None
    if kind == "method":
        documents["method.json"] = json.dumps(config["method"])
    host = OLD_FAMILIES.get(config["family"], config["family"])
    original = Original(None, saved=tuple(str(place.absolute()) for place in _old_places(path)))
    record = {"kind": kind, "learn": config["learn"] or "group", "original": asdict(original)}
    return {**config, "host": host, "compression": None if kind is None else record}


def _old_places(path: Path) -> list[Path]:
    """Where the original of a model of version 1 is: `compressed` of a run, or the model that fine-tuning began with.

    Of a model that was not tuned, it is the model itself.
    """
    try:
        if (path / "finetune.json").exists():
            command = read_document(path / "finetune.json", "pmvit-finetune", 1).get("command") or {}
            return [path / "compressed", *([Path(command["model"])] if "model" in command else [])]
        tuned = any("calibrate" in made["command"] for made in read_commands(path))
    except PmvitError:  # whoever reads these files for what they are will say what is wrong
        return []
    return [] if tuned else [path]


def _found(data: Any, path: Path) -> Original:
    """The record of the original in a model that is read from `path`.

    The model at `path` is added to those that may hold the original's weights: it may be tuned from now on.
    """
    original = _moved(config_from(Original, data, f"{path}: original"), path, to_file=False)
    if original.fingerprint is None:
        return original
    return replace(original, saved=tuple(dict.fromkeys([*original.saved, str(path.absolute())])))


def _moved(original: Original, path: Path, *, to_file: bool) -> Original:
    """With paths relative to the saved model at `path` (`to_file`), so that both can be moved together; or, when it is
    read, as they are from here."""
    folder = path.parent if path.suffix == ".safetensors" else path

    def moved(text: str) -> str:
        if to_file:
            return Path(os.path.relpath(text, folder)).as_posix() if Path(text).exists() else text
        return str((folder / text).resolve()) if (folder / text).exists() else text

    source, weights = (None if text is None else moved(text) for text in (original.source, original.weights))
    return replace(original, source=source, weights=weights, saved=tuple(map(moved, original.saved)))


def _without_places(original: Original) -> Original:
    """Without folders of this machine: of the source and the weights file the names alone are left."""
    source, weights = original.source, original.weights
    if source is not None and Path(source).exists():
        source = Path(source).name
    return replace(original, source=source, weights=None if weights is None else Path(weights).name, saved=())


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that have several, as the head of a language model, with the first name of each."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: known for name, value in named if (known := first.setdefault(id(value), name)) != name}


def load_tensors(model: nn.Module, tensors: dict[str, Tensor], where: str, *, assign: bool = False) -> None:
    """Give a model its weights; every name and shape has to fit. With `assign` each keeps the type it was saved in.

    What has several names need be there under the first alone, and is one parameter afterwards as before.
    """
    tied = tied_parameters(model)
    tensors = {**{name: tensors[first] for name, first in tied.items() if first in tensors}, **tensors}
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name in {**expected, **tensors}:
        if name not in tensors:
            raise PmvitError(f"{where}: expected a tensor {name!r} of shape {expected[name]}; there is none")
        if name not in expected:
            raise PmvitError(f"{where}: unexpected tensor {name!r}: are these the weights of another model?")
        if tuple(tensors[name].shape) != expected[name]:
            shape = tuple(tensors[name].shape)
            raise PmvitError(f"{where}: expected {name!r} of shape {expected[name]}, got {shape}")
    model.load_state_dict(tensors, assign=assign)
    for name, first in tied.items():  # assigned, they are two
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, model.get_parameter(first))
