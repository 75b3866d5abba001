"""What adapters of models around one of timm's vision transformers have in common: where it stands, who reads it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pmvit.hosts.host import TokenLayout
from pmvit.hosts.timm.vit import TimmViT

Host = Any  # models around timm's: nn.Modules whose attributes have no types
ENCODERS = TimmViT()


class OnTimmViT(TimmViT):
    """A model whose `path` leads to one of timm's vision transformers, all tokens of which it reads."""

    path: str

    def encoder(self, model: Host) -> Host:
        """The vision transformer."""
        return model.get_submodule(self.path)

    def blocks_read(self, model: Host) -> list[int]:
        """The blocks after which the model reads tokens: the last one, unless an adapter says otherwise."""
        return [len(self.encoder(model).blocks) - 1]

    def default_skip(self, model: Host) -> tuple[int, ...]:
        depth = len(self.encoder(model).blocks)
        return (0, 1) if depth > 4 else ()  # what they lose, every map that is read later lacks

    def layout(self, model: Host) -> TokenLayout:
        return ENCODERS.layout(self.encoder(model))

    def block_names(self, model: Host) -> list[str]:
        count = max(self.blocks_read(model)) + 1  # nothing depends on those that follow
        return [f"{self.path}.{name}" for name in ENCODERS.block_names(self.encoder(model))[:count]]

    def runs(self, model: Host) -> list[list[str]]:
        names = self.block_names(model)
        ends = sorted({index + 1 for index in self.blocks_read(model)})
        return [names[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def input_size(self, model: Host) -> tuple[int, int, int]:
        return ENCODERS.input_size(self.encoder(model))

    def num_classes(self, model: Host) -> int | None:
        return None

    def has_class_token(self, model: Host) -> bool:
        return ENCODERS.has_class_token(self.encoder(model))

    def tokens_read(self, model: Host) -> int | None:
        return None

    @contextmanager
    def for_scoring(self, model: Host) -> Iterator[None]:
        with ENCODERS.for_scoring(self.encoder(model)):
            yield
