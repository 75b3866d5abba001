"""What pmvit has to know of a host model, and the registry that finds the adapter of a model."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pmvit.config.inference import Target
from pmvit.errors import PmvitError
from pmvit.prune_merge import PruneMerge
from pmvit.windows import Windows

EXAMPLE = """
    from pmvit.hosts import Adapter, TokenLayout, register

    @register
    class MyViT(Adapter):
        family = "MyViT of my_library"

        def matches(self, model):
            return isinstance(model, my_library.MyViT)

        def layout(self, model):
            return TokenLayout(grid=(14, 14), num_prefix=1)

        def block_names(self, model):
            return [f"encoder.layers.{i}" for i in range(len(model.encoder.layers))]

        def input_size(self, model):
            return (3, 224, 224)
"""


Half = Literal["attention", "mlp"]  # of a block, each with what normalises before it and the addition after it
DATA_KEYS = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")  # of `Adapter.data_config`


class TokenLayout(NamedTuple):
    """Where the tokens of a block come from: a grid of patches, after `num_prefix` tokens of other kinds.

    Where attention stays inside windows of the grid, `windows` says which.
    """

    grid: tuple[int, int]
    num_prefix: int
    windows: Windows | None = None

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_tokens(self) -> int:
        return self.num_prefix + self.num_patches


class Run(NamedTuple):
    """How a block is to run for inference: it computes its first `num_outputs` tokens, with keys and values of all.

    Attributes:
        num_tokens: How many tokens it gets.
        num_outputs: How many tokens to compute.
        bias: To add to the attention scores of each token, if any.
        target: What is to run it.
        inplace: It may write to its input.
        half: Only this half of it; its MLP computes every token it gets.
    """

    num_tokens: int
    num_outputs: int
    bias: Tensor | None
    target: Target
    inplace: bool
    half: Half | None = None


class HostChange(NamedTuple):
    """One attribute of a host module that compression had to change, and what it was before."""

    module: nn.Module
    attribute: str
    original: Any


class Adapter:
    """Knows one family of host models. A subclass has to say where the blocks and the tokens are; the rest is optional.

    The values that Eq. 9 needs are read where every host hands them to `scaled_dot_product_attention`.
    """

    family: str
    takes_attention_bias: bool = False
    keeps_grid: bool = False  # the blocks take and return tokens in rows and columns
    returns_tensor: bool = True  # calling the model with images gives a tensor; if not, `call` may do something else

    def call(self, model: nn.Module, images: Tensor) -> Any:
        """Run the model on images; `pmvit.hosts.outputs` makes a tensor of what comes out."""
        return model(images)

    def gives_logits(self, model: nn.Module) -> bool:
        """Whether it puts out scores of classes; otherwise an embedding or features."""
        return True

    def num_classes(self, model: nn.Module) -> int | None:
        """How many classes an image may have; `None` if the model is no image classifier."""
        return getattr(model, "num_classes", None) or None

    def pixel_classes(self, model: nn.Module) -> int | None:
        """How many classes a pixel may have; `None` if the model is none that labels pixels."""
        return None

    def default_skip(self, model: nn.Module) -> tuple[int, ...]:
        """Blocks that a plan leaves alone unless it is told which; negative numbers count from the last."""
        return ()

    def matches(self, model: nn.Module) -> bool:
        """Whether this adapter serves the model."""
        raise _missing(self, "matches")

    def layout(self, model: nn.Module) -> TokenLayout:
        """The token grid and the number of prefix tokens, at the first block."""
        raise _missing(self, "layout")

    def layouts(self, model: nn.Module) -> list[TokenLayout]:
        """The layout at each block, first to last; the same at all of them unless an adapter says otherwise."""
        return [self.layout(model)] * len(self.block_names(model))

    def block_names(self, model: nn.Module) -> list[str]:
        """The module paths of the transformer blocks, first to last."""
        raise _missing(self, "block_names")

    def input_size(self, model: nn.Module) -> tuple[int, int, int]:
        """Channels, height and width of the images the model takes."""
        raise _missing(self, "input_size")

    def runs(self, model: nn.Module) -> list[list[str]]:
        """The names of the blocks, parted where anything else than a block reads or changes the tokens in between."""
        return [self.block_names(model)]

    def prepare(self, model: nn.Module) -> list[HostChange]:
        """Change what has to be changed outside the blocks before they are wrapped; return what was changed."""
        return []

    def fit(self, wrapper: PruneMerge, layout: TokenLayout) -> list[HostChange]:
        """Make a wrapped block run on its groups; return what was changed. `narrow` is enough for most hosts."""
        return self.narrow(wrapper)

    def stand_in(self, module: nn.Module, block: nn.Module) -> None:
        """Let a module that takes the place of a block, all tokens in and all out, do what the host expects of one."""

    def narrow(self, wrapper: PruneMerge) -> list[HostChange]:
        """Reduce to the groups what a block holds per token (position biases); return what was changed."""
        return []

    def narrow_arguments(self, wrapper: PruneMerge, arguments: dict[str, Any]) -> dict[str, Any]:
        """Reduce to the groups what a block is called with per token (rotary embedding, masks).

        An adapter that `takes_attention_bias` also hands the block `wrapper.log_sizes`, if there are any.
        """
        return arguments

    def num_suffix(self, model: nn.Module) -> int:
        """How many of the prefix tokens stand behind the patches when a block hands them on."""
        return 0

    def has_class_token(self, model: nn.Module) -> bool:
        """Whether the first token is a class token."""
        return self.layout(model).num_prefix > 0

    def parts_without_tokens(self, block: nn.Module) -> list[str]:
        """Paths of parts of a block whose cost does not depend on the tokens it runs on."""
        return []

    def mlp_parts(self, block: nn.Module) -> tuple[str, str] | None:
        """Names of a block's two parts, what normalises tokens and the MLP, if it computes `y + f(mlp(norm(y)))`.

        Both have to look at each token by itself, and f as well. `None` if the block computes anything else: then its
        MLP runs on the tokens that attention runs on.
        """
        return None

    def parts_on_padding(self, block: nn.Module) -> list[str]:
        """Paths of parts of a block, attention among them, that run on the padding of windows as on tokens."""
        return []

    def tokens_read(self, model: nn.Module) -> int | None:
        """How many of the first tokens are read after the blocks; `None` for all of them."""
        return None

    def settle(self, model: nn.Module) -> None:
        """Make a constant of what decides the course of a model outside its blocks, in a copy that is only to run."""

    def inference_block(self, block: nn.Module, run: Run) -> nn.Module:
        """A block for inference alone, for which `computes_partly` is true, that runs as it is told."""
        raise _missing(self, "inference_block")

    def halves(self, block: nn.Module) -> tuple[nn.Module, nn.Module] | None:
        """A block as its library runs it, in two: tokens with the update of attention, then with that of the MLP.

        `None` where it cannot be taken apart. Only benchmarks ask: they slice tokens away in between.
        """
        return None

    def computes_partly(self, block: nn.Module) -> bool:
        """Whether `inference_block` knows the block; its tokens may then come in any order."""
        return False

    def for_scoring(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Put the model in the state scoring needs (fused attention on, no recomputation) and back afterwards."""
        return nullcontext()

    def for_counting(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Put the model in a state in which every product can be counted; usually that for scoring."""
        return self.for_scoring(model)

    def describe(self, model: nn.Module, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        """What `build` needs to make the same (uncompressed) model again, as JSON data."""
        raise _missing(self, "describe")

    def build(self, description: dict[str, Any]) -> nn.Module:
        """Make the model that `describe` described, with any weights and without a network."""
        raise _missing(self, "build")

    def data_config(self, model: nn.Module) -> dict[str, Any]:
        """How images are prepared for the model: timm's data configuration."""
        raise _missing(self, "data_config")


def _missing(adapter: Adapter, method: str) -> PmvitError:
    return PmvitError(
        f"the adapter {type(adapter).__name__} has no `{method}`: add that method to use pmvit for this with its models"
    )


_adapters: list[Adapter] = []


def register(adapter: type[Adapter]) -> type[Adapter]:
    """Class decorator: add an adapter. Those registered last are asked first."""
    _adapters.insert(0, adapter())
    return adapter


def supported_families() -> list[str]:
    """The families that have an adapter."""
    return [adapter.family for adapter in reversed(_adapters)]


def find_adapter(model: nn.Module) -> Adapter | None:
    """The adapter of a model, `None` if no adapter knows it."""
    return next((adapter for adapter in _adapters if adapter.matches(model)), None)


def adapter_for(model: nn.Module) -> Adapter:
    """Find the adapter of a model.

    Raises:
        PmvitError: If no adapter knows the model; the message lists the families and shows how to add one.
    """
    adapter = find_adapter(model)
    if adapter is not None:
        return adapter
    families = "".join(f"\n  - {family}" for family in supported_families())
    raise PmvitError(
        f"expected one of the supported vision transformers; no adapter knows a {type(model).__module__}."
        f"{type(model).__name__}\nSupported are:{families}\n"
        f"To add it, say where its blocks and tokens are:\n{EXAMPLE}"
    )


def adapter_of_family(family: str) -> Adapter:
    """Find an adapter by the name of its family, as a saved model has it."""
    for adapter in _adapters:
        if adapter.family == family:
            return adapter
    raise PmvitError(f"expected one of the families {', '.join(supported_families())}; got {family!r}")


def select_tokens(tensor: Tensor, tokens: Tensor, *dims: int) -> Tensor:
    """Keep only `tokens` along each of the dimensions of a tensor."""
    for dim in dims:
        tensor = tensor.index_select(dim, tokens)
    return tensor


def narrow_bias(bias: Tensor, centres: Tensor) -> Tensor:
    """Keep the rows and columns of the centres of a bias or mask; a dimension of size 1 is broadcast and stays."""
    return select_tokens(bias, centres, *(dim for dim in (-2, -1) if bias.shape[dim] > 1))


def add_log_sizes(bias: Tensor | None, log_sizes: Tensor) -> Tensor:
    """Add the logarithm of each key's group size to the bias; a boolean mask becomes an additive one."""
    if bias is None:
        return log_sizes[None, None, None, :]
    if bias.dtype == torch.bool:
        return log_sizes.expand(bias.shape).masked_fill(~bias, float("-inf"))
    return bias + log_sizes.to(bias.dtype)
