"""Apply a plan to a model, take it off again, and keep the result on disk (safetensors and JSON, never pickle)."""

import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.files import check_fields, parse_document, write_atomically, write_text
from pmvit.models import HostChange, adapter_for, adapter_of_family
from pmvit.planning import Plan
from pmvit.prune_merge import Learn, PruneMerge

FORMAT, VERSION = "pmvit-model", 1
MODEL_FILE, PLAN_FILE, CONFIG_FILE = "model.safetensors", "plan.json", "config.json"

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Compression:
    """What was done to a model; `compress` leaves it on the model as `model.compression`."""

    plan: Plan
    learn: Learn
    changes: tuple[HostChange, ...]


def compression_of(model: nn.Module) -> Compression | None:
    """What was done to the model, `None` if it is not compressed."""
    found = getattr(model, "compression", None)
    return found if isinstance(found, Compression) else None


def compress(model: Model, plan: Plan, *, learn: Learn = "group", inplace: bool = False) -> Model:
    """Wrap the planned blocks of a model: same class, same call, as many tokens in and out as before.

    Args:
        model: The model to compress; a copy is, unless `inplace`.
        plan: What happens in each block. Blocks where it keeps every token are left unwrapped.
        learn: What fine-tuning may change of M and R: `group` weights of the planned members, or `dense` matrices.
        inplace: Change the given model instead of a copy of it.

    Raises:
        PmvitError: If the plan does not fit the model.
    """
    if learn not in get_args(Learn):
        raise PmvitError(f"learn: expected {' or '.join(get_args(Learn))}, got {learn!r}")
    if compression_of(model) is not None:
        raise PmvitError("expected an uncompressed model; this one is compressed already: decompress it first")
    adapter = adapter_for(model)
    layout = adapter.layout(model)
    names = adapter.block_names(model)
    if plan.grid != layout.grid:
        raise PmvitError(
            f"expected a plan for {_grid(layout.grid)} tokens, got one for {_grid(plan.grid)}: "
            "was the plan made for another image or patch size?"
        )
    if plan.depth != len(names):
        raise PmvitError(f"expected a plan for {len(names)} blocks, got one for {plan.depth}: is it for another model?")
    if not inplace:
        model = copy.deepcopy(model)
    changes: list[HostChange] = []
    for index, layer in sorted(plan.layers.items()):
        if layer.is_identity:
            continue
        block = model.get_submodule(names[index])
        parameter = next(block.parameters())
        groups, centres, weights = layer.tensors()
        wrapper = PruneMerge(
            block,
            groups,
            centres,
            weights,
            num_prefix=layout.num_prefix,
            reconstruct=plan.reconstruct,
            learn=learn,
            attention_bias=plan.attention_bias,
            narrow_arguments=adapter.narrow_arguments,
            device=parameter.device,
            dtype=parameter.dtype,
        )
        wrapper.train(block.training)
        changes += adapter.narrow(wrapper)
        model.set_submodule(names[index], wrapper)
    model.compression = Compression(plan, learn, tuple(changes))  # type: ignore[assignment]  # a record, not a module
    return model


def decompress(model: Model) -> Model:
    """Unwrap the blocks, in place: the model is again made of the very objects it was made of before `compress`.

    The exact inverse of `compress(..., inplace=True)`. What fine-tuning did to the blocks stays; M and R are gone.
    """
    compression = compression_of(model)
    if compression is None:
        raise PmvitError("expected a compressed model; this one is not compressed")
    for change in reversed(compression.changes):
        setattr(change.module, change.attribute, _on_device_of(change.module, change.original))
    for name, module in list(model.named_modules()):
        if isinstance(module, PruneMerge):
            model.set_submodule(name, module.block)
    del model.compression
    return model


def _on_device_of(module: nn.Module, value: Any) -> Any:
    """A tensor that was set aside follows its module, which may have moved since."""
    return value.to(next(module.parameters()).device) if isinstance(value, Tensor) else value


def save(model: nn.Module, path: str | Path, *, arguments: dict[str, Any] | None = None) -> None:
    """Write a model, compressed or not, so that `load` makes it again without a network.

    Args:
        model: What `compress` returned, or an original model.
        path: A folder, which gets `model.safetensors`, `plan.json` and `config.json`; or a single file that ends in
            `.safetensors` and holds all three.
        arguments: What the host library's model was created with. Usually they can be read off the model; where they
            cannot, an error asks for them.

    Raises:
        PmvitError: If the model cannot be described so that it can be built again.
    """
    path = Path(path)
    compression = compression_of(model)
    original = decompress(copy.deepcopy(model)) if compression is not None else model
    adapter = adapter_for(original)
    config = {
        "format": FORMAT,
        "version": VERSION,
        "pmvit": _pmvit_version(),
        "family": adapter.family,
        "model": adapter.describe(original, arguments),
        "learn": compression.learn if compression is not None else None,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
    plan_text = compression.plan.to_json() if compression is not None else None
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    if path.suffix == ".safetensors":
        metadata = {"pmvit.config": json.dumps(config)}
        if plan_text is not None:
            metadata["pmvit.plan"] = plan_text
        write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))
        return
    _save_folder(path, tensors, plan_text, config)


def _save_folder(folder: Path, tensors: dict[str, Tensor], plan_text: str | None, config: dict[str, Any]) -> None:
    """Write the parts, `config.json` last: with its checksums it vouches for the others."""
    if folder.exists() and not folder.is_dir():
        raise PmvitError(f"expected a folder or a new name to save to, got the file {folder}")
    write_atomically(folder / MODEL_FILE, lambda temporary: save_file(tensors, temporary))
    config["sha256"] = {MODEL_FILE: _sha256(folder / MODEL_FILE)}
    if plan_text is not None:
        write_text(folder / PLAN_FILE, plan_text)
        config["sha256"][PLAN_FILE] = _sha256(folder / PLAN_FILE)
    else:
        (folder / PLAN_FILE).unlink(missing_ok=True)
    write_text(folder / CONFIG_FILE, json.dumps(config, indent=1) + "\n")


def load(path: str | Path, *, device: str | torch.device = "cpu") -> nn.Module:
    """Make the model that `save` wrote: no network, nothing unpickled, the same logits to the last bit.

    Raises:
        PmvitError: If a file is missing, cut short, changed since it was saved, or not pmvit's.
    """
    path = Path(path)
    if path.is_dir():
        config_text, plan_text, weights = _open_folder(path)
    elif path.is_file():
        config_text, plan_text, weights = _open_file(path)
    else:
        raise PmvitError(f"expected a folder or a .safetensors file written by pmvit at {path}; there is none")
    config = parse_document(config_text, FORMAT, VERSION, where=f"{path}: config")
    names = ("format", "version", "pmvit", "family", "model", "learn", "dtype")
    check_fields(config, names, f"{path}: config", optional=("sha256",))
    dtype = getattr(torch, str(config["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise PmvitError(f"{path}: config: expected the name of a dtype, got {config['dtype']!r}")
    adapter = adapter_of_family(config["family"])
    where = f"{path}: config, model"
    model = adapter.build(check_fields(config["model"], ("architecture", "arguments", "data"), where)).to(dtype)
    if plan_text is not None:
        model = compress(model, Plan.from_json(plan_text, f"{path}: plan"), learn=config["learn"], inplace=True)
    load_tensors(model, read_tensors(weights), str(weights))
    return model.to(device).eval()


def _open_folder(folder: Path) -> tuple[str, str | None, Path]:
    """The texts of a folder's configuration and plan, and its weights, after a look at the checksums."""
    try:
        config_text = (folder / CONFIG_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PmvitError(f"expected a model saved by pmvit in {folder}, which has no {CONFIG_FILE}") from None
    except UnicodeDecodeError:
        raise PmvitError(f"expected text in {folder / CONFIG_FILE}, got something else: save the model again") from None
    config = parse_document(config_text, FORMAT, VERSION, where=str(folder / CONFIG_FILE))
    checksums = check_fields(config.get("sha256"), (MODEL_FILE,), f"{folder}: config, sha256", optional=(PLAN_FILE,))
    for name, expected in checksums.items():
        if not (folder / name).is_file():
            raise PmvitError(f"expected {name} in {folder}; it is missing: save the model again")
        if _sha256(folder / name) != expected:
            raise PmvitError(
                f"{folder / name} is not the file that was saved with this configuration (its SHA-256 differs): "
                "it was cut short or changed. Save the model again; to use an edited plan, load it with Plan.load "
                "and compress the original"
            )
    plan_text = (folder / PLAN_FILE).read_text(encoding="utf-8") if PLAN_FILE in checksums else None
    return config_text, plan_text, folder / MODEL_FILE


def _open_file(path: Path) -> tuple[str, str | None, Path]:
    metadata = read_metadata(path)
    if "pmvit.config" not in metadata:
        raise PmvitError(f"{path} holds weights but no pmvit model: load it as the weights of an architecture instead")
    return metadata["pmvit.config"], metadata.get("pmvit.plan"), path


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with _opened(path) as file:
        return file.metadata() or {}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # safe_open is no mapping


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise PmvitError(f"expected a whole safetensors file at {path}; it cannot be read ({error})") from None


def load_tensors(model: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Give a model its weights; every name and shape has to fit."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name in _in_order(expected, tensors):
        if name not in tensors:
            raise PmvitError(f"{where}: expected a tensor {name!r} of shape {expected[name]}; there is none")
        if name not in expected:
            raise PmvitError(f"{where}: unexpected tensor {name!r}: are these the weights of another model?")
        if tuple(tensors[name].shape) != expected[name]:
            shape = tuple(tensors[name].shape)
            raise PmvitError(f"{where}: expected {name!r} of shape {expected[name]}, got {shape}")
    model.load_state_dict(tensors)


def _in_order(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    yield from dict.fromkeys([*first, *second])


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _pmvit_version() -> str:
    from pmvit import __version__

    return __version__


def _grid(grid: tuple[int, int]) -> str:
    return f"{grid[0]} x {grid[1]}"
