"""Linear layers whose weights are laid out beforehand as oneDNN's products read them, for eager PyTorch on a CPU.

oneDNN also applies a GELU while it writes the product. PyTorch's own compiler calls the same operators.
"""

from collections.abc import Callable
from functools import lru_cache
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRIED_ROWS = 256  # about as many as a block sees of an image or two
TRIED_ROUNDS = 9

LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def linear_gelu(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer and an exact GELU."""
    return F.gelu(F.linear(rows, weight, bias))


def _packed_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return result


def _packed_linear_gelu(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "gelu", [], "none")
    return result


def can_pack(weight: Tensor) -> bool:
    """Whether this PyTorch can lay out these weights."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


@lru_cache(maxsize=256)
def is_faster(shapes: tuple[tuple[int, int], ...], threads: int) -> bool:
    """Whether this machine multiplies faster with packed weights of these shapes, tried out: it depends on both."""
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        rows = [torch.randn(TRIED_ROWS, width) for _, width in shapes]
        plain = [torch.randn(shape) for shape in shapes]
        laid_out = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in plain]
        seconds: dict[LinearFunction, list[float]] = {F.linear: [], _packed_linear: []}
        for _ in range(TRIED_ROUNDS):
            for function, weights in ((F.linear, plain), (_packed_linear, laid_out)):
                begun = perf_counter()
                for table, weight in zip(rows, weights, strict=True):
                    function(table, weight, None)
                seconds[function].append(perf_counter() - begun)
    return median(seconds[_packed_linear]) < median(seconds[F.linear])


class Packable(nn.Module):
    """A module some of whose weights, `packable` by name, may be packed; while it is moved or copied, they are dense.

    `linear` and `linear_gelu` multiply with the weights as they are.
    """

    packable: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.linear: LinearFunction = F.linear
        self.linear_gelu: LinearFunction = linear_gelu

    def pack(self) -> None:
        """Pack all packable weights if that is worth while."""
        weights: dict[str, Tensor] = {name: self._parameters[name] for name in self.packable}  # type: ignore[misc]
        shapes = tuple((int(weight.shape[0]), int(weight.shape[1])) for weight in weights.values())
        if not (all(map(can_pack, weights.values())) and is_faster(shapes, torch.get_num_threads())):
            return
        for name, weight in weights.items():
            delattr(self, name)
            setattr(self, name, torch.ops.mkldnn._reorder_linear_weight(weight.detach()))
        self.linear, self.linear_gelu = _packed_linear, _packed_linear_gelu

    def _dense(self) -> dict[str, nn.Parameter]:
        return {
            name: nn.Parameter(self.__dict__[name].to_dense(), requires_grad=False)
            for name in self.packable
            if name in self.__dict__
        }

    def unpack(self) -> None:
        """Make all weights dense."""
        for name, weight in self._dense().items():
            delattr(self, name)
            self.register_parameter(name, weight)
        self.linear, self.linear_gelu = F.linear, linear_gelu

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Packable":
        self.unpack()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.pack()
        return self

    def __getstate__(self) -> dict[str, Any]:
        dense = self._dense()
        state = {name: value for name, value in self.__dict__.items() if name not in dense}
        state["_parameters"] = {**self._parameters, **dense}
        state["linear"], state["linear_gelu"] = F.linear, linear_gelu
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.pack()
