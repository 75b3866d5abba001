"""Adapter for the Swin Transformers of Hugging Face transformers, v1 and v2."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from pmvit.hosts.hf.hooks import outside_inference_mode
from pmvit.hosts.hf.model import HuggingFaceModel
from pmvit.hosts.hf.swin_blocks import HuggingFaceSwinBlock, HuggingFaceSwinV2Block
from pmvit.hosts.hf.tower import IMAGENET, Family, Tower
from pmvit.hosts.host import register
from pmvit.hosts.swin.host import SwinAdapter, host_of
from pmvit.hosts.swin.recipe import Recipe
from pmvit.windows import Windows

Host = Any  # the models of transformers: nn.Modules whose attributes have no types


class SwinTower(Tower):
    """Where the Swin Transformer is in a model."""

    @property
    def family(self) -> Family:
        return Family(IMAGENET, any_size=True)


@register
class HuggingFaceSwin(SwinAdapter, HuggingFaceModel):
    """Stages stand in `encoder.layers`; their blocks take all tokens in one row, and return a tuple."""

    family = "Hugging Face Swin (Swin, Swin v2)"
    keeps_grid = False
    recipes = (HuggingFaceSwinBlock(), HuggingFaceSwinV2Block())

    def _embeddings(self, model: Host) -> str | None:
        """The path of the patch embedding, beside which the encoder stands."""
        names = ("SwinEmbeddings", "Swinv2Embeddings")
        return next((name for name, module in model.named_modules() if type(module).__name__ in names), None)

    def find_tower(self, model: Host) -> Tower | None:
        path = self._embeddings(model)
        if path is None:
            return None
        host: Host = model.get_submodule(path.rpartition(".")[0])
        return SwinTower(model.get_submodule(path), self.block_names(model), host.config)

    def call(self, model: Host, images: Tensor) -> Any:
        with outside_inference_mode():
            return model(images)

    def recipe(self, block: nn.Module) -> Recipe:
        return self.recipes[hasattr(block, "intermediate")]

    def stages(self, model: Host) -> list[str]:
        path = (self._embeddings(model) or "").rpartition("embeddings")[0] + "encoder.layers"
        return [f"{path}.{index}.blocks" for index in range(len(model.get_submodule(path)))]

    def first_grid(self, model: Host) -> tuple[int, int]:
        _, height, width = self.input_size(model)
        rows, columns = self.tower(model).patch_size
        return (-(-height // rows), -(-width // columns))

    def windows(self, model: Host, block: Host, grid: tuple[int, int]) -> Windows:
        size, shift = int(block.window_size), int(block.shift_size)
        path = (self._embeddings(model) or "").split(".")[:-1]
        around = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)]
        always_partitions = any(base.__name__ == "BackboneMixin" for host in around for base in type(host).__mro__)
        is_fitted = not hasattr(block, "intermediate") and not always_partitions  # v1, when it runs
        if is_fitted and min(grid) <= size:
            size, shift = min(grid), 0
        return Windows((size, size), (shift, shift), pad_first=True)

    def stand_in(self, module: nn.Module, block: nn.Module) -> None:
        module.register_forward_hook(partial(_answer, hasattr(host_of(block), "intermediate")))

    def answer(self, block: nn.Module, tokens: Tensor) -> Any:
        return _answer(hasattr(block, "intermediate"), block, (), tokens)


def _answer(is_v2: bool, _: nn.Module, __: tuple[Any, ...], tokens: Any) -> tuple[Any, ...]:
    """A forward hook: what the host's blocks return beside the tokens."""
    return (tokens,) if is_v2 else (tokens, None)
