"""What all methods share: a method is its options, and wraps the blocks of a model when `compress` is given it."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pmvit.compression import wrap_blocks
from pmvit.config.training import Learn
from pmvit.data.opening import ImageData
from pmvit.errors import PmvitError
from pmvit.files import check_fields, config_from, parse_json, typed
from pmvit.hosts import HostChange
from pmvit.hosts.segmenter.model import Segmenter
from pmvit.hosts.timm.parts import is_plain
from pmvit.wrapping import WrappedBlock

M = TypeVar("M", bound="Method")
METHODS: dict[str, type["Method"]] = {}  # by their names
Encoder = Any  # timm's vision transformer: its attributes have no types


class Site(NamedTuple):
    """Where a block is in an encoder.

    Attributes:
        number: Of the block, from 0.
        depth: How many blocks there are.
        num_prefix: How many tokens stand before the patches.
        grid: Rows and columns of patches.
        dense: What reads the tokens after the last block needs every one of them, in its place.
    """

    number: int
    depth: int
    num_prefix: int
    grid: tuple[int, int]
    dense: bool

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]


class MethodBlock(WrappedBlock, Generic[M]):
    """A block as a method runs it.

    A subclass has a `forward` from tokens to tokens. If blocks pass more than tokens to each other, it has a `run`
    instead: its arguments are the tokens and what the block before returned beside them (nothing, for the first), and
    it returns the tokens and what the next block gets.
    """

    block: Any
    run: Callable[..., tuple[Any, ...]]

    def __init__(self, block: Any, site: Site, method: M) -> None:
        super().__init__()
        self.block = block
        self.training = block.training
        self.site = site
        self.num_prefix = site.num_prefix
        self.is_last = site.number == site.depth - 1
        self.method = method

    def forward(self, state: Any) -> Any:
        state = self.run(*state) if isinstance(state, tuple) else self.run(state)
        return state[0] if self.is_last else state


@dataclass(frozen=True)
class Method(ABC):
    """A way to run a vision transformer on fewer tokens. The fields of a subclass are its options, all JSON data.

    A subclass with a name can be called by it (`METHODS`, `make_method`).

    Attributes:
        name: To call it by.
        title: As its paper writes it.
        block_class: What takes the place of a block.
        gives_all_tokens: Whether every token comes out again, in its place.
        needs_class_token: Whether it reads the attention of a class token.
        needs_class_pooling: Whether the head has to read the class token alone.
        needs_training: Whether it has weights of its own, which are of no use before they are trained.
        needs_images: Whether it has to `fit` a model and images before it can be put on the model.
        old_options: Names that options had in files of earlier versions, and those that they have now.
    """

    kind: ClassVar[str] = "method"
    name: ClassVar[str]
    title: ClassVar[str]
    block_class: ClassVar[type[MethodBlock[Any]]]
    gives_all_tokens: ClassVar[bool] = False
    needs_class_token: ClassVar[bool] = False
    needs_class_pooling: ClassVar[bool] = False
    needs_training: ClassVar[bool] = False
    needs_images: ClassVar[bool] = False
    old_options: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            METHODS[cls.name] = cls

    def wraps(self, site: Site) -> bool:
        """Whether a block is run in another way; raises `PmvitError` if the options do not fit the model."""
        return True

    @classmethod
    @abstractmethod
    def options_at(cls, strength: float, encoder: Encoder, options: dict[str, Any]) -> dict[str, Any]:
        """The options that say how much is reduced, beside those that are given; see `at`."""

    @classmethod
    def at(cls: type[M], strength: float, encoder: Encoder, **options: Any) -> M:
        """The method for an encoder at a strength of 0 (nothing is reduced) to 1 (as much as it can), with options."""
        return cls(**cls.options_at(strength, encoder, options), **options)

    def fit(self: M, model: nn.Module, data: ImageData) -> M:
        """The method with what it chooses for a model by images (see `as_loader`); for one that `needs_images`."""
        return self.choose(self.observe(model, data))

    @classmethod
    def observe(cls, model: nn.Module, data: ImageData) -> Any:
        """What a method that needs images has to know of a model and its images, whatever its strength."""
        raise PmvitError(f"{cls.name} is put on a model as it is; got data, which it would not look at")

    def choose(self: M, observed: Any) -> M:
        """The method with what it chooses by what `observe` returned."""
        return self

    def to_json(self) -> str:
        """Its name and options, from which `from_json` makes it again."""
        return json.dumps(self.describe())

    def describe(self) -> dict[str, Any]:
        """Its name and options as JSON data."""
        return {"name": self.name, "options": asdict(self)}

    def tensors(self) -> dict[str, Tensor]:
        """What is saved beside `to_json`: nothing."""
        return {}

    @staticmethod
    def from_json(text: str, where: str = "method", tensors: Mapping[str, Tensor] | None = None) -> "Method":
        """The method that `to_json` wrote; there are no tensors beside it."""
        description = check_fields(parse_json(text, where), ("name", "options"), where)
        name = typed(str, description["name"], f"{where}: name")
        return make_method(name, **typed(dict[str, Any], description["options"], f"{where}: options"))


def make_method(name: str, **options: Any) -> Method:
    """A method by its name, with its options.

    Raises:
        PmvitError: If there is no such method or option.
    """
    kind = method_called(name)
    return config_from(kind, {kind.old_options.get(key, key): value for key, value in options.items()}, name)


def method_called(name: str) -> type[Method]:
    """The kind of method that goes by a name."""
    if name not in METHODS:
        raise PmvitError(f"expected one of the methods {', '.join(METHODS)}; got {name!r}")
    return METHODS[name]


def encoder_of(model: nn.Module) -> Encoder:
    """The vision transformer of a model: of a Segmenter its encoder, else the model itself; `PmvitError` if there is
    none with plain blocks of timm's.
    """
    encoder: Encoder = model.encoder if isinstance(model, Segmenter) else model
    if not isinstance(encoder, VisionTransformer) or not all(is_plain(block) for block in encoder.blocks):
        raise PmvitError(
            f"expected a timm VisionTransformer with plain blocks, or a Segmenter on one, for another method; got a "
            f"{type(encoder).__name__}"
        )
    return encoder


@wrap_blocks.register
def _(method: Method, model: nn.Module, learn: Learn) -> list[HostChange]:
    """For timm's vision transformers with plain blocks, and for a Segmenter on one."""
    if learn != "group":
        raise PmvitError(f"learn: it is for the matrices of a plan, of which {method.name} has none; got {learn!r}")
    encoder = encoder_of(model)
    dense = isinstance(model, Segmenter)
    if method.needs_class_token and encoder.cls_token is None:
        raise PmvitError(f"{method.name} goes by the attention of the class token; this model has none")
    if dense and not method.gives_all_tokens:
        raise PmvitError(f"a Segmenter reads every token, and {method.name} does not give them back: use another")
    if method.needs_class_pooling and encoder.global_pool != "token":
        raise PmvitError(
            f"{method.name} needs a model that reads the class token alone; this one has "
            f"global_pool={encoder.global_pool!r}"
        )
    grid, depth, num_prefix = tuple(encoder.patch_embed.grid_size), len(encoder.blocks), encoder.num_prefix_tokens
    sites = [Site(number, depth, num_prefix, grid, dense) for number in range(depth)]
    made = {
        site.number: method.block_class(encoder.blocks[site.number], site, method)
        for site in sites
        if method.wraps(site)
    }
    for number, wrapper in made.items():
        encoder.blocks[number] = wrapper
    encoder.to(next(encoder.parameters()).device)  # what the method brings is made on the CPU
    return []


def check_size(tokens: Tensor, expected: int) -> None:
    """Raise `ValueError` if there are other than so many tokens, (batch, tokens, width)."""
    if tokens.shape[1] != expected:
        raise ValueError(f"expected {expected} tokens, got {tokens.shape[1]}: are the images of another size?")


def numbers_of_blocks(blocks: Sequence[int], depth: int, option: str) -> set[int]:
    """Block numbers, of which negative ones count from the last, as numbers from 0."""
    if unknown := [block for block in blocks if not -depth <= block < depth]:
        raise PmvitError(f"{option}: expected blocks of 0 ... {depth - 1}, got {unknown[0]}")
    return {block % depth for block in blocks}
