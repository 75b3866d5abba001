"""What all methods share: a method is its options, it wraps the blocks of a model, and it can be taken off again."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.files import config_from
from pmvit.hosts.segmenter.model import Segmenter
from pmvit.hosts.timm.parts import is_plain

Model = TypeVar("Model", bound=nn.Module)
M = TypeVar("M", bound="Method")
MethodClass = TypeVar("MethodClass", bound="type[Method]")
Host = Any  # timm's models: nn.Modules whose attributes have no types


class MethodBlock(nn.Module):
    """Stands in the place of a block and runs it its own way; `block` is the block as it was."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.training = block.training

    def extra_loss(self) -> Tensor | None:
        """What the last pass while training adds to the loss, once; `None` for nothing."""
        return None


@dataclass(frozen=True)
class Step:
    """One pass of a model while training, as a method may learn from it.

    Attributes:
        images: As the model got them.
        logits: What it made of them.
        wanted: The class that each image should have: its label, or what the teacher says.
    """

    images: Tensor
    logits: Tensor
    wanted: Tensor


@dataclass(frozen=True)
class Method(ABC):
    """A way to run a vision transformer on fewer tokens. The fields of a subclass are its options, all JSON data.

    Attributes:
        name: To call it by.
        title: As its paper writes it.
        gives_all_tokens: Whether every token comes out again, in its place.
        needs_class_token: Whether it reads the attention of a class token.
        learns: Whether it has weights of its own, which are of no use before they are trained.
        looks: Whether it has to see images before it can be put on a model: `observe`, then `fit`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    gives_all_tokens: ClassVar[bool] = False
    needs_class_token: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    looks: ClassVar[bool] = False

    @abstractmethod
    def wrap(self, encoder: Host, *, dense: bool) -> None:
        """Put `MethodBlock`s in the place of blocks of an encoder, one of timm's vision transformers.

        Args:
            encoder: To change.
            dense: What reads the tokens after the last block needs every one of them, in its place.
        """

    @classmethod
    @abstractmethod
    def at(cls: type[M], strength: float, encoder: Host, **options: Any) -> M:
        """The method at a strength of 0 (nothing is reduced) to 1 (as much as it can).

        Args:
            strength: The more of it, the fewer FLOPs.
            encoder: That it is for.
            options: Those of the method but the one that says how much it reduces.
        """

    @classmethod
    def observe(cls, model: nn.Module, data: Iterable[Any]) -> Any:
        """What a method that looks has to know of a model and its images, whatever its strength."""
        raise PmvitError(f"{cls.name} is put on a model as it is; got data, which it would not look at")

    def fit(self: M, observed: Any) -> M:
        """The method with what it chooses by what it observed."""
        return self

    def extra_loss(self, model: nn.Module, step: Step | None) -> Tensor | None:
        """What the last pass of a model while training adds to the loss, once; `None` for nothing."""
        blocks = [module for module in model.modules() if isinstance(module, MethodBlock)]
        losses = [loss for block in blocks if (loss := block.extra_loss()) is not None]
        return torch.stack(losses).sum() if losses else None

    def describe(self) -> dict[str, Any]:
        """What `method_from` needs to make it again, as JSON data."""
        return {"name": self.name, "options": asdict(self)}


METHODS: dict[str, type[Method]] = {}


def register(method: MethodClass) -> MethodClass:
    """Class decorator: let a method be called by its name."""
    METHODS[method.name] = method
    return method


def make_method(name: str, **options: Any) -> Method:
    """A method with its options.

    Raises:
        PmvitError: If there is no such method or option.
    """
    kind = method_called(name)
    try:
        return config_from(kind, options, name)
    except TypeError as error:
        raise PmvitError(f"{name}: an option is missing or of the wrong kind ({error})") from None


def method_called(name: str) -> type[Method]:
    """The kind of method that goes by a name."""
    if name not in METHODS:
        raise PmvitError(f"expected one of the methods {', '.join(METHODS)}; got {name!r}")
    return METHODS[name]


def method_from(description: Any) -> Method:
    """The method that `Method.describe` described."""
    if not isinstance(description, dict) or set(description) != {"name", "options"}:
        raise PmvitError(f"expected a method with its name and options, got {description!r}")
    return make_method(description["name"], **description["options"])


def encoder_of(model: nn.Module) -> Host:
    """The vision transformer of a model: of a Segmenter its encoder, else the model itself."""
    return model.encoder if isinstance(model, Segmenter) else model


def apply(model: Model, method: Method, *, inplace: bool = False) -> Model:
    """Put a method on a copy of a model, or on the model itself.

    Raises:
        PmvitError: If the model is not one of timm's vision transformers, or a Segmenter on one, with plain blocks; or
            if the method cannot do what the model needs.
    """
    encoder = encoder_of(model)
    if not isinstance(encoder, VisionTransformer) or not all(is_plain(block) for block in encoder.blocks):
        raise PmvitError(
            f"expected a timm VisionTransformer with plain blocks, or a Segmenter on one, for {method.name}; got a "
            f"{type(encoder).__name__}"
        )
    if method.needs_class_token and encoder.cls_token is None:
        raise PmvitError(f"{method.name} goes by the attention of the class token; this model has none")
    dense = isinstance(model, Segmenter)
    if dense and not method.gives_all_tokens:
        raise PmvitError(f"a Segmenter reads every token, and {method.name} does not give them back: use another")
    if not inplace:
        model = copy.deepcopy(model)
    encoder = encoder_of(model)
    method.wrap(encoder, dense=dense)
    encoder.to(next(encoder.parameters()).device)  # what the method brings is made on the CPU
    model.method = method  # type: ignore[assignment]  # a record, not a module
    return model


def method_of(model: nn.Module) -> Method | None:
    """The method that was put on a model, `None` if there is none."""
    found = getattr(model, "method", None)
    return found if isinstance(found, Method) else None


def extra_loss(model: nn.Module, step: Step | None = None) -> Tensor | None:
    """What the method of a model adds to the loss after a pass while training; `None` for nothing."""
    method = method_of(model)
    return None if method is None else method.extra_loss(model, step)


def fitted(method: M, model: nn.Module, data: Iterable[Any] | None) -> M:
    """A method that has seen images, if it has to.

    Raises:
        PmvitError: If there are none, or it does not look at any.
    """
    return method if data is None else method.fit(method.observe(model, data))


def remove(model: Model) -> Model:
    """Take the method off a model, in place: its blocks are the very same objects as before."""
    for name, module in list(model.named_modules()):
        if isinstance(module, MethodBlock):
            model.set_submodule(name, module.block)
    del model.method
    return model


def numbers_of_blocks(blocks: Sequence[int], depth: int, option: str) -> set[int]:
    """Block numbers, of which negative ones count from the last, as numbers from 0."""
    if unknown := [block for block in blocks if not -depth <= block < depth]:
        raise PmvitError(f"{option}: expected blocks of 0 ... {depth - 1}, got {unknown[0]}")
    return {block % depth for block in blocks}
