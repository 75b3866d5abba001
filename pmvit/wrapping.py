"""What a compressed model is made of: blocks that hold the model's own, and one record of what was done."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isdatadescriptor
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

Tuned = Literal["calibrated", "fine-tuned"]


@dataclass(frozen=True)
class TrainingPass:
    """One pass of a model while training, as wrapped blocks may learn from it.

    Attributes:
        images: As the model got them.
        logits: What it made of them.
        wanted: The class that each image should have: its label, or what the teacher says.
    """

    images: Tensor
    logits: Tensor
    wanted: Tensor


class WrappedBlock(nn.Module):
    """Takes the place of a transformer block and runs it its own way; `block` is the block as it was."""

    block: nn.Module

    def extra_loss(self, model: nn.Module, last: TrainingPass | None) -> Tensor | None:
        """What the last pass of the model while training adds to the loss, once; `None` for nothing."""
        return None


def extra_loss(model: nn.Module, last: TrainingPass | None = None) -> Tensor | None:
    """What the wrapped blocks of a model add to the loss after a pass while training; `None` for nothing."""
    blocks = [module for module in model.modules() if isinstance(module, WrappedBlock)]
    losses = [loss for block in blocks if (loss := block.extra_loss(model, last)) is not None]
    return torch.stack(losses).sum() if losses else None


class Recipe(Protocol):
    """What `compress` takes: a plan, or a method of `pmvit.methods`. JSON data, and perhaps tensors.

    Attributes:
        kind: The name of its kind in saved models, which hold it in `<kind>.json`.
        title: What to call it in texts.
    """

    kind: ClassVar[str]
    title: ClassVar[str]

    def to_json(self) -> str: ...

    def tensors(self) -> Mapping[str, Tensor]:
        """What saved models hold of it beside the JSON, which it is made of again with these."""


@dataclass(frozen=True)
class Original:
    """The model that was compressed, to find it again when its weights have been trained since.

    Attributes:
        fingerprint: Of its weights; `None` in models that version 0.1 saved.
        source: What it was opened from, as `create_model` takes it, if known.
        weights: The file that its weights were read from, if there was one.
        arguments: What else `create_model` got.
        saved: Models that pmvit saved on the way from it, first to last; they may still hold its weights.
    """

    fingerprint: str | None
    source: str | None = None
    weights: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    saved: tuple[str, ...] = ()


class HostChange(NamedTuple):
    """One attribute of a host's module, or another object, that was changed, and what it was before."""

    module: Any
    attribute: str
    original: Any
    is_own: bool  # not one of its class, which comes back when that of the object is gone

    @classmethod
    def make(cls, module: Any, attribute: str, value: Any) -> "HostChange":
        """Change an attribute, and remember it."""
        of_class = getattr(type(module), attribute, None)
        is_own = of_class is None or isdatadescriptor(of_class) or attribute in vars(module)
        change = cls(module, attribute, getattr(module, attribute), is_own)
        setattr(module, attribute, value)
        return change

    def undo(self) -> None:
        """Make the attribute again what it was."""
        if self.is_own:
            setattr(self.module, self.attribute, self.original)
        else:
            delattr(self.module, self.attribute)


def take_off(model: nn.Module, changes: Sequence[HostChange]) -> None:
    """Undo what was changed, and unwrap the blocks: the model is made of the very objects it was made of before."""
    for change in reversed(changes):
        change.undo()
    for name, module in list(model.named_modules()):
        if isinstance(module, WrappedBlock):
            model.set_submodule(name, module.block)


@dataclass(frozen=True)
class Compression:
    """What was done to a model; `compress` leaves it on the model as `model.compression`.

    Attributes:
        what: The plan or the method.
        learn: What fine-tuning may change of the matrices of a plan.
        changes: Attributes of host modules that were changed.
        original: The model as it was.
        tuned: What its weights have learned from since, in order: `calibrated`, `fine-tuned`.
    """

    what: Recipe
    learn: Literal["group", "dense"]
    changes: tuple[HostChange, ...]
    original: Original
    tuned: tuple[Tuned, ...] = ()


def compression_of(model: nn.Module) -> Compression | None:
    """What was done to the model, `None` if it is not compressed."""
    found = getattr(model, "compression", None)
    return found if isinstance(found, Compression) else None


def fingerprint(model: nn.Module) -> str:
    """A short name for a model's weights: the same for the same class and weights, on any device, and for no others."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        if not parameter.is_meta:
            value = parameter.detach().cpu().contiguous()
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
