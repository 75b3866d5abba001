"""How large a model of a file is: found out from what the file says, before memory is taken for it."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import nn

from pmvit.config.training import Learn
from pmvit.errors import PmvitError
from pmvit.hosts import Host, find_host
from pmvit.hosts.making import MOST_PIXELS, MadeModel, at_most
from pmvit.planning import Plan
from pmvit.wrapping import Recipe

Shapes = Mapping[str, tuple[int, ...]]  # of the tensors in a file
MOST_BUFFERS = 2**30  # bytes that a model has beside what is in its file
TEMPORARY = 1000  # parameters that a library makes and drops again, and some


def check_fits(host: type[Host], description: dict[str, Any], shapes: Shapes, where: str) -> None:
    """Raise `PmvitError` if a file does not hold what the model of its description is made of."""
    if issubclass(host, MadeModel):  # how others are made, whoever wrote them knows
        check_made(lambda: host.build(description), shapes, where)


def check_made(make: Callable[[], nn.Module], shapes: Shapes, where: str) -> None:
    """Make a model that takes no memory, and compare it with the tensors in a file.

    Raises:
        PmvitError: If a parameter is not among these, if what is not in the file would take too much memory, or if the
            images are too large.
    """
    with torch.device("meta"), at_most(2 * len(shapes) + TEMPORARY, where):
        sketch = make()
    left = Counter(shapes.values())
    left.subtract(tuple(parameter.shape) for parameter in sketch.parameters())
    for name, parameter in sketch.named_parameters():
        if left[tuple(parameter.shape)] < 0:
            raise PmvitError(
                f"{where}: expected a tensor {name!r} of shape {tuple(parameter.shape)}, which its description calls "
                "for; the file holds none, or too few of that shape"
            )
    beside = sum(buffer.numel() * buffer.element_size() for buffer in sketch.buffers())
    if beside > MOST_BUFFERS:
        raise PmvitError(
            f"{where}: expected a model that needs up to {MOST_BUFFERS // 2**20:,} MiB beside its weights; this one "
            f"needs {beside // 2**20:,} MiB"
        )
    host = find_host(sketch)
    size = (0,) if host is None else host.input_size()
    if max(size) > MOST_PIXELS:
        raise PmvitError(
            f"{where}: expected images of up to {MOST_PIXELS:,} pixels a side; the model is for "
            f"{' x '.join(map(str, size))}"
        )


def check_matrices(what: Recipe, learn: Any, shapes: Shapes, where: str) -> None:
    """Raise `PmvitError` if the matrices of a plan, which may be as large as a plan says, are not in its file."""
    if learn not in get_args(Learn):
        raise PmvitError(f"{where}: learn: expected {' or '.join(get_args(Learn))}, got {learn!r}")
    if learn != "dense" or not isinstance(what, Plan):
        return
    sizes = [(layer.num_kept, layer.num_tokens) for layer in what.layers.values() if not layer.is_identity]
    sizes += [(layer.mlp.num_kept, layer.num_kept) for layer in what.layers.values() if layer.mlp is not None]
    left = Counter(shapes.values())
    left.subtract((*sizes, *((columns, rows) for rows, columns in sizes)))
    for rows, columns in sizes:
        if left[rows, columns] < 0 or left[columns, rows] < 0:
            raise PmvitError(
                f"{where}: expected matrices of {rows} x {columns} numbers, which its plan calls for; its file has none"
            )
