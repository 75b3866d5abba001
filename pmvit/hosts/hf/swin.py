"""The Swin Transformers of Hugging Face transformers, v1 and v2."""

from torch import nn

from pmvit.hosts.hf.model import HuggingFaceModel
from pmvit.hosts.hf.tower import SWINS, is_backbone
from pmvit.hosts.host import AnyModule, register
from pmvit.hosts.swin.blocks import Names
from pmvit.hosts.swin.host import SwinHost
from pmvit.windows import Windows

V1 = Names(
    attention="attention",
    heads="attention.num_attention_heads",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    projection="attention.o_proj",
    dropouts=("attention.attention_dropout", "dropout.p"),
    bias="attention.relative_position_bias",
    norms=("layernorm_before", "layernorm_after"),
    mlp=("mlp", "dropout"),
    drop_paths=("drop_path", ""),
    beside=(None,),
)
V2 = V1._replace(
    heads="attention.self.num_attention_heads",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    projection="attention.output.dense",
    dropouts=("attention.self.dropout.p", "attention.output.dropout.p"),
    bias="attention.self",
    bias_network="attention.self.continuous_position_bias_mlp",
    mlp=("intermediate", "output"),
    drop_paths=("drop_path", "drop_path"),
    beside=(),
)


@register
class HuggingFaceSwin(SwinHost, HuggingFaceModel):
    """Stages stand in `encoder.layers`; their blocks take all tokens in one row, and return a tuple."""

    key = "hf-swin"
    family = "Hugging Face Swin (Swin, Swin v2)"
    keeps_grid = False
    families = SWINS

    def names(self, block: nn.Module) -> Names:
        return V2 if hasattr(block, "intermediate") else V1

    def stages(self) -> list[str]:
        return [f"{stage}.blocks" for stage in self.tower.blocks]

    def first_grid(self) -> tuple[int, int]:
        _, height, width = self.input_size()
        rows, columns = self.tower.projection.stride
        return (-(-height // rows), -(-width // columns))

    def windows(self, block: AnyModule, grid: tuple[int, int]) -> Windows:
        size, shift = int(block.window_size), int(block.shift_size)
        path = self.tower.path.split(".")
        around = [self.model.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)]
        is_fitted = self.names(block) is V1 and not any(is_backbone(module) for module in around)  # when it runs
        if is_fitted and min(grid) <= size:
            size, shift = min(grid), 0
        return Windows((size, size), (shift, shift), pad_first=True)
