"""What measuring without labels begins with: a model, some images, and a random direction of the output."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pmvit._system import this_process
from pmvit.config.measuring import Measurement
from pmvit.data.batches import unpack, unreadable
from pmvit.errors import PmvitError
from pmvit.hosts import Host, host_of
from pmvit.hosts.modes import check_trainable
from pmvit.hosts.outputs import check_size
from pmvit.wrapping import compression_of


def opened(
    model: nn.Module, loader: Iterable[Any], limit: int, kind: Measurement, purpose: str
) -> tuple[Host, list[Tensor]]:
    """The host of a model that can be measured, and batches of so many images.

    Args:
        model: An uncompressed model.
        loader: Yields `(images, labels)` or images.
        limit: Images at most.
        kind: What is measured.
        purpose: What that is for, in a message.

    Raises:
        PmvitError: If the model is compressed, its windows leave nothing of the kind to measure, or there are no images
            of its size.
    """
    host = original_host(model, kind, purpose)
    batches = list(first_batches(loader, limit))
    if not batches:
        raise PmvitError(f"expected at least one batch of images; the loader is empty{unreadable(loader)}")
    for images in batches:
        check_size(host, images)
    return host, batches


def original_host(model: nn.Module, kind: Measurement, purpose: str) -> Host:
    """The host of a model; `PmvitError` if it is compressed, or its windows leave nothing of the kind to measure."""
    if compression_of(model) is not None:
        raise PmvitError("expected an uncompressed model to measure; this one is compressed: measure the original")
    check_trainable(model)
    host = host_of(model)
    check_measurable(host, kind, purpose)
    return host


def measurable(host: Host) -> tuple[Measurement, ...]:
    """What plans for a model can be made from, the usual first.

    All of it where every block attends over the whole of one grid. Where blocks run inside windows (Swin), scores
    alone; where windows leave the MLP of a block to itself (SAM), merge costs alone.
    """
    first, layouts = host.layout, host.layouts()
    if all(layout == first and layout.windows is None and not layout.only_mlp for layout in layouts):
        return ("adaptive", "measured", "scored")
    return ("measured",) if any(layout.only_mlp for layout in layouts) else ("scored",)


def check_measurable(host: Host, kind: Measurement, purpose: str) -> None:
    """Raise `PmvitError` if the windows of a model leave nothing of the kind to measure."""
    if kind not in (kinds := measurable(host)):
        raise PmvitError(
            f"expected attention over the whole of one grid to {purpose}; a {type(host.model).__name__} attends inside "
            f'windows: make a fixed plan, method="{kinds[0]}"'
        )


def probe(output: Tensor, is_logits: bool, generator: torch.Generator) -> Tensor:
    """A random direction of the output, for each image: the mean square of a change along it is what the change costs.

    Of logits, that is twice the divergence of the predictions, to second order (the covariance of the direction is the
    Fisher information `diag(p) - p p^T`); of any other output, the squared distance.
    """
    signs = torch.randint(0, 2, output.shape, generator=generator).to(output.device, output.dtype) * 2 - 1
    if not is_logits:
        return signs
    probabilities = output.detach().softmax(-1)
    direction = probabilities.sqrt() * signs
    return direction - probabilities * direction.sum(-1, keepdim=True)


def first_batches(loader: Iterable[Any], count: int) -> Iterator[Tensor]:
    """Batches of images until there are as many."""
    for batch in loader:
        images = unpack(batch)[0][:count]
        count -= len(images)
        yield images
        if count <= 0:
            return


def summed_over_processes(total: Tensor, images: int) -> tuple[Tensor, int]:
    """Add up what every process has, and of how many images; with one process, what it has."""
    if this_process()[1] == 1:
        return total, images
    packed = torch.cat([total.flatten(), total.new_tensor([images])])
    if torch.distributed.get_backend() == "nccl":
        packed = packed.cuda()
    torch.distributed.all_reduce(packed)
    return packed[:-1].view_as(total).cpu(), int(packed[-1])
