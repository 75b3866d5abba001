"""Adapter for the Swin Transformers of Hugging Face transformers, v1 and v2."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from pmvit.models import hf_loading
from pmvit.models.adapter import HostChange, register
from pmvit.models.hf_hooks import outside_inference_mode
from pmvit.models.hf_tower import IMAGENET, Family, Tower
from pmvit.models.hf_vit import HuggingFaceViT
from pmvit.models.swin import SwinAdapter, host_of
from pmvit.models.swin_recipe import Recipe, cosine
from pmvit.windows import Windows

Host = Any  # the models of transformers: nn.Modules whose attributes have no types


class HuggingFaceSwinBlock(Recipe):
    """`SwinLayer`."""

    attention = "attention"

    def project(self, block: Host, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = block.attention
        query, key, value = _heads(tokens, attention.head_dim, attention.q_proj, attention.k_proj, attention.v_proj)
        return query * attention.scaling, key, value

    def output(self, block: Host, attended: Tensor) -> Tensor:
        projected: Tensor = block.dropout(block.attention.o_proj(attended))
        return projected

    def bias_table(self, block: Host) -> Tensor:
        table: Tensor = block.attention.relative_position_bias.relative_position_bias_table
        return table

    def bias_index(self, block: Host) -> Tensor:
        index: Tensor = block.attention.relative_position_bias.relative_position_index
        return index

    def norms(self, block: Host) -> tuple[nn.Module, nn.Module]:
        return block.layernorm_before, block.layernorm_after

    def mlp(self, block: Host, tokens: Tensor) -> Tensor:
        result: Tensor = block.dropout(block.mlp(tokens))
        return result

    def drop_paths(self, block: Host) -> tuple[nn.Module, nn.Module]:
        return block.drop_path, nn.Identity()

    def dropout(self, block: Host) -> float:
        return float(block.attention.attention_dropout)


class HuggingFaceSwinV2Block(HuggingFaceSwinBlock):
    """`Swinv2Layer`."""

    post_norm = True
    without_tokens = ("attention.self.continuous_position_bias_mlp",)

    def project(self, block: Host, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = block.attention.self
        query, key, value = _heads(tokens, own.attention_head_size, own.query, own.key, own.value)
        return *cosine(query, key, own.logit_scale), value

    def output(self, block: Host, attended: Tensor) -> Tensor:
        projected: Tensor = block.attention.output(attended, attended)
        return projected

    def bias_table(self, block: Host) -> Tensor:
        own = block.attention.self
        values: Tensor = own.continuous_position_bias_mlp(own.relative_coords_table).view(-1, own.num_attention_heads)
        return 16 * values.sigmoid()

    def bias_index(self, block: Host) -> Tensor:
        index: Tensor = block.attention.self.relative_position_index
        return index

    def mlp(self, block: Host, tokens: Tensor) -> Tensor:
        result: Tensor = block.output(block.intermediate(tokens))
        return result

    def drop_paths(self, block: Host) -> tuple[nn.Module, nn.Module]:
        return block.drop_path, block.drop_path

    def dropout(self, block: Host) -> float:
        return float(block.attention.self.dropout.p)


def _heads(tokens: Tensor, size: int, *layers: nn.Module) -> tuple[Tensor, ...]:
    return tuple(layer(tokens).unflatten(-1, (-1, size)).transpose(1, 2) for layer in layers)


class SwinTower(Tower):
    """Where the Swin Transformer is in a model."""

    @property
    def family(self) -> Family:
        return Family(IMAGENET, any_size=True)


@register
class HuggingFaceSwin(SwinAdapter, HuggingFaceViT):
    """Stages stand in `encoder.layers`; their blocks take all tokens in one row, and return a tuple."""

    family = "Hugging Face Swin (Swin, Swin v2)"
    keeps_grid = False
    recipes = (HuggingFaceSwinBlock(), HuggingFaceSwinV2Block())

    def matches(self, model: Host) -> bool:
        is_host = any(base.__module__.startswith("transformers.") for base in type(model).__mro__)
        return is_host and self._embeddings(model) is not None

    def _embeddings(self, model: Host) -> str | None:
        """The path of the patch embedding, beside which the encoder stands."""
        names = ("SwinEmbeddings", "Swinv2Embeddings")
        return next((name for name, module in model.named_modules() if type(module).__name__ in names), None)

    def _tower(self, model: Host) -> SwinTower:
        embeddings = model.get_submodule(self._embeddings(model) or "")
        return SwinTower(embeddings, self.block_names(model), model.config)

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
        rows, columns = self._tower(model).patch_size
        return (-(-height // rows), -(-width // columns))

    def windows(self, model: Host, block: Host, grid: tuple[int, int]) -> Windows:
        size, shift = int(block.window_size), int(block.shift_size)
        host = model.get_submodule((self._embeddings(model) or "").rpartition(".")[0])
        always_partitions = any(base.__name__ == "BackboneMixin" for base in type(host).__mro__)
        is_fitted = not hasattr(block, "intermediate") and not always_partitions  # v1, when it runs
        if is_fitted and min(grid) <= size:
            size, shift = min(grid), 0
        return Windows((size, size), (shift, shift), pad_first=True)

    def input_size(self, model: Host) -> tuple[int, int, int]:
        return hf_loading.input_size(
            model, SwinTower(model.get_submodule(self._embeddings(model) or ""), [], model.config)
        )

    def has_class_token(self, model: Host) -> bool:
        return False

    def tokens_read(self, model: Host) -> int | None:
        return None

    def prepare(self, model: Host) -> list[HostChange]:
        return []

    def stand_in(self, module: nn.Module, block: nn.Module) -> None:
        module.register_forward_hook(partial(_answer, hasattr(host_of(block), "intermediate")))

    def answer(self, block: nn.Module, tokens: Tensor) -> Any:
        return _answer(hasattr(block, "intermediate"), block, (), tokens)

    def data_config(self, model: Host) -> dict[str, Any]:
        return hf_loading.data_config(model, self._tower(model))


def _answer(is_v2: bool, _: nn.Module, __: tuple[Any, ...], tokens: Any) -> tuple[Any, ...]:
    """A forward hook: what the host's blocks return beside the tokens."""
    return (tokens,) if is_v2 else (tokens, None)
