"""What the hosts of all libraries' Swin models have in common."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock
from pmvit.flow import Groups
from pmvit.hosts.host import Host, HostChange, PartNames, Reading, TokenLayout
from pmvit.hosts.modes import changed
from pmvit.hosts.parts import inner_block
from pmvit.hosts.swin.blocks import Names, WindowBlock
from pmvit.prune_merge import PRUNED, PruneMerge
from pmvit.windows import Windows


class SwinHost(Host, ABC):
    """Blocks stand in stages, each with a grid of half the size of the one before; all tokens reach the head."""

    takes_attention_bias = True
    keeps_grid = True

    def names(self, block: nn.Module) -> Names:
        """What a host's block calls its parts."""
        return Names()

    @abstractmethod
    def stages(self) -> list[str]:
        """The paths of the lists of blocks."""

    @abstractmethod
    def windows(self, block: nn.Module, grid: tuple[int, int]) -> Windows:
        """The windows of a block."""

    def first_grid(self) -> tuple[int, int]:
        """The token grid of the first stage."""
        _, height, width = self.input_size()
        rows, columns = next(module for module in self.model.modules() if isinstance(module, nn.Conv2d)).stride
        return (height // rows, width // columns)

    def block_names(self) -> list[str]:
        return [name for names in self.reading().spans for name in names]

    def layouts(self) -> list[TokenLayout]:
        grid = self.first_grid()
        result = []
        for names in self.reading().spans:
            blocks = [inner_block(self.model.get_submodule(name)) for name in names]
            result += [TokenLayout(grid, 0, self.windows(block, grid)) for block in blocks]
            grid = (-(-grid[0] // 2), -(-grid[1] // 2))  # an odd side is padded
        return result

    def reading(self) -> Reading:
        stages = {path: self.model.get_submodule(path) for path in self.stages()}
        return Reading([[f"{path}.{name}" for name, _ in blocks.named_children()] for path, blocks in stages.items()])

    def fit(self, wrapper: PruneMerge | AdaptiveBlock, layout: TokenLayout) -> list[HostChange]:
        if not isinstance(wrapper, PruneMerge):
            raise TypeError(f"expected groups of a fixed plan inside windows, got a {type(wrapper).__name__}")
        groups = torch.full((wrapper.num_patches,), PRUNED)
        groups[wrapper.token_mask.cpu() > 0] = wrapper.reconstruct_columns.cpu()
        names, centres = self.names(wrapper.block), wrapper.centres.cpu()
        block = WindowBlock(wrapper.block, names, groups, centres, layout, wrapper.log_sizes)
        return [HostChange.make(wrapper, "block", block.train(wrapper.block.training))]

    @classmethod
    def arguments_at_centres(cls, wrapper: PruneMerge | Groups, arguments: dict[str, Any]) -> dict[str, Any]:
        return {}  # what a host says beside the tokens (grid, masks) is in the plan

    def part_names(self, block: nn.Module) -> PartNames:
        prefix = "host." if isinstance(block, WindowBlock) else ""
        names = self.names(inner_block(block))
        return PartNames(None, (prefix + names.bias_network,), (prefix + names.attention,))

    def observed(self, counting: bool = False) -> AbstractContextManager[Any]:
        """Let every block attend through `scaled_dot_product_attention`, which not every host calls."""
        if counting:
            return nullcontext()  # these models write their products out
        blocks = [self.model.get_submodule(name) for name in self.block_names()]
        wholes = []
        for block, layout in zip(blocks, self.layouts(), strict=True):
            tokens = torch.arange(layout.num_patches)
            wholes.append(WindowBlock(block, self.names(block), tokens, tokens, layout).eval())
        checkpointing = [module for module in self.model.modules() if getattr(module, "grad_checkpointing", False)]
        return changed(
            [
                *((whole.host, "forward", partial(_run_whole, whole)) for whole in wholes),
                *((module, "grad_checkpointing", False) for module in checkpointing),
            ]
        )

    def answer_like(self, module: nn.Module, block: nn.Module) -> None:
        names = self.names(inner_block(block))
        if names.beside is not None:
            module.register_forward_hook(partial(_answer, names))


def _run_whole(whole: WindowBlock, tokens: Tensor, *_: Any, **__: Any) -> Any:
    return _answer(whole.names, whole, (), whole(tokens.flatten(1, -2)).view(tokens.shape))


def _answer(names: Names, _: nn.Module, __: tuple[Any, ...], tokens: Any) -> Any:
    """A forward hook: what a host's block returns."""
    return tokens if names.beside is None else (tokens, *names.beside)
