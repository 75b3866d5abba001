"""The blocks of Hugging Face's Swin Transformers, under one set of names."""

from torch import Tensor, nn

from pmvit.hosts.host import AnyModule
from pmvit.hosts.swin.recipe import Recipe, cosine


class HuggingFaceSwinBlock(Recipe):
    """`SwinLayer`."""

    attention = "attention"

    def project(self, block: AnyModule, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = block.attention
        query, key, value = _heads(tokens, attention.head_dim, attention.q_proj, attention.k_proj, attention.v_proj)
        return query * attention.scaling, key, value

    def output(self, block: AnyModule, attended: Tensor) -> Tensor:
        projected: Tensor = block.dropout(block.attention.o_proj(attended))
        return projected

    def bias_table(self, block: AnyModule) -> Tensor:
        table: Tensor = block.attention.relative_position_bias.relative_position_bias_table
        return table

    def bias_index(self, block: AnyModule) -> Tensor:
        index: Tensor = block.attention.relative_position_bias.relative_position_index
        return index

    def norms(self, block: AnyModule) -> tuple[nn.Module, nn.Module]:
        return block.layernorm_before, block.layernorm_after

    def mlp(self, block: AnyModule, tokens: Tensor) -> Tensor:
        result: Tensor = block.dropout(block.mlp(tokens))
        return result

    def drop_paths(self, block: AnyModule) -> tuple[nn.Module, nn.Module]:
        return block.drop_path, nn.Identity()

    def dropout(self, block: AnyModule) -> float:
        return float(block.attention.attention_dropout)


class HuggingFaceSwinV2Block(HuggingFaceSwinBlock):
    """`Swinv2Layer`."""

    post_norm = True
    without_tokens = ("attention.self.continuous_position_bias_mlp",)

    def project(self, block: AnyModule, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = block.attention.self
        query, key, value = _heads(tokens, own.attention_head_size, own.query, own.key, own.value)
        return *cosine(query, key, own.logit_scale), value

    def output(self, block: AnyModule, attended: Tensor) -> Tensor:
        projected: Tensor = block.attention.output(attended, attended)
        return projected

    def bias_table(self, block: AnyModule) -> Tensor:
        own = block.attention.self
        values: Tensor = own.continuous_position_bias_mlp(own.relative_coords_table).view(-1, own.num_attention_heads)
        return 16 * values.sigmoid()

    def bias_index(self, block: AnyModule) -> Tensor:
        index: Tensor = block.attention.self.relative_position_index
        return index

    def mlp(self, block: AnyModule, tokens: Tensor) -> Tensor:
        result: Tensor = block.output(block.intermediate(tokens))
        return result

    def drop_paths(self, block: AnyModule) -> tuple[nn.Module, nn.Module]:
        return block.drop_path, block.drop_path

    def dropout(self, block: AnyModule) -> float:
        return float(block.attention.self.dropout.p)


def _heads(tokens: Tensor, size: int, *layers: nn.Module) -> tuple[Tensor, ...]:
    return tuple(layer(tokens).unflatten(-1, (-1, size)).transpose(1, 2) for layer in layers)
