"""Apply a plan to a model, take it off again, and keep the result on disk (safetensors and JSON, never pickle)."""

import copy
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pmvit._modes import check_trainable
from pmvit.card import Facts, write_card
from pmvit.cost import flops
from pmvit.errors import PmvitError
from pmvit.files import check_fields, check_writable, parse_document, write_atomically, write_text
from pmvit.merged_mlp import MergedNorm, SpreadMlp, mlp_matrices
from pmvit.methods.base import apply, method_from, method_of, remove
from pmvit.models import Adapter, HostChange, adapter_for, adapter_of_family
from pmvit.outputs import predict
from pmvit.planning import LayerPlan, Plan
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


def is_compressed(model: nn.Module) -> bool:
    """Whether a plan or another method (`pmvit.methods`) was applied to the model."""
    return compression_of(model) is not None or method_of(model) is not None


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
    check_trainable(model)
    if is_compressed(model):
        raise PmvitError("expected an uncompressed model; this one is compressed already: decompress it first")
    adapter = adapter_for(model)
    layouts = adapter.layouts(model)
    names = adapter.block_names(model)
    if plan.grid != layouts[0].grid:
        raise PmvitError(
            f"expected a plan for {_grid(layouts[0].grid)} tokens, got one for {_grid(plan.grid)}: "
            "was the plan made for another image or patch size?"
        )
    if plan.depth != len(names):
        raise PmvitError(f"expected a plan for {len(names)} blocks, got one for {plan.depth}: is it for another model?")
    for index, layout in enumerate(layouts):
        if plan.grids[index] != layout.grid:
            raise PmvitError(
                f"block {index}: expected a plan for {_grid(layout.grid)} tokens, got one for "
                f"{_grid(plan.grids[index])}: is it for another model?"
            )
    if plan.attention_bias and not adapter.takes_attention_bias:
        raise PmvitError(
            f"the adapter for {adapter.family} says of no argument that takes an attention bias: "
            "make the plan with attention_bias=False"
        )
    if not inplace:
        model = copy.deepcopy(model)
    changes: list[HostChange] = adapter.prepare(model)
    for index, layer in sorted(plan.layers.items()):
        block = model.get_submodule(names[index])
        parameter = next(block.parameters())
        if layer.mlp is not None:
            changes += _merge_before_mlp(block, layer, layer.mlp, layouts[index].num_prefix, learn, adapter)
        if layer.is_identity:
            continue
        groups, centres, weights = layer.tensors()
        wrapper = PruneMerge(
            block,
            groups,
            centres,
            weights,
            num_prefix=layouts[index].num_prefix,
            reconstruct=plan.reconstruct,
            learn=learn,
            attention_bias=plan.attention_bias,
            narrow_arguments=adapter.narrow_arguments,
            device=parameter.device,
            dtype=parameter.dtype,
        )
        wrapper.train(block.training)
        changes += adapter.fit(wrapper, layouts[index])
        adapter.stand_in(wrapper, block)
        model.set_submodule(names[index], wrapper)
    model.compression = Compression(plan, learn, tuple(changes))  # type: ignore[assignment]  # a record, not a module
    return model


def _merge_before_mlp(
    block: nn.Module, layer: LayerPlan, mlp: LayerPlan, num_prefix: int, learn: Learn, adapter: Adapter
) -> list[HostChange]:
    """Give the MLP of a block groups of its own; return what was changed."""
    parts = adapter.mlp_parts(block)
    if parts is None:
        raise PmvitError(
            f"the plan has groups for MLPs alone, and that of a {type(block).__name__} cannot be told apart: "
            'make a plan from prices with parts="whole"'
        )
    parameter = next(block.parameters())
    groups, _, weights = mlp.tensors()
    matrices = mlp_matrices(
        torch.tensor(layer.groups),
        groups,
        weights,
        num_prefix=num_prefix,
        learn=learn,
        device=parameter.device,
        dtype=parameter.dtype,
    )
    hosts = [block.get_submodule(part) for part in parts]
    stand_ins = (MergedNorm(hosts[0], matrices), SpreadMlp(hosts[1], matrices))
    for name, stand_in in zip(parts, stand_ins, strict=True):
        setattr(block, name, stand_in.train(block.training))
    return [HostChange(block, name, host) for name, host in zip(parts, hosts, strict=True)]


def decompress(model: Model) -> Model:
    """Unwrap the blocks, in place: the model is again made of the very objects it was made of before `compress`.

    The exact inverse of `compress(..., inplace=True)`. What fine-tuning did to the blocks stays; M and R are gone.
    Other methods (`pmvit.methods`) are taken off just so.
    """
    if method_of(model) is not None:
        return remove(model)
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
    adapter, description = describe(model, arguments)
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    plan_text = compression.plan.to_json() if compression is not None else None
    config = {
        "format": FORMAT,
        "version": VERSION,
        "pmvit": _pmvit_version(),
        "family": adapter.family,
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


def describe(model: nn.Module, arguments: dict[str, Any] | None = None) -> tuple[Adapter, dict[str, Any]]:
    """The adapter of a model, compressed or not, and the description from which it builds the model again.

    Raises:
        PmvitError: If it cannot.
    """
    original = _plain_copy(model)
    if is_compressed(original):
        decompress(original)
    adapter = adapter_for(original)
    description = adapter.describe(original, arguments)
    _check_description(adapter, original, description)
    return adapter, description


def check_output(path: Path) -> None:
    """Raise `PmvitError` if a model cannot be saved there."""
    if path.suffix != ".safetensors" and path.exists() and not path.is_dir():
        raise PmvitError(f"expected a folder, a new name or a name in .safetensors to save to, got the file {path}")
    check_writable(path if path.suffix == ".safetensors" else path / MODEL_FILE)


def _check_description(adapter: Adapter, original: nn.Module, description: dict[str, Any]) -> None:
    """Build the model from its description and see that it gives the same output; both are left in float32."""
    rebuilt = adapter.build(description)
    rebuilt.load_state_dict(original.state_dict())
    image = torch.randn(1, *adapter.input_size(original), generator=torch.Generator().manual_seed(0))
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
    model = adapter_of_family(config["family"]).build(config["model"]).to(getattr(torch, config["dtype"]))
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


def _grid(grid: tuple[int, int]) -> str:
    return f"{grid[0]} x {grid[1]}"
