"""The step of an adaptive plan for graphs: what `MergeStep` gives, from operators that runtimes are good at."""

import torch
from torch import Tensor, nn

from pmvit.adaptive import Choice, MergeStep, take


class GraphStep(nn.Module):
    """A `MergeStep` for images of the model's own size.

    At large batches, runtimes spend most of a step on copying all tokens from one table to another. So those that stay
    and those that join are gathered apart instead of split off, and nothing is glued to them. They are not weighted by
    their sizes either: as a group gets the length of its members, only the direction of their sum counts, and for that
    each of those that join is weighted by its size as a share of the size of the one it joins. OpenVINO finds the place
    of a minimum by sorting, so it is found by comparing with the minimum. ONNX Runtime is slow at norms.

    Args:
        step: What it stands for.
        explicit: Write norms out.
    """

    projection: Tensor
    barred: Tensor
    most: Tensor
    groups: Tensor

    def __init__(self, step: MergeStep, explicit: bool) -> None:
        super().__init__()
        self.merges, self.num_prefix, self.explicit = step.merges, step.num_prefix, explicit
        self.left = step.num_prefix + step.count - step.merges
        groups = torch.arange(self.left, device=step.projection.device)
        constants = {"projection": step.projection, "barred": step.barred, "most": step.most, "groups": groups}
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    def extra_repr(self) -> str:
        left = self.left - self.num_prefix
        return f"{left + self.merges} -> {left} patch tokens"

    def forward(self, tokens: Tensor, sizes: Tensor | None, _: int) -> tuple[Tensor, Tensor, Choice]:
        """As `MergeStep` gives it."""
        points = torch.matmul(tokens.float(), self.projection.float())
        points = points - points.mean(1, keepdim=True)
        squares = (points * points).sum(-1)
        barred = squares[:, None] + self.barred.to(points)
        distances = torch.baddbmm(barred, points, points.transpose(1, 2), alpha=-2)
        cheapest = distances.amin(-1) + squares
        if sizes is not None:
            cheapest = cheapest * sizes[..., 0].sqrt()
        order = cheapest.minimum(self.most).topk(self.left + self.merges).indices
        kept, joins = order.split([self.left, self.merges], dim=1)
        patches = kept[:, None, self.num_prefix :].expand(-1, self.merges, -1)
        among_kept = take(distances, joins).gather(2, patches)
        is_nearest = among_kept == among_kept.amin(-1, keepdim=True)
        into = torch.where(is_nearest, self.groups[self.num_prefix :], self.left).amin(
            -1
        )  # the first, if they are many
        joined = (into[:, None] == self.groups[:, None]).to(tokens.dtype)
        merged, sizes = self._merge(take(tokens, kept), take(tokens, joins), joined, sizes, order)
        return merged, sizes, Choice(order, into)

    def _merge(
        self, kept: Tensor, joins: Tensor, joined: Tensor, sizes: Tensor | None, order: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Groups and their sizes, from those that stay and those that join; `joined` has a one for who joins whom."""
        lengths = self._length(kept)
        if sizes is None:
            weights, shares = joined, joined
            size = 1 + weights.sum(-1, keepdim=True)
        else:
            own, of_joins = sizes.gather(1, order[..., None]).split([self.left, self.merges], dim=1)
            weights = joined * of_joins.transpose(1, 2)
            shares, lengths = weights / own, lengths * own
            size = own + weights.sum(-1, keepdim=True)
        length = torch.baddbmm(lengths, weights, self._length(joins))
        total = torch.baddbmm(kept, shares, joins)
        return total * (length / (size * self._length(total)).clamp_min(1e-12)), size

    def _length(self, tokens: Tensor) -> Tensor:
        if self.explicit:
            return (tokens * tokens).sum(-1, keepdim=True).sqrt()
        length: Tensor = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True)
        return length
