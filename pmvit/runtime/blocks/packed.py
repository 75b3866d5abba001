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

from pmvit.hosts.parts import Gelu
from pmvit.runtime.blocks.arguments import TokensAlone

TRIED_ROWS = 256  # about as many as a block sees of an image or two
TRIED_ROUNDS = 9


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, gelu: Gelu | None = None) -> Tensor:
    """A linear layer and, if asked for, a GELU, exact (`none`) or with `tanh`."""
    result = F.linear(rows, weight, bias)
    return result if gelu is None else F.gelu(result, approximate=gelu)


def packed_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, gelu: Gelu | None = None) -> Tensor:
    """The same with packed weights; a graph of torch.jit, which cannot hold them, gets dense ones."""
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        return linear(rows, untraced_dense(weight), bias, gelu)
    after = "none" if gelu is None else "gelu"
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, after, [], gelu or "")
    return result


def untraced_dense(weight: Tensor) -> Tensor:
    """Packed weights as they were before they were packed, a constant of the graph that is being traced."""
    tracer: Any = torch._C  # whose types leave this out
    state = tracer._get_tracing_state()
    tracer._set_tracing_state(None)
    try:
        return weight.to_dense()
    finally:
        tracer._set_tracing_state(state)


def can_pack(weight: Tensor) -> bool:
    """Whether this PyTorch can lay out these weights."""
    is_float_on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return is_float_on_cpu and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@lru_cache(maxsize=256)
def is_faster(shapes: tuple[tuple[int, int], ...], threads: int) -> bool:
    """Whether this machine multiplies faster with packed weights of these shapes, tried out: it depends on both."""
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        rows = [torch.randn(TRIED_ROWS, width) for _, width in shapes]
        plain = [torch.randn(shape) for shape in shapes]
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in plain]
        seconds: dict[Any, list[float]] = {linear: [], packed_linear: []}
        for _ in range(TRIED_ROUNDS):
            for function, weights in ((linear, plain), (packed_linear, packed)):
                begun = perf_counter()
                for table, weight in zip(rows, weights, strict=True):
                    function(table, weight, None)
                seconds[function].append(perf_counter() - begun)
    return median(seconds[packed_linear]) < median(seconds[linear])


class Packable(TokensAlone):
    """A module some of whose weights, `packable` by name, may be packed.

    `linear` multiplies with the weights as they are. While the module is moved or copied, they are dense; packed ones
    are packed again afterwards where that can be done.
    """

    packable: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear

    @property
    def is_packed(self) -> bool:
        return self.linear is packed_linear

    def pack(self, even_if_slower: bool) -> None:
        """Pack all packable weights if that can be done, and is tried out to be faster."""
        weights = {name: self.get_parameter(name).detach() for name in self.packable}
        shapes = tuple((weight.shape[0], weight.shape[1]) for weight in weights.values())
        can_all = all(map(can_pack, weights.values()))
        if not can_all or not (even_if_slower or is_faster(shapes, torch.get_num_threads())):
            return
        for name, weight in weights.items():
            delattr(self, name)
            setattr(self, name, torch.ops.mkldnn._reorder_linear_weight(weight))
        self.linear = packed_linear

    def __getstate__(self) -> dict[str, Any]:
        """With dense weights, as they were before they were packed."""
        packed = self.packable if self.is_packed else ()
        dense = {name: nn.Parameter(self.__dict__[name].to_dense(), requires_grad=False) for name in packed}
        state = {name: value for name, value in self.__dict__.items() if name not in dense}
        return {**state, "_parameters": {**self._parameters, **dense}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.is_packed:
            self.linear = linear
            self.pack(even_if_slower=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Packable":
        was_packed = self.is_packed
        if was_packed:
            self.__dict__ = {**self.__getstate__(), "linear": linear}  # dense
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_packed:
            self.pack(even_if_slower=True)
        return self
