"""Keep models on disk and make them again: safetensors and JSON, never pickle."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pmvit.card import Facts, write_card
from pmvit.compression import compress, compression_of, decompress, is_compressed
from pmvit.errors import PmvitError
from pmvit.files import check_fields, check_writable, parse_document, write_atomically, write_text
from pmvit.hosts import OLD_FAMILIES, Host, host_class, host_of
from pmvit.hosts.modes import check_trainable
from pmvit.hosts.outputs import predict
from pmvit.measuring.flops import flops
from pmvit.methods.base import apply, method_from, method_of
from pmvit.planning import Plan

FORMAT, VERSION = "pmvit-model", 1
MODEL_FILE, PLAN_FILE, CONFIG_FILE = "model.safetensors", "plan.json", "config.json"


def save(
    model: nn.Module, path: str | Path, *, arguments: dict[str, Any] | None = None, facts: Facts | None = None
) -> None:
    """Write a model, compressed (by a plan or another method) or not, so that `load` makes it again without a network.

    Before anything is written, the model is built again from its description and compared on an image.

    Args:
        model: What `compress` or `methods.compress` returned, or an original model.
        path: A folder, which gets `model.safetensors`, `plan.json`, `config.json` and a model card, `README.md`; or a
            single file that ends in `.safetensors` and holds the first three.
        arguments: What the host library's model was created with, as far as it cannot be read off the model; an error
            asks for it where it is needed.
        facts: What the model card says that cannot be read off the model: accuracy, how it was made.

    Raises:
        PmvitError: If the model cannot be described so that it can be built again.
    """
    path = Path(path)
    check_trainable(model)
    check_output(path)
    compression = compression_of(model)
    host, description = describe(model, arguments)
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    plan_text = compression.plan.to_json() if compression is not None else None
    config = {
        "format": FORMAT,
        "version": VERSION,
        "pmvit": _pmvit_version(),
        "family": host.key,
        "model": description,
        "learn": compression.learn if compression is not None else None,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
    if (method := method_of(model)) is not None:
        config["method"] = method.describe()
    config["sha256"] = _checksums(config, plan_text, tensors)
    config_text = json.dumps(config, indent=1) + "\n"
    if path.suffix == ".safetensors":
        metadata = {CONFIG_FILE: config_text} | ({PLAN_FILE: plan_text} if plan_text is not None else {})
        write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))
        return
    write_atomically(path / MODEL_FILE, lambda temporary: save_file(tensors, temporary))
    if plan_text is not None:
        write_text(path / PLAN_FILE, plan_text)
    describe_on_card(path, model, config, facts or Facts())
    write_text(path / CONFIG_FILE, config_text)  # last: with its checksums it vouches for the others


def describe_on_card(folder: Path, model: nn.Module, config: dict[str, Any], facts: Facts) -> None:
    """Write the card of a model that was saved, counting what it costs with and without its compression."""
    plain = _plain_copy(model).float()
    after = flops(plain)
    before = flops(decompress(plain)) if is_compressed(plain) else after
    compression = compression_of(model)
    write_card(folder, plain, config, compression.plan if compression else None, (before, after), facts)


def _plain_copy(model: nn.Module) -> nn.Module:
    """A copy on the CPU, without what accelerate puts on a model for mixed precision."""
    result = copy.deepcopy(model).cpu()
    for patched in ("forward", "_original_forward"):
        result.__dict__.pop(patched, None)
    return result


def describe(model: nn.Module, arguments: dict[str, Any] | None = None) -> tuple[Host, dict[str, Any]]:
    """The host of a model, compressed or not, and the description from which it builds the model again.

    Raises:
        PmvitError: If it cannot.
    """
    original = _plain_copy(model)
    if is_compressed(original):
        decompress(original)
    host = host_of(original)
    description = host.describe(arguments)
    _check_description(host, original, description)
    return host, description


def check_output(path: Path) -> None:
    """Raise `PmvitError` if a model cannot be saved there."""
    if path.suffix != ".safetensors" and path.exists() and not path.is_dir():
        raise PmvitError(f"expected a folder, a new name or a name in .safetensors to save to, got the file {path}")
    check_writable(path if path.suffix == ".safetensors" else path / MODEL_FILE)


def _check_description(host: Host, original: nn.Module, description: dict[str, Any]) -> None:
    """Build the model from its description and see that it gives the same output; both are left in float32."""
    rebuilt = host.build(description)
    rebuilt.load_state_dict(original.state_dict())
    image = torch.randn(1, *host.input_size(), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, got = (predict(model.float().eval(), image) for model in (original, rebuilt))
    if not torch.allclose(got, expected, rtol=1e-4, atol=1e-4):
        raise PmvitError(
            f"{description['architecture']} with {description['arguments']} has the right weights but gives another "
            "output than this model: pass `arguments=` with what else it was created with"
        )


def _checksums(config: dict[str, Any], plan_text: str | None, tensors: dict[str, Tensor]) -> dict[str, str]:
    """SHA-256 of each part, by the name of its file."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    rest = json.dumps({key: value for key, value in config.items() if key != "sha256"}, sort_keys=True)
    result = {MODEL_FILE: digest.hexdigest(), CONFIG_FILE: hashlib.sha256(rest.encode()).hexdigest()}
    if plan_text is not None:
        result[PLAN_FILE] = hashlib.sha256(plan_text.encode()).hexdigest()
    return result


def load(path: str | Path, *, device: str | torch.device = "cpu") -> nn.Module:
    """Make the model that `save` wrote: no network, nothing unpickled, the same logits to the last bit.

    Raises:
        PmvitError: If a file is missing, cut short, changed since it was saved, or not pmvit's.
    """
    path = Path(path)
    if path.is_dir():
        config, plan_text, tensors = _open_folder(path)
    elif path.is_file():
        config, plan_text, tensors = _open_file(path)
    else:
        raise PmvitError(f"expected a folder or a .safetensors file written by pmvit at {path}; there is none")
    for name, checksum in _checksums(config, plan_text, tensors).items():
        if config["sha256"].get(name) != checksum:
            raise PmvitError(
                f"{path}: {name} is not what was saved (its SHA-256 differs): it was changed. Save the model again; to "
                "use an edited plan, load it with Plan.load and compress the original"
            )
    key = OLD_FAMILIES.get(config["family"], config["family"])
    model = host_class(key).build(config["model"]).to(getattr(torch, config["dtype"]))
    if plan_text is not None:
        model = compress(model, Plan.from_json(plan_text, f"{path}: plan"), learn=config["learn"], inplace=True)
    if "method" in config:
        model = apply(model, method_from(config["method"]), inplace=True)
    load_tensors(model, tensors, str(path), assign=True)
    return model.to(device).eval()


def _parse_config(text: str, where: str) -> dict[str, Any]:
    config = parse_document(text, FORMAT, VERSION, where)
    fields = ("format", "version", "pmvit", "family", "model", "learn", "dtype", "sha256")
    check_fields(config, fields, where, optional=("method",))
    check_fields(config["sha256"], (MODEL_FILE, CONFIG_FILE), f"{where}: sha256", optional=(PLAN_FILE,))
    return config


def _open_folder(folder: Path) -> tuple[dict[str, Any], str | None, dict[str, Tensor]]:
    """Configuration, plan and tensors of a folder."""
    try:
        config = _parse_config((folder / CONFIG_FILE).read_text(encoding="utf-8"), str(folder / CONFIG_FILE))
    except FileNotFoundError:
        raise PmvitError(f"expected a model saved by pmvit in {folder}, which has no {CONFIG_FILE}") from None
    except UnicodeDecodeError:
        raise PmvitError(f"expected text in {folder / CONFIG_FILE}, got something else: save the model again") from None
    for name in (MODEL_FILE, PLAN_FILE):
        if name in config["sha256"] and not (folder / name).is_file():
            raise PmvitError(f"expected {name} in {folder}; it is missing: save the model again")
    plan_text = (folder / PLAN_FILE).read_text(encoding="utf-8") if PLAN_FILE in config["sha256"] else None
    return config, plan_text, read_tensors(folder / MODEL_FILE)


def _open_file(path: Path) -> tuple[dict[str, Any], str | None, dict[str, Tensor]]:
    """Configuration, plan and tensors of a single file."""
    metadata = read_metadata(path)
    if CONFIG_FILE not in metadata:
        raise PmvitError(f"{path} holds weights but no pmvit model: load it as the weights of an architecture instead")
    return _parse_config(metadata[CONFIG_FILE], f"{path}: config"), metadata.get(PLAN_FILE), read_tensors(path)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with _opened(path) as file:
        return file.metadata() or {}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, copied to where PyTorch puts its own.

    In the file they begin anywhere, and products with numbers that are not aligned are rounded in another order.
    """
    with _opened(path) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # it is no mapping


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise PmvitError(f"expected a whole safetensors file at {path}; it cannot be read ({error})") from None


def load_tensors(model: nn.Module, tensors: dict[str, Tensor], where: str, *, assign: bool = False) -> None:
    """Give a model its weights; every name and shape has to fit. With `assign` each keeps the type it was saved in."""
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


def _pmvit_version() -> str:
    from pmvit import __version__

    return __version__
