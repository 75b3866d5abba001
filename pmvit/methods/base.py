"""What all methods share: a method is its options, it wraps the blocks of a model, and it can be taken off again."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

from timm.models.vision_transformer import VisionTransformer
from torch import nn

from pmvit.errors import PmvitError
from pmvit.files import config_from
from pmvit.models.segmenter import Segmenter
from pmvit.models.timm_inference import is_plain

Model = TypeVar("Model", bound=nn.Module)
MethodClass = TypeVar("MethodClass", bound="type[Method]")
Host = Any  # timm's models: nn.Modules whose attributes have no types


class MethodBlock(nn.Module):
    """Stands in the place of a block and runs it its own way; `block` is the block as it was."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block


@dataclass(frozen=True)
class Method(ABC):
    """A way to run a vision transformer on fewer tokens. The fields of a subclass are its options, all JSON data."""

    name: ClassVar[str]

    @abstractmethod
    def wrap(self, encoder: Host, *, dense: bool) -> None:
        """Put `MethodBlock`s in the place of blocks of an encoder, one of timm's vision transformers.

        Args:
            encoder: To change.
            dense: What reads the tokens after the last block needs every one of them, in its place.
        """

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
    if name not in METHODS:
        raise PmvitError(f"expected one of the methods {', '.join(METHODS)}; got {name!r}")
    try:
        return config_from(METHODS[name], options, name)
    except TypeError as error:
        raise PmvitError(f"{name}: an option is missing or of the wrong kind ({error})") from None


def method_from(description: Any) -> Method:
    """The method that `Method.describe` described."""
    if not isinstance(description, dict) or set(description) != {"name", "options"}:
        raise PmvitError(f"expected a method with its name and options, got {description!r}")
    return make_method(description["name"], **description["options"])


def apply(model: Model, method: Method, *, inplace: bool = False) -> Model:
    """Put a method on a copy of a model, or on the model itself.

    Raises:
        PmvitError: If the model is not one of timm's vision transformers, or a Segmenter on one, with plain blocks.
    """
    encoder: Any = model.encoder if isinstance(model, Segmenter) else model
    if not isinstance(encoder, VisionTransformer) or not all(is_plain(block) for block in encoder.blocks):
        raise PmvitError(
            f"expected a timm VisionTransformer with plain blocks, or a Segmenter on one, for {method.name}; got a "
            f"{type(encoder).__name__}"
        )
    if not inplace:
        model = copy.deepcopy(model)
    method.wrap(model.encoder if isinstance(model, Segmenter) else model, dense=isinstance(model, Segmenter))
    model.method = method  # type: ignore[assignment]  # a record, not a module
    return model


def method_of(model: nn.Module) -> Method | None:
    """The method that was put on a model, `None` if there is none."""
    found = getattr(model, "method", None)
    return found if isinstance(found, Method) else None


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
