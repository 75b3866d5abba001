"""Multiply-accumulates and parameters, counted on the graph that really runs."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from pmvit.adaptive import AdaptiveBlock
from pmvit.files import typed
from pmvit.hosts import Host, host_of
from pmvit.hosts.modes import evaluation_mode, frozen_parameters
from pmvit.hosts.outputs import Predictor, as_module
from pmvit.merged_mlp import MergedNorm, SpreadMlp
from pmvit.prune_merge import PruneMerge, TokenMatrices

aten = torch.ops.aten


def _attention_flop(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _embedding_bag_flop(table: Any, indices: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """A multiply and an add for every number that a segment sum reads."""
    return 2 * int(indices[0]) * int(table[1])


def _packed_linear_flop(rows: Any, weight: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(2 * prod(rows) * weight[0])


# PyTorch's counter knows neither the CPU's fused attention nor segment sums, nor products with packed weights.
_FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flop,
    aten._embedding_bag: _embedding_bag_flop,
    aten._embedding_bag_forward_only: _embedding_bag_flop,
}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    _FORMULAS[torch.ops.mkldnn._linear_pointwise] = _packed_linear_flop
_FUSED_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
}
_WRITTEN_OUT = {aten.bmm, aten.baddbmm}  # attention, where no operator does it at once


@dataclass(frozen=True)
class BlockCost:
    """Multiply-accumulates of one uncompressed block, as a function of its tokens.

    Attributes:
        linear: What grows with the tokens (projections, MLP), for all tokens of the image.
        quadratic: What grows with their square (attention), for all tokens of the image.
        constant: What is the same for any number of tokens (the network behind a position bias).
        width: Embedding dimension of the tokens.
        padded: Of `linear`, what runs on the padding of windows, too.
        mlp: Of `linear`, what the MLP takes, where it can run on tokens of its own.
    """

    linear: int
    quadratic: int
    constant: int
    width: int
    padded: int = 0
    mlp: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            typed(int, value, name)

    def halves(self) -> tuple["BlockCost", "BlockCost"]:
        """Attention and MLP apart."""
        rest = BlockCost(self.linear - self.mlp, self.quadratic, self.constant, self.width, self.padded)
        return rest, BlockCost(self.mlp, 0, 0, self.width)

    def macs(self, share: float, places: float | None = None) -> float:
        """The block alone, run on this share of its tokens, and of the places of its windows if it has any."""
        if places is None:
            return self.constant + self.linear * share + self.quadratic * share**2
        on_tokens = (self.linear - self.padded) * share
        return self.constant + on_tokens + self.padded * places + self.quadratic * places**2


@dataclass(frozen=True)
class ModelCost:
    """Multiply-accumulates of an uncompressed model: what lies outside its blocks, and each block."""

    outside: int
    blocks: tuple[BlockCost, ...]

    def __post_init__(self) -> None:
        typed(int, self.outside, "outside")

    @property
    def macs(self) -> float:
        return self.outside + sum(block.macs(1.0) for block in self.blocks)


@dataclass(frozen=True)
class Flops:
    """What one image costs.

    Attributes:
        macs: Multiply-accumulates of everything, merge and reconstruct included.
        module_macs: Those of merging and reconstructing alone.
        parameters: How many the model has, the weights of M and R included.
        module_parameters: Those of M and R alone.
    """

    macs: int
    module_macs: int
    parameters: int
    module_parameters: int

    @property
    def gflops(self) -> float:
        """Billions of multiply-accumulates: what papers on vision transformers print as GFLOPs."""
        return self.macs / 1e9


def elementwise_macs(num_tokens: int, num_groups: int, width: int) -> int:
    """The shortcut of a compressed block (Eq. 5-7): one operation an element, for the groups and for the tokens."""
    return (num_tokens + num_groups) * width


def _count(model: nn.Module) -> defaultdict[str, Counter[Any]]:
    """Run one image through the model in evaluation mode and count: multiply-accumulates by module and operator.

    Modules have their names in the model; what the whole of it takes is under the empty name.
    """
    parameter = next(model.parameters())
    host = host_of(model)
    image = torch.zeros(1, *host.input_size(), device=parameter.device, dtype=parameter.dtype)
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    module = as_module(model)
    with evaluation_mode(model), frozen_parameters(model), host.observed(counting=True), torch.no_grad(), counter:
        module(image)
    root = type(module).__name__ + (".model." if isinstance(module, Predictor) else ".")
    result: defaultdict[str, Counter[Any]] = defaultdict(Counter)
    for name, counts in counter.get_flop_counts().items():
        of_module = {operator: count // 2 for operator, count in counts.items()}
        result["" if name == "Global" else name.removeprefix(root)] = Counter(of_module)
    return result


def flops(model: nn.Module) -> Flops:
    """Count the multiply-accumulates of one image, and the parameters.

    What runs is counted: products of matrices, convolutions, attention and segment sums as PyTorch executes them, and
    the element-wise shortcut of every compressed block. Like the papers of the field, one multiply-accumulate counts
    as one FLOP, and normalisation, activations and residual additions of the host do not count.
    """
    counts, host = _count(model), host_of(model)
    products = shortcuts = 0
    for name, module in model.named_modules():
        if isinstance(module, (MergedNorm, SpreadMlp)):
            products += counts[name].total() - counts[f"{name}.mlp"].total()
        elif isinstance(module, (AdaptiveBlock, PruneMerge)) and counts[name]:  # or only its block was called
            products += counts[name].total() - counts[f"{name}.block"].total()
            if isinstance(module, AdaptiveBlock):
                num_tokens, num_groups = host.layout.num_tokens, module.count
            else:
                num_tokens, num_groups = module.token_mask.numel(), module.centres.numel()
            shortcuts += elementwise_macs(num_tokens, num_groups, block_width(host, module.block))
    return Flops(
        macs=counts[""].total() + shortcuts,
        module_macs=products + shortcuts,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        module_parameters=sum(
            module.merge_weights.numel() + module.reconstruct_weights.numel()
            for module in model.modules()
            if isinstance(module, TokenMatrices)
        ),
    )


def model_cost(model: nn.Module) -> ModelCost:
    """Measure what each block of an uncompressed model costs and how it grows with the number of tokens."""
    counts, host = _count(model), host_of(model)
    blocks = []
    for name in host.block_names():
        block = model.get_submodule(name)
        parts = host.part_names(block)
        fused, written_out = (
            sum(count for operator, count in counts[name].items() if operator in operators)
            for operators in (_FUSED_ATTENTION, _WRITTEN_OUT)
        )
        quadratic = fused or written_out  # beside fused attention, products are of relative positions: linear
        constant = sum(counts[f"{name}.{part}"].total() for part in parts.without_tokens)
        linear = counts[name].total() - quadratic - constant
        inside = [counts[f"{name}.{part}"].total() for part in parts.on_padding]
        padded = sum(inside) - quadratic - constant if inside else 0
        mlp = sum(counts[f"{name}.{part}"].total() for part in (parts.mlp or ())[1:])
        blocks.append(BlockCost(linear, quadratic, constant, block_width(host, block), padded, mlp))
    return ModelCost(counts[""].total() - sum(int(block.macs(1.0)) for block in blocks), tuple(blocks))


def block_width(host: Host, block: nn.Module) -> int:
    """The embedding dimension of a block's tokens: the input size of its first linear layer."""
    apart = tuple(f"{path}." for path in host.part_names(block).without_tokens)
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith(apart):
            return module.in_features
    return next(block.parameters()).shape[-1]
