"""What the hosts of all libraries' Swin models have in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from pmvit.hosts.host import Host, HostChange, PartNames, Reading, TokenLayout
from pmvit.hosts.swin.blocks import WindowBlock, whole_block, window_block
from pmvit.hosts.swin.recipe import Recipe
from pmvit.prune_merge import PruneMerge
from pmvit.windows import Windows


class SwinHost(Host, ABC):
    """Blocks stand in stages, each with a grid of half the size of the one before; all tokens reach the head."""

    takes_attention_bias = True
    keeps_grid = True

    @abstractmethod
    def recipe(self, block: nn.Module) -> Recipe:
        """What a host's block is made of."""

    @abstractmethod
    def stages(self) -> list[str]:
        """The paths of the lists of blocks."""

    @abstractmethod
    def first_grid(self) -> tuple[int, int]:
        """The token grid of the first stage."""

    @abstractmethod
    def windows(self, block: nn.Module, grid: tuple[int, int]) -> Windows:
        """The windows of a block."""

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

    def fit(self, wrapper: PruneMerge, layout: TokenLayout) -> list[HostChange]:
        block = wrapper.block
        wrapper.block = window_block(wrapper, self.recipe(block), layout).train(block.training)
        return [HostChange(wrapper, "block", block)]

    @classmethod
    def arguments_at_centres(cls, wrapper: PruneMerge, arguments: dict[str, Any]) -> dict[str, Any]:
        return {}  # what a host says beside the tokens (grid, masks) is in the plan

    def part_names(self, block: nn.Module) -> PartNames:
        prefix = "host." if isinstance(block, WindowBlock) else ""
        recipe = self.recipe(inner_block(block))
        without_tokens = tuple(prefix + path for path in recipe.without_tokens)
        return PartNames(None, without_tokens, (prefix + recipe.attention,))

    def observed(self, counting: bool = False) -> AbstractContextManager[Any]:
        return nullcontext() if counting else self._attending_in_sdpa()  # these models write their products out

    @contextmanager
    def _attending_in_sdpa(self) -> Iterator[None]:
        """Let every block attend through `scaled_dot_product_attention`, which not every host calls."""
        blocks = [self.model.get_submodule(name) for name in self.block_names()]
        checkpointing = [module for module in self.model.modules() if getattr(module, "grad_checkpointing", False)]
        hosts: list[Any] = [*blocks, *checkpointing]
        try:
            for block, layout in zip(blocks, self.layouts(), strict=True):
                whole = whole_block(block, self.recipe(block), layout).eval()
                vars(block)["forward"] = partial(self._run_whole, whole)
            for module in checkpointing:
                vars(module)["grad_checkpointing"] = False
            yield
        finally:
            for block in blocks:
                vars(block).pop("forward", None)
            for module in hosts[len(blocks) :]:
                module.grad_checkpointing = True

    def _run_whole(self, whole: WindowBlock, tokens: Tensor, *others: Any, **arguments: Any) -> Any:
        return self.answer(whole.host, whole(tokens.flatten(1, -2)).view(tokens.shape))

    def answer(self, block: nn.Module, tokens: Tensor) -> Any:
        """What the host expects its block to return."""
        return tokens


def inner_block(block: nn.Module) -> nn.Module:
    """The host's block inside whatever stands in its place."""
    while not isinstance(block, WindowBlock):
        inside = getattr(block, "block", None)
        if not isinstance(inside, nn.Module):
            return block
        block = inside
    return block.host
