"""The Swin Transformers of Hugging Face transformers, v1 and v2."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from pmvit.hosts.hf.hooks import outside_inference_mode
from pmvit.hosts.hf.model import HuggingFaceModel
from pmvit.hosts.hf.swin_blocks import HuggingFaceSwinBlock, HuggingFaceSwinV2Block
from pmvit.hosts.hf.tower import IMAGENET, Family, Tower
from pmvit.hosts.host import AnyModule, register
from pmvit.hosts.swin.host import SwinHost, inner_block
from pmvit.hosts.swin.recipe import Recipe
from pmvit.windows import Windows


class SwinTower(Tower):
    """Where the Swin Transformer is in a model."""

    @property
    def family(self) -> Family:
        return Family(IMAGENET, any_size=True)


@register
class HuggingFaceSwin(SwinHost, HuggingFaceModel):
    """Stages stand in `encoder.layers`; their blocks take all tokens in one row, and return a tuple."""

    key = "hf-swin"
    family = "Hugging Face Swin (Swin, Swin v2)"
    keeps_grid = False
    recipes = (HuggingFaceSwinBlock(), HuggingFaceSwinV2Block())

    @classmethod
    def find_tower(cls, model: AnyModule) -> Tower | None:
        path = _embeddings(model)
        if path is None:
            return None
        around: AnyModule = model.get_submodule(path.rpartition(".")[0])
        return SwinTower(model.get_submodule(path), cls(model).block_names(), around.config)

    def call(self, images: Tensor) -> Any:
        with outside_inference_mode():
            return self.model(images)

    def recipe(self, block: nn.Module) -> Recipe:
        return self.recipes[hasattr(block, "intermediate")]

    def stages(self) -> list[str]:
        path = (_embeddings(self.model) or "").rpartition("embeddings")[0] + "encoder.layers"
        return [f"{path}.{index}.blocks" for index in range(len(self.model.get_submodule(path)))]

    def first_grid(self) -> tuple[int, int]:
        _, height, width = self.input_size()
        rows, columns = self.tower.patch_size
        return (-(-height // rows), -(-width // columns))

    def windows(self, block: AnyModule, grid: tuple[int, int]) -> Windows:
        size, shift = int(block.window_size), int(block.shift_size)
        path = (_embeddings(self.model) or "").split(".")[:-1]
        around = [self.model.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)]
        always_partitions = any(base.__name__ == "BackboneMixin" for host in around for base in type(host).__mro__)
        is_fitted = not hasattr(block, "intermediate") and not always_partitions  # v1, when it runs
        if is_fitted and min(grid) <= size:
            size, shift = min(grid), 0
        return Windows((size, size), (shift, shift), pad_first=True)

    def answer_like(self, module: nn.Module, block: nn.Module) -> None:
        module.register_forward_hook(partial(_answer, hasattr(inner_block(block), "intermediate")))

    def answer(self, block: nn.Module, tokens: Tensor) -> Any:
        return _answer(hasattr(block, "intermediate"), block, (), tokens)


def _embeddings(model: nn.Module) -> str | None:
    """The path of the patch embedding, beside which the encoder stands."""
    names = ("SwinEmbeddings", "Swinv2Embeddings")
    return next((name for name, module in model.named_modules() if type(module).__name__ in names), None)


def _answer(is_v2: bool, _: nn.Module, __: tuple[Any, ...], tokens: Any) -> tuple[Any, ...]:
    """A forward hook: what the host's blocks return beside the tokens."""
    return (tokens,) if is_v2 else (tokens, None)
