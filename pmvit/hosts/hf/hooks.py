"""What blocks of Hugging Face transformers need while they run on groups of tokens."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pmvit.adaptive import AdaptiveBlock
from pmvit.errors import PmvitError
from pmvit.hosts.groups import OfGroups, bias_at_centres
from pmvit.hosts.hf.tower import Tower
from pmvit.hosts.host import AnyModule
from pmvit.hosts.modes import changed
from pmvit.prune_merge import PruneMerge


def config_of(block: AnyModule) -> AnyModule:
    """The configuration that the attention of a block looks at."""
    return next((module.config for module in block.modules() if hasattr(module, "config")), None)


def num_suffix(block: AnyModule) -> int:
    """How many tokens stand behind the patches: the detection tokens of YOLOS."""
    return int(getattr(config_of(block), "num_detection_tokens", 0))


def _with_first(place: int, tokens: Tensor) -> Tensor:
    """The class token, then the tokens from a place on, then the others.

    It brings tokens from behind the patches to the front, which blocks do not mind, and back again.
    """
    return torch.cat([tokens[:, :1], tokens[:, place:], tokens[:, 1:place]], dim=1)


def _before_block(suffix: int, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_with_first(-suffix, arguments[0]), *arguments[1:])


def _after_block(suffix: int, _: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
    tokens = arguments[0]
    if suffix:
        tokens, output = _with_first(suffix + 1, tokens), _with_first(suffix + 1, output)
    _correct_hidden_states(tokens, output)
    return output


def answer_like_host(module: nn.Module, suffix: int) -> list[RemovableHandle]:
    """Let a module in the place of a block have all tokens that are no patches in front, and nobody else notice.

    Outside, tokens stand in the order of the host, and all of them are in `output_hidden_states`.
    """
    handles = [module.register_forward_hook(partial(_after_block, suffix))]
    if suffix:
        handles.append(module.register_forward_pre_hook(partial(_before_block, suffix)))
    return handles


@contextmanager
def reordered(blocks: list[nn.Module]) -> Iterator[None]:
    """All tokens that are no patches in front while the blocks run, as the recorder of scores expects them."""
    with ExitStack() as hooks:
        for block in blocks:
            for handle in answer_like_host(block, num_suffix(block)) if num_suffix(block) else ():
                hooks.enter_context(handle)
        yield


def _correct_hidden_states(tokens: Tensor, output: Any) -> None:
    """transformers records what its own blocks take and return, here groups: put all tokens in their place."""
    from transformers.utils.output_capturing import _active_collector

    states = (_active_collector.get() or {}).get("hidden_states")
    if not states or states[-1] is None:
        return
    if len(states) == 2 and states[0] is not None and states[0].shape == states[1].shape:  # what the first block took
        states[0] = tokens
    states[-1] = output[0] if isinstance(output, tuple) else output


def in_order(tower: Tower, images: Tensor) -> dict[str, Any]:
    """Arguments that keep MAE from shuffling the patches; none for the others."""
    if not hasattr(tower.embeddings, "random_masking"):
        return {}
    height, width = (side // patch for side, patch in zip(images.shape[2:], tower.projection.stride, strict=True))
    return {"noise": torch.arange(height * width, device=images.device).float().expand(len(images), -1)}


def without_masking(tokens: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What MAE's `random_masking` returns if it hides and shuffles nothing: tokens, mask, and where each belongs."""
    batch, count = tokens.shape[:2]
    return tokens, tokens.new_zeros(batch, count), torch.arange(count, device=tokens.device).expand(batch, -1)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """No gradients instead of inference mode: transformers keeps position tables that training would then trip over."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def in_sdpa(model: AnyModule) -> AbstractContextManager[None]:
    """All attention through `scaled_dot_product_attention`, whatever the model was loaded with, and back afterwards."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    changes: list[tuple[Any, str, Any]] = [(config, "_attn_implementation", "sdpa") for config in configs.values()]
    for module in model.modules():
        name = type(module).__name__.replace("SelfAttention", "SdpaSelfAttention")
        fused = getattr(sys.modules[type(module).__module__], name, None) if "SelfAttention" in name else None
        if fused is not None and type(module) is not fused:  # Data2Vec has a class for each
            changes.append((module, "forward", MethodType(fused.forward, module)))
    return changed(changes)


class BiasAtCentres(OfGroups):
    """The relative position bias of a block (BEiT, Data2Vec), between the group centres only."""

    def __init__(self, full: nn.Module, wrapper: PruneMerge | AdaptiveBlock) -> None:
        super().__init__(wrapper)
        self.full = full

    def forward(self, window_size: Any, interpolate_pos_encoding: bool = False, dim_size: int | None = None) -> Tensor:
        """As the host calls it, which gives the number of groups as `dim_size`."""
        num_tokens = 1 + math.prod(window_size)  # of all patches, and the class token
        bias: Tensor = self.full(window_size, interpolate_pos_encoding, dim_size=num_tokens)
        centres, _ = self.groups(bias)
        return bias if centres is None else bias_at_centres(bias, centres)


def takes_tokens_alone(block: nn.Module) -> bool:
    """Whether a block hands nothing on to its attention but tokens (InternVL), so that a bias cannot get there."""
    return len(signature(block.forward).parameters) == 1


class BiasedAttention(OfGroups):
    """The attention of a block that takes tokens alone, which counts the members of groups."""

    def __init__(self, attend: Callable[..., Any], wrapper: PruneMerge | AdaptiveBlock) -> None:
        super().__init__(wrapper)
        self.attend = attend

    def forward(self, tokens: Tensor) -> Any:
        """As the block calls it."""
        return self.attend(tokens, self.bias_of_sizes(tokens))


def check_takes_bias(block: nn.Module, name: str) -> None:
    """Raise `PmvitError` if the chosen attention ignores or refuses an additive bias."""
    implementation = getattr(config_of(block), "_attn_implementation", None)
    able = ("sdpa",) if name == "position_bias" else ("eager", "sdpa", None)
    if name != "relative_position_bias" and implementation not in able:
        raise PmvitError(
            f"the attention implementation {implementation!r} takes no bias: make the plan with attention_bias=False, "
            'or call model.set_attn_implementation("sdpa")'
        )
