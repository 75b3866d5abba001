"""What hosts around one of timm's vision transformers have in common: where it stands, and who reads its tokens."""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from pmvit.hosts.host import Reading, TokenLayout
from pmvit.hosts.timm.vit import TimmViT


class OnTimmViT(TimmViT):
    """A model whose `path` leads to one of timm's vision transformers, all tokens of which it reads."""

    path: str

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.encoder = TimmViT(model.get_submodule(self.path))

    def blocks_read(self) -> list[int]:
        """The blocks after which the model reads tokens: the last one, unless a host says otherwise."""
        return [len(self.encoder.model.blocks) - 1]

    def block_names(self) -> list[str]:
        count = max(self.blocks_read()) + 1  # nothing depends on those that follow
        return [f"{self.path}.{name}" for name in self.encoder.block_names()[:count]]

    def layouts(self) -> list[TokenLayout]:
        return self.encoder.layouts()[: len(self.block_names())]

    def reading(self) -> Reading:
        names = self.block_names()
        ends = sorted({index + 1 for index in self.blocks_read()})
        spans = [names[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        # What the first two blocks lose, every map that is read later lacks.
        return Reading(spans, None, (0, 1) if len(self.encoder.model.blocks) > 4 else ())

    def input_size(self) -> tuple[int, int, int]:
        return self.encoder.input_size()

    def observed(self, counting: bool = False) -> AbstractContextManager[Any]:
        return self.encoder.observed(counting)
