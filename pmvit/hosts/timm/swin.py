"""timm's Swin Transformers, v1 and v2."""

from typing import Any

from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2

from pmvit.hosts.host import AnyModule, register
from pmvit.hosts.parts import inner_block
from pmvit.hosts.swin.host import SwinHost
from pmvit.hosts.timm.model import TimmModel, one_or_all
from pmvit.windows import Windows


@register
class TimmSwin(SwinHost, TimmModel):
    """Stages stand in `model.layers`; their blocks take and return tokens of shape (batch, rows, columns, width)."""

    key = "timm-swin"
    family = "timm Swin (SwinTransformer, SwinTransformerV2)"
    classes = (SwinTransformer, SwinTransformerV2)
    head = "head.fc"

    def stages(self) -> list[str]:
        return [f"layers.{index}.blocks" for index in range(len(self.model.layers))]

    def windows(self, block: AnyModule, grid: tuple[int, int]) -> Windows:
        return Windows(tuple(block.window_size), tuple(block.shift_size))

    def traits(self) -> dict[str, Any]:
        firsts: list[AnyModule] = [inner_block(stage.blocks[0]) for stage in self.model.layers]
        return {
            **super().traits(),
            "depths": [len(stage.blocks) for stage in self.model.layers],
            "num_heads": [block.attn.num_heads for block in firsts],
            "window_size": _window_size(firsts),
            "mlp_ratio": one_or_all([block.mlp_ratio for block in firsts]),
            "always_partition": firsts[0].always_partition,
            "strict_img_size": not firsts[0].dynamic_mask,
        }


def _window_size(firsts: list[AnyModule]) -> Any:
    """The window all stages were made with, each of which made it no larger than its grid; or one a stage."""
    sizes = [tuple(block.window_size) for block in firsts]
    largest = (max(rows for rows, _ in sizes), max(columns for _, columns in sizes))
    for block, size in zip(firsts, sizes, strict=True):
        fitting = largest if block.always_partition else tuple(map(min, block.input_resolution, largest))
        if size != fitting:
            return [one_or_all(size) for size in sizes]
    return one_or_all(largest)
