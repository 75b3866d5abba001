"""SAM, SAM-HQ and ViTDet at reduced size for the sweep: narrow blocks, all but one of which attend inside windows."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

FAMILIES = {
    "hf sam": "transformers: SAM, SAM-HQ (windows padded; the image encoder)",
    "hf vitdet": "transformers: ViTDet (windows padded; with residual blocks)",
}
WIDTH = 48
BLOCKS: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 96}
WINDOWS: dict[str, Any] = {"window_size": 4, "global_attn_indexes": [1], "mlp_dim": 96, "num_pos_feats": 8}
DECODER: dict[str, Any] = {"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
DET: dict[str, Any] = {"window_size": 4, "window_block_indices": [0, 2], "pretrain_image_size": 96, "mlp_ratio": 2}
RESIDUAL = " residual"
SAM = ("SamModel", "SamVisionModel", "SamHQModel", "SamHQVisionModel")
VITDET = ("VitDetModel", "VitDetBackbone", "VitDetModel" + RESIDUAL)


def makers() -> list[tuple[str, str, Callable[[], nn.Module]]]:
    """Family, name and factory of each."""
    sam = [("hf sam", name, partial(create_sam, name)) for name in SAM]
    return [*sam, *(("hf vitdet", name, partial(create_vitdet, name)) for name in VITDET)]


def create_sam(name: str, **changes: Any) -> nn.Module:
    """Three blocks on 6 x 6 patches, the second of which attends over all of them; a small mask decoder."""
    import transformers

    prefix = name.removesuffix("Model").removesuffix("Vision")

    def config(part: str, **arguments: Any) -> Any:
        return getattr(transformers, f"{prefix}{part}Config")(**arguments)

    vision = config("Vision", **{**BLOCKS, **WINDOWS, "output_channels": 16, **changes})
    if name.endswith("VisionModel"):
        made: nn.Module = getattr(transformers, name)(vision)
        return made.eval()
    prompts = config("PromptEncoder", hidden_size=16, image_size=vision.image_size, mask_input_channels=4)
    of_hq = {"vit_dim": WIDTH} if prefix == "SamHQ" else {}
    decoder = config("MaskDecoder", **DECODER, iou_head_depth=2, iou_head_hidden_dim=16, **of_hq)
    made = getattr(transformers, name)(
        config("", vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=decoder)
    )
    return made.eval()


def create_vitdet(name: str) -> nn.Module:
    """Three blocks on 6 x 6 patches, the second of which attends over all of them."""
    import transformers

    more: dict[str, Any] = {"residual_block_indices": [1, 2]} if name.endswith(RESIDUAL) else {}
    if name.endswith("Backbone"):
        more["out_features"] = ["stage1", "stage3"]
    config = transformers.VitDetConfig(**BLOCKS, **DET, **more, use_relative_position_embeddings=True)
    made: nn.Module = getattr(transformers, name.removesuffix(RESIDUAL))(config)
    return made.eval()
