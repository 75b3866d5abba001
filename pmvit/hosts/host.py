"""What pmvit has to know of a host, a model of another library: `Host`, and the registry that finds it for a model."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch.fx
from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock
from pmvit.errors import PmvitError
from pmvit.flow import Groups
from pmvit.hosts.groups import add_log_sizes, bias_at_centres, select_tokens
from pmvit.hosts.parts import AnyModule as AnyModule
from pmvit.hosts.parts import PlainParts
from pmvit.prune_merge import PruneMerge
from pmvit.windows import Windows
from pmvit.wrapping import HostChange as HostChange

# A traced model does not know yet whether it will be given a mask. Names are wrapped where they are called from.
torch.fx.wrap("bias_at_centres")
torch.fx.wrap("add_log_sizes")

EXAMPLE = """
    from pmvit.hosts import Host, TokenLayout, register

    @register
    class MyHost(Host):
        key, family = "my-vit", "MyViT of my_library"

        @classmethod
        def matches(cls, model):
            return isinstance(model, my_library.MyViT)

        def block_names(self):
            return [f"encoder.layers.{i}" for i in range(len(self.model.encoder.layers))]

        def layouts(self):
            return [TokenLayout(grid=(14, 14), num_prefix=1)] * len(self.block_names())

        def input_size(self):
            return (3, 224, 224)
"""

# Saved models named their host by these sentences before hosts had keys.
OLD_FAMILIES = {
    "timm plain ViT (VisionTransformer, DeiT, CLIP and SigLIP towers, hybrids, BEiT, EVA, DINOv3, ViT-RelPos)": (
        "timm-vit"
    ),
    "timm Swin (SwinTransformer, SwinTransformerV2)": "timm-swin",
    "timm feature extractor (features_only=True on a plain ViT)": "timm-features",
    "Hugging Face ViT (ViT, DeiT, BEiT, DINOv2, DINOv3, CLIP, SigLIP, MAE, YOLOS and what is built on them)": "hf-vit",
    "Hugging Face Swin (Swin, Swin v2)": "hf-swin",
    "torchvision VisionTransformer": "torchvision-vit",
    "torchvision Swin (swin_t, swin_s, swin_b, swin_v2_t, swin_v2_s, swin_v2_b)": "torchvision-swin",
    "Segmenter (linear or mask-transformer decoder on a timm VisionTransformer)": "segmenter",
    "segmentation_models_pytorch DPT (on a timm plain ViT)": "smp-dpt",
}


@dataclass(frozen=True)
class TokenLayout:
    """What the tokens of a block are: a grid of patches after `num_prefix` tokens of other kinds.

    Attributes:
        grid: How many patches there are along each axis: rows and columns; of videos time, rows and columns.
        num_prefix: How many tokens are no patches: class token, distillation token, registers.
        windows: The windows of the grid that attention stays inside, if it does.
        has_class_token: Whether the first token is a class token; if not given, it is where there are prefix tokens.
        num_suffix: How many of the prefix tokens the host puts behind the patches instead (YOLOS).
        only_mlp: Attention stays inside the host's own windows, on all tokens (SAM): the MLP alone can run on groups.
    """

    grid: tuple[int, ...]
    num_prefix: int
    windows: Windows | None = None
    has_class_token: bool | None = None
    num_suffix: int = 0
    only_mlp: bool = False

    def __post_init__(self) -> None:
        if self.has_class_token is None:
            object.__setattr__(self, "has_class_token", self.num_prefix > 0)

    @property
    def num_patches(self) -> int:
        return math.prod(self.grid)

    @property
    def drawn_grid(self) -> tuple[int, int]:
        """Rows and columns of the patches in a picture: of videos, with one frame below the other."""
        return math.prod(self.grid[:-1]), self.grid[-1]

    @property
    def num_tokens(self) -> int:
        return self.num_prefix + self.num_patches


class Outputs(NamedTuple):
    """What a model puts out.

    Attributes:
        gives_logits: Scores of classes; otherwise an embedding or features.
        num_classes: How many classes an image may have; `None` if the model is no image classifier.
        pixel_classes: How many classes a pixel may have; `None` if the model does not label pixels.
        returns_tensor: Calling the model with images gives a tensor; if not, `pmvit.hosts.outputs` makes one of it.
    """

    gives_logits: bool = True
    num_classes: int | None = None
    pixel_classes: int | None = None
    returns_tensor: bool = True


class Reading(NamedTuple):
    """Where tokens are read outside the blocks.

    Attributes:
        spans: The names of the blocks, first to last, parted wherever anything but the next block reads or changes the
            tokens, as a feature pyramid does.
        num_read: How many of the first tokens are read behind the last block; `None` for all of them.
        default_skip: Blocks that a fixed plan leaves alone unless it is told which; negative ones count from the last.
        scored_skip: The same for plans from scores, where the paper leaves others alone.
    """

    spans: list[list[str]]
    num_read: int | None = None
    default_skip: tuple[int, ...] = ()
    scored_skip: tuple[int, ...] = ()


class PartNames(NamedTuple):
    """Paths of parts of a block.

    Attributes:
        mlp: What normalises tokens before the MLP, and the MLP or its parts, first to last, if the block computes
            `y + f(mlp(norm(y)))` and all three work on each token by itself. Without, the MLP runs on the tokens that
            attention runs on.
        without_tokens: Parts whose cost does not depend on the number of tokens.
        on_padding: Parts that also run on the padding of windows, attention among them.
    """

    mlp: tuple[str, ...] | None = None
    without_tokens: tuple[str, ...] = ()
    on_padding: tuple[str, ...] = ()


class Host:
    """What pmvit knows of one model. Four methods say where blocks and tokens are; the others have a default.

    The values that Eq. 9 needs are read where every host calls `scaled_dot_product_attention`.

    Attributes:
        key: A short name that never changes: saved models name their host by it.
        family: Which models these are, for people.
        takes_attention_bias: A block can add a bias to its attention scores, which then count the members of groups.
        keeps_grid: The blocks take and return tokens in rows and columns.
        rotary_argument: What blocks call the rotary embedding of each patch, if they are called with one.
        bias_arguments: What blocks call what is added to their attention scores; a bias that counts members goes to
            the first of them that a block takes, or to the last.
    """

    key: str
    family: str
    takes_attention_bias: bool = False
    keeps_grid: bool = False
    rotary_argument: str = ""
    bias_arguments: tuple[str, ...] = ()

    def __init__(self, model: nn.Module) -> None:
        self.model: AnyModule = model

    @property
    def layout(self) -> TokenLayout:
        """That of the first block."""
        return self.layouts()[0]

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Required: whether this class knows the model."""
        raise _missing(cls, "matches")

    def block_names(self) -> list[str]:
        """Required: the module paths of the transformer blocks, first to last."""
        raise _missing(type(self), "block_names")

    def layouts(self) -> list[TokenLayout]:
        """Required: what the tokens of each block are, first to last."""
        raise _missing(type(self), "layouts")

    def input_size(self) -> tuple[int, ...]:
        """Required: the shape of one example that the model takes: of an image, its channels, height and width."""
        raise _missing(type(self), "input_size")

    def call(self, images: Tensor) -> Any:
        """Run the model on images."""
        return self.model(images)

    def outputs(self) -> Outputs:
        """What the model puts out: logits of `model.num_classes` classes, unless a host says otherwise."""
        return Outputs(num_classes=getattr(self.model, "num_classes", None) or None)

    def reading(self) -> Reading:
        """Where tokens are read outside the blocks: all of them behind the last one, unless a host says otherwise."""
        return Reading([self.block_names()])

    def prepare(self) -> list[HostChange]:
        """Change what has to be changed outside the blocks before they are wrapped; return what was changed."""
        return []

    def fit(self, wrapper: PruneMerge | AdaptiveBlock, layout: TokenLayout) -> list[HostChange]:
        """Reduce what a wrapped block holds per token (position biases) to the group centres; return what changed.

        With an adaptive plan, groups are other ones in every pass: see `OfGroups`.
        """
        return []

    def answer_like(self, module: nn.Module, block: nn.Module) -> None:
        """Give a module that takes the place of a block, all tokens in and all out, what else is expected of one."""

    @classmethod
    def arguments_at_centres(cls, wrapper: PruneMerge | Groups, arguments: dict[str, Any]) -> dict[str, Any]:
        """Reduce what a block is called with per token (rotary embedding, masks) to the group centres.

        A host that `takes_attention_bias` also passes `wrapper.log_sizes` to the block, if there are any.
        """
        reduced = dict(arguments)
        if (rotary := reduced.get(cls.rotary_argument)) is not None:
            parts = rotary if isinstance(rotary, tuple) else (rotary,)
            chosen = tuple(select_tokens(part, wrapper.patch_centres, -2) for part in parts)
            reduced[cls.rotary_argument] = chosen if isinstance(rotary, tuple) else chosen[0]
        for name in cls.bias_arguments:
            if reduced.get(name) is not None:
                reduced[name] = bias_at_centres(reduced[name], wrapper.centres)
        if wrapper.log_sizes is not None and cls.bias_arguments:
            name = cls._bias_argument(wrapper)
            reduced[name] = add_log_sizes(reduced.get(name), wrapper.log_sizes)
        return reduced

    @classmethod
    def _bias_argument(cls, wrapper: PruneMerge | Groups) -> str:
        """Which of `bias_arguments` counts the members of groups in a block."""
        return next((name for name in cls.bias_arguments if name in wrapper.argument_names), cls.bias_arguments[-1])

    def freeze_control_flow(self) -> None:
        """Make constants of tensors that decide outside the blocks what runs: no graph can ask them."""

    def plain_parts(self, block: nn.Module, arguments: dict[str, Any]) -> PlainParts | None:
        """What a block is made of, if it is plain: normalise, attend, add; normalise, MLP, add. `None` otherwise.

        Args:
            block: The host's block; if it is compressed, after `fit`.
            arguments: What it is called with beside the tokens, by name; if it is compressed, at the group centres.
        """
        return None

    def part_names(self, block: nn.Module) -> PartNames:
        """Where in a block are parts that costs and plans have to tell apart."""
        return PartNames()

    def observed(self, counting: bool = False) -> AbstractContextManager[Any]:
        """Let attention go through `scaled_dot_product_attention` and nothing be computed twice, then as before.

        Args:
            counting: Products are to be counted; where the model's own can be, it may stay as it is.
        """
        return nullcontext()

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        """What `build` needs to make the same (uncompressed) model again, as JSON data."""
        raise _missing(type(self), "describe")

    @classmethod
    def build(cls, description: dict[str, Any]) -> nn.Module:
        """Make the model that `describe` described, with any weights and without a network."""
        raise _missing(cls, "build")

    def data_config(self) -> dict[str, Any]:
        """How images are prepared for the model: timm's data configuration."""
        raise _missing(type(self), "data_config")


@runtime_checkable
class Resizable(Protocol):
    """A host of models that can be brought to images of another size."""

    def set_size(self, height: int, width: int) -> None:
        """Bring the model, which is not compressed, to images of this size; `PmvitError` if it is for one."""


def for_one_size(model: nn.Module) -> PmvitError:
    """That a model cannot be brought to another size."""
    return PmvitError(
        f"img_size: expected a model that can be brought to another size; a {type(model).__name__} is for one: make "
        "it for the other, and compress that; an adaptive plan fits both"
    )


def _missing(host: type[Host], method: str) -> PmvitError:
    return PmvitError(
        f"the host {host.__name__} has no `{method}`: add that method to use pmvit for this with its models"
    )


AnyHost = TypeVar("AnyHost", bound=Host)
_hosts: list[type[Host]] = []


def register(host: type[AnyHost]) -> type[AnyHost]:
    """Class decorator: make a host known. Those registered last are asked first."""
    for name in ("key", "family"):
        if not isinstance(getattr(host, name, None), str):
            raise PmvitError(f"expected a text as `{name}` of the host {host.__name__}; there is none")
    _hosts.insert(0, host)
    return host


def supported_families() -> list[str]:
    """The families of all hosts."""
    return [host.family for host in reversed(_hosts)]


def find_host(model: nn.Module) -> Host | None:
    """The host of a model, `None` if there is none."""
    return next((host(model) for host in _hosts if host.matches(model)), None)


def host_of(model: nn.Module) -> Host:
    """Find the host of a model.

    Raises:
        PmvitError: If there is none; the message lists the families and shows how to add one.
    """
    host = find_host(model)
    if host is not None:
        return host
    families = "".join(f"\n  - {family}" for family in supported_families())
    raise PmvitError(
        f"expected one of the supported vision transformers; no host knows a {type(model).__module__}."
        f"{type(model).__name__}\nSupported are:{families}\n"
        f"To add it, say where its blocks and tokens are:\n{EXAMPLE}"
    )


def host_class(key: str) -> type[Host]:
    """Find a host by its key, as a saved model has it."""
    for host in _hosts:
        if host.key == key:
            return host
    raise PmvitError(f"expected one of the hosts {', '.join(host.key for host in reversed(_hosts))}; got {key!r}")
