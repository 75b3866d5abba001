"""Heads that somebody put in the place of a library's own: layers of PyTorch, one after the other, as JSON data."""

from collections import OrderedDict
from typing import Any

from torch import nn

from pmvit.errors import PmvitError

# Each with the arguments that can be read off it.
LAYERS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("in_features", "out_features"),
    nn.LayerNorm: ("normalized_shape", "eps", "elementwise_affine"),
    nn.BatchNorm1d: ("num_features", "eps", "momentum", "affine", "track_running_stats"),
    nn.Dropout: ("p",),
    nn.GELU: ("approximate",),
    nn.ReLU: (),
    nn.SiLU: (),
    nn.Tanh: (),
    nn.Identity: (),
}
KINDS = {kind.__name__: kind for kind in LAYERS}


def describe_head(head: nn.Module) -> list[list[Any]] | None:
    """The name, kind and arguments of every layer; `None` if a head is no row of such layers."""
    if type(head) is not nn.Sequential or any(type(layer) not in LAYERS for layer in head.children()):
        return None
    found = []
    for name, layer in head.named_children():
        arguments = {argument: getattr(layer, argument) for argument in LAYERS[type(layer)]}
        arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
        if isinstance(layer, (nn.Linear, nn.LayerNorm)):
            arguments["bias"] = layer.bias is not None
        found.append([name, type(layer).__name__, arguments])
    return found


def make_head(layers: Any) -> nn.Sequential:
    """The head that `describe_head` described, with any weights."""
    made: OrderedDict[str, nn.Module] = OrderedDict()
    for layer in layers if isinstance(layers, list) else [layers]:
        parts: list[Any] = layer if isinstance(layer, list) and len(layer) == 3 else [None, "", None]
        name, kind, arguments = parts
        accepted = {*LAYERS.get(KINDS.get(kind, nn.Module), ()), "bias"}
        if (
            not isinstance(name, str)
            or kind not in KINDS
            or not isinstance(arguments, dict)
            or set(arguments) - accepted
        ):
            raise PmvitError(f"expected layers of a head, {', '.join(KINDS)} with their arguments; got {layer!r}")
        made[name] = KINDS[kind](**arguments)
    return nn.Sequential(made)
