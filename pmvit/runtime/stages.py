"""Modules that run a chain (see `chain`): transitions and the blocks between them."""

from typing import cast

from torch import Tensor, nn

from pmvit.prune_merge import PruneMerge
from pmvit.runtime.transitions import TokenBuffer, Transition


class Stage(nn.Module):
    """A transition and the block after it. The first stage takes tokens; the last, before the head, returns them;
    what travels in between are groups and remainder, a `TokenBuffer`.

    Args:
        num_inputs: How many tokens come.
        transition: What makes those for the block of them.
        block: The block, or its attention if its MLP runs on other tokens.
        to_head: In the last stage, what makes the tokens that the head reads.
        mlp: What makes the tokens for such an MLP, and the MLP.
        grid: Rows and columns in which the last stage returns all tokens, if the host expects them so.
    """

    def __init__(
        self,
        num_inputs: int,
        transition: list[Transition],
        block: nn.Module,
        to_head: list[Transition] | None = None,
        mlp: tuple[list[Transition], nn.Module] | None = None,
        grid: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.transition = nn.ModuleList(transition)
        self.block = block
        self.to_head = nn.ModuleList(to_head) if to_head is not None else None
        self.halfway = nn.ModuleList(mlp[0]) if mlp is not None else None
        self.mlp = mlp[1] if mlp is not None else None
        self.grid = grid

    def forward(
        self, given: Tensor | TokenBuffer, *positional: object, **arguments: object
    ) -> Tensor | tuple[Tensor, ...] | TokenBuffer:
        buffer = given if isinstance(given, TokenBuffer) else TokenBuffer(given.flatten(1, -2))
        if buffer.tokens.shape[1] != self.num_inputs:
            raise ValueError(
                f"expected {self.num_inputs} tokens, got {buffer.tokens.shape[1]}: "
                "was the plan made for another image size?"
            )
        for transition in self.transition:
            buffer = transition(buffer)
        output = self.block(buffer.tokens, *positional, **arguments)
        tokens, *others = output if isinstance(output, tuple) else (output,)
        buffer = buffer.after_block(tokens)
        if self.halfway is not None and self.mlp is not None:
            for transition in self.halfway:
                buffer = transition(buffer)
            buffer = buffer.after_block(self.mlp(buffer.tokens))
        if self.to_head is None:
            return buffer
        for transition in self.to_head:
            buffer = transition(buffer)
        tokens = buffer.tokens if self.grid is None else buffer.tokens.unflatten(1, self.grid)
        return (tokens, *others) if isinstance(output, tuple) else tokens


class OnGroups(nn.Module):
    """A compressed block without its merging and reconstructing: groups in, groups out."""

    def __init__(self, wrapper: PruneMerge) -> None:
        super().__init__()
        self.wrapper = wrapper

    def forward(self, groups: Tensor, *positional: object, **arguments: object) -> Tensor:
        return cast(Tensor, self.wrapper.block(groups, **self.wrapper.block_arguments(positional, arguments)))


class PartWithTransition(nn.Module):
    """A part of a host's block with a transition of its tokens before or after it."""

    def __init__(self, part: nn.Module, before: Transition | None = None, after: Transition | None = None) -> None:
        super().__init__()
        self.part = part
        self.before = before
        self.after = after

    def forward(self, tokens: Tensor, *positional: object, **arguments: object) -> Tensor:
        if self.before is not None:
            tokens = self.before(TokenBuffer(tokens)).tokens
        tokens = self.part(tokens, *positional, **arguments)
        return tokens if self.after is None else cast(TokenBuffer, self.after(TokenBuffer(tokens))).tokens
