"""Modules that run a chain of tables (see `maps`): transitions and the blocks between them."""

from typing import cast

from torch import Tensor, nn

from pmvit.prune_merge import PruneMerge
from pmvit.runtime.transitions import Table, Transition


class Stage(nn.Module):
    """A transition and the block after it. The first stage takes tokens; the last, before the head, returns them;
    what travels in between are tables.

    Args:
        num_inputs: How many tokens come.
        transition: What makes those for the block of them.
        block: The block, or its attention if its MLP runs on other tokens.
        to_head: In the last stage, what makes the tokens that the head reads.
        mlp: What makes the tokens for such an MLP, and the MLP.
    """

    def __init__(
        self,
        num_inputs: int,
        transition: list[Transition],
        block: nn.Module,
        to_head: list[Transition] | None = None,
        mlp: tuple[list[Transition], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.transition = nn.ModuleList(transition)
        self.block = block
        self.to_head = nn.ModuleList(to_head) if to_head is not None else None
        self.halfway = nn.ModuleList(mlp[0]) if mlp is not None else None
        self.mlp = mlp[1] if mlp is not None else None

    def forward(
        self, state: Tensor | Table, *positional: object, **arguments: object
    ) -> Tensor | tuple[Tensor, ...] | Table:
        table = state if isinstance(state, Table) else Table(state)
        if table.tokens.shape[1] != self.num_inputs:
            raise ValueError(
                f"expected {self.num_inputs} tokens, got {table.tokens.shape[1]}: "
                "was the plan made for another image size?"
            )
        for transition in self.transition:
            table = transition(table)
        output = self.block(table.tokens, *positional, **arguments)
        tokens, *others = output if isinstance(output, tuple) else (output,)
        table = table.after_block(tokens)
        if self.halfway is not None and self.mlp is not None:
            for transition in self.halfway:
                table = transition(table)
            table = table.after_block(self.mlp(table.tokens))
        if self.to_head is None:
            return table
        for transition in self.to_head:
            table = transition(table)
        return (table.tokens, *others) if isinstance(output, tuple) else table.tokens


class Handed(nn.Module):
    """A module of a host with a product before or after it, for tokens alone."""

    def __init__(self, module: nn.Module, before: Transition | None = None, after: Transition | None = None) -> None:
        super().__init__()
        self.module = module
        self.before = before
        self.after = after

    def forward(self, tokens: Tensor, *positional: object, **arguments: object) -> Tensor:
        if self.before is not None:
            tokens = self.before(Table(tokens)).tokens
        tokens = self.module(tokens, *positional, **arguments)
        return tokens if self.after is None else cast(Table, self.after(Table(tokens))).tokens


class Narrowed(nn.Module):
    """A compressed block without its merging and reconstructing: groups in, groups out."""

    def __init__(self, wrapper: PruneMerge) -> None:
        super().__init__()
        self.wrapper = wrapper

    def forward(self, groups: Tensor, *positional: object, **arguments: object) -> Tensor:
        return cast(Tensor, self.wrapper.block(groups, **self.wrapper.block_arguments(positional, arguments)))
