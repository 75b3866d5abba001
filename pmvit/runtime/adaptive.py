"""Deployment passes for adaptive plans: between blocks travel groups and sizes, and what is not read is not computed.

Blocks are rewritten as for fixed plans (see `optimize`). All tokens come back behind the last block, and only where
somebody reads them: every step is undone in turn, each token gets its group's and what set it apart from it.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock, MergeStep, places_after, take
from pmvit.config import InferenceConfig
from pmvit.errors import PmvitError
from pmvit.hosts import Host, TokenLayout
from pmvit.hosts.groups import bias_at_centres
from pmvit.hosts.parts import PlainParts
from pmvit.merged_mlp import MeanOfPatches, mlp_matrices_of
from pmvit.prune_merge import is_recorded
from pmvit.runtime.blocks.arguments import answer_like_block, arguments_of
from pmvit.runtime.blocks.build import inference_block
from pmvit.runtime.blocks.fold import Tables, Turn, sum_of
from pmvit.runtime.blocks.step import GraphStep


class Carried(NamedTuple):
    """What goes from one stage to the next.

    Attributes:
        tokens: Prefix tokens and groups, (batch, tokens, width).
        sizes: How many tokens each stands for, `None` before the first step.
        bias: What sizes add to attention scores, (batch, 1, 1 or tokens, tokens).
        undo: For every step so far, if all tokens are to come back: where each token went, and what set it apart.
        centres: The token that stands for each, (batch, tokens), if blocks have to know where it is.
    """

    tokens: Tensor
    sizes: Tensor | None = None
    bias: Tensor | None = None
    undo: tuple[tuple[Tensor, Tensor], ...] = ()
    centres: Tensor | None = None


class Positions(nn.Module):
    """What a block holds for the positions of all tokens, given out for the groups of each image.

    Args:
        parts: Of the block.
        num_tokens: Of the model, prefix tokens included.
    """

    bias: Tensor | None

    def __init__(self, parts: PlainParts, num_tokens: int) -> None:
        super().__init__()
        like = parts.projection.weight
        bias = None if parts.bias is None else parts.bias.detach().to(like)
        self.register_buffer("bias", bias, persistent=False)
        self.turn = None if parts.rotary is None else Turn(parts.rotary, num_tokens, like)

    def forward(self, centres: Tensor, bias: Tensor | None) -> tuple[Tensor | None, Tables | None]:
        """What is added to attention scores, sizes (`bias`) included, and by what queries and keys are turned."""
        turn = None if self.turn is None else self.turn.at_centres(centres)
        return sum_of(None if self.bias is None else bias_at_centres(self.bias, centres), bias), turn


class AdaptiveStage(nn.Module):
    """A step, if there is one, and a rewritten block.

    Args:
        step: What merges tokens before the block.
        block: Takes tokens and what sizes add to attention scores.
        mlp: The block's MLP, if it is not in it and runs on the mean of patches.
        layout: Of the model's tokens.
        size_weight: Part of the logarithm of sizes.
        is_last: Give out tokens alone.
        gives_all: All tokens come back in the end.
        full_bias: Write what sizes add out for every query, which costs fused attention in eager PyTorch less.
        positions: What the block holds for the positions of tokens, if anything.
        keeps_centres: This block or a later one asks for them.
    """

    def __init__(
        self,
        step: MergeStep | GraphStep | None,
        block: nn.Module,
        mlp: tuple[MeanOfPatches, nn.Module] | None,
        *,
        layout: TokenLayout,
        size_weight: float,
        is_last: bool,
        gives_all: bool,
        full_bias: bool,
        positions: Positions | None,
        keeps_centres: bool,
    ) -> None:
        super().__init__()
        self.step, self.block, self.positions, self.keeps_centres = step, block, positions, keeps_centres
        self.layout = layout
        self.mean: MeanOfPatches | None = None if mlp is None else mlp[0]
        self.mlp: nn.Module | None = None if mlp is None else mlp[1]
        self.size_weight, self.is_last, self.gives_all, self.full_bias = size_weight, is_last, gives_all, full_bias

    def forward(self, given: Tensor | Carried, *positional: object, **arguments: object) -> Tensor | Carried:
        carried = given if isinstance(given, Carried) else Carried(checked_size(given, self.layout))
        tokens, sizes, bias, undo, centres = carried if self.step is None else self._merge(carried)
        image_bias, image_turn = bias, None
        if self.positions is not None and centres is not None:
            image_bias, image_turn = self.positions(centres, bias)
        tokens = self.block(tokens, *positional, image_bias=image_bias, image_turn=image_turn, **arguments)
        if self.mean is not None and self.mlp is not None:
            merged = self.mean.merge_tokens(tokens)
            tokens = tokens + self.mean.spread(self.mlp(merged) - merged, tokens.shape[1])
        if not self.is_last:
            return Carried(tokens, sizes, bias, undo, centres)
        for places, difference in reversed(undo):
            tokens = take(tokens, places) + difference
        return tokens

    def _merge(self, carried: Carried) -> Carried:
        step = self.step
        if step is None:
            raise TypeError("expected a stage with a step")
        before, sizes, _, undo, centres = carried
        tokens, sizes, choice = step(before, sizes, self.layout.num_patches)
        if self.keeps_centres:
            if centres is None:
                centres = torch.arange(before.shape[1], device=before.device).expand(before.shape[0], -1)
            centres = centres.gather(1, choice.kept)
        if self.gives_all:
            places = places_after(choice)
            undo = (*undo, (places, before - take(tokens, places)))
        if not self.size_weight:
            return Carried(tokens, sizes, None, undo, centres)
        bias = sizes.log().mul(self.size_weight).reshape(-1, 1, 1, tokens.shape[1])
        if self.full_bias:
            bias = bias.expand(-1, -1, tokens.shape[1], -1).contiguous()
        return Carried(tokens, sizes, bias, undo, centres)


def checked_size(tokens: Tensor, layout: TokenLayout) -> Tensor:
    """The tokens, or `PmvitError` if they are not as many as rewritten blocks are for."""
    if not is_recorded(tokens) and tokens.shape[1] != layout.num_tokens:
        raise PmvitError(
            f"expected {layout.num_tokens} tokens, got {tokens.shape[1]}: a model that is optimised for inference is "
            "for one image size: pmvit.compression.at_size gives the model another before"
        )
    return tokens


def place_adaptive_stages(model: nn.Module, host: Host, config: InferenceConfig) -> bool:
    """Rewrite a model with an adaptive plan, if all its blocks are plain and in one run; return whether they are.

    Feature pyramids stay as they are. There is nothing to fuse here, and no form to choose: what merges is no matrix.
    """
    spans, num_read = host.reading()[:2]
    if len(spans) > 1 or not config.rewrite:
        return False
    names, count = spans[0], host.layout.num_tokens
    blocks = {name: model.get_submodule(name) for name in names}
    inside = {name: block.block if isinstance(block, AdaptiveBlock) else block for name, block in blocks.items()}
    arguments = arguments_of(host)
    plain: dict[str, PlainParts] = {}
    steps = {name: block.step for name, block in blocks.items() if isinstance(block, AdaptiveBlock)}
    for name in names:
        parts = host.plain_parts(inside[name], arguments[name].at_centres)
        if parts is None:
            return False
        plain[name] = parts
    num_read = num_read if config.tokens == "head" else None
    size_weight = next((block.size_weight for block in blocks.values() if isinstance(block, AdaptiveBlock)), 0.0)
    located = [name for name in steps if plain[name].rotary is not None or plain[name].bias is not None]
    for name in names:
        step = steps.get(name)
        if step is not None:
            count -= step.merges
        is_last = name == names[-1]
        num_outputs = num_read if is_last and num_read is not None and config.shortcut else count
        inplace, given = config.target == "eager" and name != names[0], arguments[name].given
        order, mlp = torch.arange(count), None
        mean = mlp_matrices_of(inside[name], host.part_names(inside[name]).mlp)
        if isinstance(mean, MeanOfPatches) and num_read is None:  # all get what the compressed model gives
            left = mean.num_prefix + mean.num_groups
            mlp = mean, inference_block(plain[name], order[:left], left, config.target, False, "mlp")
        positions, parts = None, plain[name]
        if name in located:
            positions, parts = Positions(parts, host.layout.num_tokens), parts._replace(bias=None)
        block = inference_block(
            parts, order, num_outputs, config.target, inplace, None if mlp is None else "attention", given
        )
        stage = AdaptiveStage(
            step if step is None or config.target == "eager" else GraphStep(step, explicit=config.target == "onnx"),
            block,
            mlp,
            layout=host.layout,
            size_weight=size_weight,
            is_last=is_last,
            gives_all=num_read is None,
            full_bias=config.target == "eager",
            positions=positions,
            keeps_centres=any(names.index(each) >= names.index(name) for each in located),
        )
        answer_like_block(stage, arguments[name].num_beside)
        model.set_submodule(name, stage)
    return True
