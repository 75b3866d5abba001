"""Multiply-accumulates and parameters, counted on the graph that really runs."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from pmvit.adaptive import AdaptiveBlock
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
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten.bmm,
    aten.baddbmm,
}


@dataclass(frozen=True)
class BlockCost:
    """Multiply-accumulates of one uncompressed block, as a function of its tokens.

    Attributes:
        linear: What grows with the tokens (projections, MLP), for all tokens of the image.
        quadratic: What grows with their square (attention), for all tokens of the image.
        constant: What is the same for any number of tokens (the network behind a position bias).
        width: Numbers a token.
        padded: Of `linear`, what runs on the padding of windows, too.
        mlp: Of `linear`, what the MLP takes, where it can run on tokens of its own.
    """

    linear: int
    quadratic: int
    constant: int
    width: int
    padded: int = 0
    mlp: int = 0

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

    @property
    def macs(self) -> float:
        return self.outside + sum(block.macs(1.0) for block in self.blocks)


@dataclass(frozen=True)
class Flops:
    """What one image costs.

    Attributes:
        macs: Multiply-accumulates of everything, merge and reconstruct included.
        module_macs: Those of merging and reconstructing alone.
        parameters: Numbers in all parameters, the weights of M and R included.
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
    """The shortcut of a compressed block (Eq. 5-7): one operation a number, for the groups and for the tokens."""
    return (num_tokens + num_groups) * width


def _count(model: nn.Module) -> tuple[dict[str, dict[Any, int]], str]:
    """Run one image through the model in evaluation mode and count: FLOPs by module and operator, the model's name."""
    parameter = next(model.parameters())
    host = host_of(model)
    image = torch.zeros(1, *host.input_size(), device=parameter.device, dtype=parameter.dtype)
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    module = as_module(model)
    with evaluation_mode(model), frozen_parameters(model), host.observed(counting=True), torch.no_grad(), counter:
        module(image)
    root = type(module).__name__
    return counter.get_flop_counts(), f"{root}.model" if isinstance(module, Predictor) else root


def flops(model: nn.Module) -> Flops:
    """Count the multiply-accumulates of one image, and the parameters.

    What runs is counted: products of matrices, convolutions, attention and segment sums as PyTorch executes them, and
    the element-wise shortcut of every compressed block. Like the papers of the field, one multiply-accumulate counts
    as one FLOP, and normalisation, activations and residual additions of the host do not count.
    """
    counts, root = _count(model)
    host = host_of(model)
    wrappers = {name: module for name, module in model.named_modules() if isinstance(module, PruneMerge)}
    products = shortcuts = 0
    adaptive = {name: module for name, module in model.named_modules() if isinstance(module, AdaptiveBlock)}
    for name, block in adaptive.items():
        inside = sum(counts[f"{root}.{name}.block"].values())
        products += (sum(counts[f"{root}.{name}"].values()) - inside) // 2
        shortcuts += elementwise_macs(host.layout.num_tokens, block.count, block_width(host, block.block))
    for name, wrapper in wrappers.items():
        if f"{root}.{name}" not in counts:  # only its block was called, without the operations
            continue
        inside = sum(counts[f"{root}.{name}.block"].values())
        products += (sum(counts[f"{root}.{name}"].values()) - inside) // 2
        num_tokens, num_groups = wrapper.token_mask.numel(), wrapper.centres.numel()
        shortcuts += elementwise_macs(num_tokens, num_groups, block_width(host, wrapper.block))
    for name, module in model.named_modules():
        if isinstance(module, (MergedNorm, SpreadMlp)):
            inside = sum(counts.get(f"{root}.{name}.mlp", {}).values())
            products += (sum(counts.get(f"{root}.{name}", {}).values()) - inside) // 2
    return Flops(
        macs=sum(counts["Global"].values()) // 2 + shortcuts,
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
    counts, root = _count(model)
    blocks = []
    host = host_of(model)
    for name in host.block_names():
        block = model.get_submodule(name)
        by_operator = counts[f"{root}.{name}"]
        quadratic = sum(n for operator, n in by_operator.items() if operator in _ATTENTION) // 2
        apart = [counts.get(f"{root}.{name}.{part}", {}) for part in host.part_names(block).without_tokens]
        constant = sum(sum(part.values()) for part in apart) // 2
        linear = sum(by_operator.values()) // 2 - quadratic - constant
        inside = [counts.get(f"{root}.{name}.{part}", {}) for part in host.part_names(block).on_padding]
        padded = sum(sum(part.values()) for part in inside) // 2 - quadratic - constant if inside else 0
        parts = host.part_names(block).mlp
        mlp = sum(counts.get(f"{root}.{name}.{parts[1]}", {}).values()) // 2 if parts is not None else 0
        blocks.append(BlockCost(linear, quadratic, constant, block_width(host, block), padded, mlp))
    outside = sum(counts["Global"].values()) // 2 - sum(int(block.macs(1.0)) for block in blocks)
    return ModelCost(outside, tuple(blocks))


def block_width(host: Host, block: nn.Module) -> int:
    """Numbers a token: what the block's first projection takes."""
    apart = tuple(f"{path}." for path in host.part_names(block).without_tokens)
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith(apart):
            return module.in_features
    return next(block.parameters()).shape[-1]
