"""What the sweep tries: for each family, names of models and a function that makes each at reduced size."""

from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import nn

import pmvit  # noqa: F401  # lets torchvision import
from scripts import sweep_dense, sweep_sam, sweep_swin, sweep_vlm

import timm  # isort: skip  # after pmvit
import timm.layers

DEPTH, HEADS, HEAD_DIM, CLASSES = 2, 6, 16, 11
WIDTH = HEADS * HEAD_DIM

FAMILIES = {  # what stands in the table, by family: timm's are its modules
    "vision_transformer": "timm: VisionTransformer (ViT, CLIP, SigLIP, DINO, DINOv2, AIMv2, ...)",
    "deit": "timm: DeiT, distilled DeiT, DeiT-III",
    "vision_transformer_hybrid": "timm: hybrids (convolutional stem)",
    "vision_transformer_relpos": "timm: ViT with relative position bias",
    "beit": "timm: BEiT",
    "eva": "timm: EVA, EVA-02, DINOv3, Perception Encoder (rotary embedding)",
    "naflexvit": "timm: NaFlexViT, called with images of one size",
    "hf vit": "transformers: ViT, ViT-MSN, I-JEPA",
    "hf deit": "transformers: DeiT",
    "hf beit": "transformers: BEiT, Data2VecVision (relative position bias)",
    "hf dinov2": "transformers: DINOv2, with registers, Pixio",
    "hf dinov3": "transformers: DINOv3 ViT (rotary embedding)",
    "hf clip": "transformers: CLIP, MetaCLIP 2",
    "hf siglip": "transformers: SigLIP",
    "hf mae": "transformers: ViT-MAE, nothing masked",
    "hf yolos": "transformers: YOLOS",
    "hf dense": "transformers: dense heads on the above (DPT, UperNet, Depth Anything)",
    "hf eomt": "transformers: EoMT, on DINOv2 and on DINOv3; the blocks before its queries",
    "hf video": "transformers: VideoMAE, V-JEPA 2 (time x height x width)",
    "hf audio": "transformers: Audio Spectrogram Transformer (frequency x time)",
    "torchvision": "torchvision: VisionTransformer",
    **sweep_swin.FAMILIES,
    **sweep_sam.FAMILIES,
    **sweep_dense.FAMILIES,
    **sweep_vlm.FAMILIES,
}


class Candidate(NamedTuple):
    """One model to try."""

    family: str
    name: str
    make: Callable[[], nn.Module]


def candidates() -> list[Candidate]:
    """All of them. To add a family, describe it in `FAMILIES` and add a list of its candidates here."""
    others = [
        *sweep_swin.makers(CLASSES),
        *sweep_sam.makers(),
        *sweep_dense.makers(CLASSES),
        *sweep_vlm.makers(),
    ]
    return [*timm_models(), *hf_models(), *torchvision_models(), *starmap(Candidate, others)]


def timm_models() -> list[Candidate]:
    modules = [family for family, what in FAMILIES.items() if what.startswith("timm: ")]
    return [
        Candidate(module, name, partial(reduced_timm, name))
        for module in modules
        for name in timm.list_models(module=module)
    ]


def reduced_timm(name: str) -> nn.Module:
    """An architecture of timm with two blocks of width 96 and a grid of about 6 x 6 tokens."""
    full: Any
    if name.startswith("naflexvit"):
        full = timm.create_model(name, depth=DEPTH, num_classes=CLASSES, embed_dim=WIDTH, num_heads=HEADS)
        patch = full.embeds.patch_size
        full.pretrained_cfg["input_size"] = (3, patch[0] * 6, patch[1] * 6)
        sized: nn.Module = full.eval()
        return sized
    with torch.device("meta"):
        try:
            full = timm.create_model(name, depth=DEPTH)  # the patches are the same, and it is made sooner
        except (TypeError, AssertionError, RuntimeError, ValueError, IndexError):
            full = timm.create_model(name)
    patch = [side // cells for side, cells in zip(full.patch_embed.img_size, full.patch_embed.grid_size, strict=True)]
    size = {"img_size": (patch[0] * 6, patch[1] * 6)}
    blocks = {"depth": DEPTH, "num_classes": CLASSES}
    narrow = {"embed_dim": WIDTH, "num_heads": HEADS}
    grouped = {"num_kv_heads": (HEADS // 2, HEADS)}
    attempts: list[dict[str, Any]] = [
        {**blocks, **narrow, **size},
        {**blocks, **narrow, **size, **grouped},  # grouped-query attention wants one number a block
        {**blocks, **size},  # a stem that fixes the width
    ]
    for arguments in attempts:
        try:
            model: nn.Module = timm.create_model(name, **arguments)
        except (TypeError, AssertionError, RuntimeError, ValueError):
            continue
        return model.eval()
    raise RuntimeError("cannot be created at reduced size")


REDUCED: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "image_size": 96,
    "patch_size": 16,
}
LABELS = {"num_labels": CLASSES}
FOUR = {"num_hidden_layers": 4}  # pyramids read four of them
BIAS = {"use_relative_position_bias": True, "layer_scale_init_value": 0.1}
SHARED = {"use_shared_relative_position_bias": True, "layer_scale_init_value": 0.1}
INDICES = {"out_indices": [1, 2, 3, 4]}
STAGES = {"out_features": ["stage1", "stage2"]}
PYRAMID = {**FOUR, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
FLAT = {**PYRAMID, "reshape_hidden_states": False}
SMALL_NECK = {"fusion_hidden_size": 24, "neck_hidden_sizes": [24, 24, 24, 24]}
NECK = {**SMALL_NECK, "backbone_out_indices": [0, 1, 2, 3]}
DECODER = {"decoder_num_hidden_layers": 1, "decoder_hidden_size": 48, "decoder_num_attention_heads": 3}
UPERNET = {"hidden_size": 24, "auxiliary_in_channels": WIDTH, "auxiliary_channels": 24}
VIDEO = {"image_size": [64, 48], "num_frames": 6}  # 3 x 4 x 3 patches
PREDICTOR = {"pred_hidden_size": 24, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1}
CLIP = {"crop_size": 48, "frames_per_clip": 8, "mlp_ratio": 2.0, "num_pooler_layers": 1, **PREDICTOR}  # 4 x 3 x 3
SPECTROGRAM = {"max_length": 126, "num_mel_bins": 36}  # 3 x 12
QUERIES = {**FOUR, "num_blocks": 2, "num_queries": 5}
TEXT = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}

# Family, class of the model, class of its configuration, more for the configuration.
HF: list[tuple[str, str, str, dict[str, Any]]] = [
    ("hf vit", "ViTForImageClassification", "ViTConfig", LABELS),
    ("hf vit", "ViTModel", "ViTConfig", {}),
    ("hf vit", "ViTForMaskedImageModeling", "ViTConfig", {}),
    ("hf vit", "ViTMSNModel", "ViTMSNConfig", {}),
    ("hf vit", "ViTMSNForImageClassification", "ViTMSNConfig", LABELS),
    ("hf vit", "IJepaModel", "IJepaConfig", {}),
    ("hf vit", "IJepaForImageClassification", "IJepaConfig", LABELS),
    ("hf deit", "DeiTModel", "DeiTConfig", {}),
    ("hf deit", "DeiTForImageClassification", "DeiTConfig", LABELS),
    ("hf deit", "DeiTForImageClassificationWithTeacher", "DeiTConfig", LABELS),
    ("hf beit", "BeitModel", "BeitConfig", BIAS),
    ("hf beit", "BeitForImageClassification", "BeitConfig", {**BIAS, **LABELS}),
    ("hf beit", "BeitForImageClassification", "BeitConfig", {**SHARED, **LABELS}),
    ("hf beit", "BeitForImageClassification", "BeitConfig", {"use_absolute_position_embeddings": True, **LABELS}),
    ("hf beit", "BeitBackbone", "BeitConfig", {**BIAS, **STAGES}),
    ("hf beit", "BeitForSemanticSegmentation", "BeitConfig", {**BIAS, **LABELS, **FOUR, **INDICES}),
    ("hf beit", "Data2VecVisionModel", "Data2VecVisionConfig", BIAS),
    ("hf beit", "Data2VecVisionForImageClassification", "Data2VecVisionConfig", {**BIAS, **LABELS}),
    ("hf beit", "Data2VecVisionForImageClassification", "Data2VecVisionConfig", {**SHARED, **LABELS}),
    ("hf beit", "Data2VecVisionForSemanticSegmentation", "Data2VecVisionConfig", {**BIAS, **LABELS, **FOUR, **INDICES}),
    ("hf dinov2", "Dinov2Model", "Dinov2Config", {}),
    ("hf dinov2", "Dinov2ForImageClassification", "Dinov2Config", LABELS),
    ("hf dinov2", "Dinov2ForImageClassification", "Dinov2Config", {"use_swiglu_ffn": True, **LABELS}),
    ("hf dinov2", "Dinov2Backbone", "Dinov2Config", STAGES),
    ("hf dinov2", "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {}),
    ("hf dinov2", "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", LABELS),
    ("hf dinov2", "Dinov2WithRegistersBackbone", "Dinov2WithRegistersConfig", STAGES),
    ("hf dinov2", "PixioModel", "PixioConfig", {}),
    ("hf dinov2", "PixioBackbone", "PixioConfig", STAGES),
    ("hf dinov3", "DINOv3ViTModel", "DINOv3ViTConfig", {"num_register_tokens": 4}),
    ("hf dinov3", "DINOv3ViTModel", "DINOv3ViTConfig", {"use_gated_mlp": True}),
    ("hf dinov3", "DINOv3ViTBackbone", "DINOv3ViTConfig", {"num_register_tokens": 4, **STAGES}),
    ("hf clip", "CLIPVisionModel", "CLIPVisionConfig", {}),
    ("hf clip", "CLIPVisionModelWithProjection", "CLIPVisionConfig", {}),
    ("hf clip", "CLIPModel", "CLIPConfig", {}),
    ("hf clip", "CLIPForImageClassification", "CLIPConfig", LABELS),
    ("hf clip", "MetaClip2VisionModel", "MetaClip2VisionConfig", {}),
    ("hf clip", "MetaClip2VisionModelWithProjection", "MetaClip2VisionConfig", {}),
    ("hf clip", "MetaClip2Model", "MetaClip2Config", {}),
    ("hf clip", "MetaClip2ForImageClassification", "MetaClip2Config", LABELS),
    ("hf siglip", "SiglipVisionModel", "SiglipVisionConfig", {}),
    ("hf siglip", "SiglipModel", "SiglipConfig", {}),
    ("hf siglip", "SiglipForImageClassification", "SiglipConfig", LABELS),
    ("hf mae", "ViTMAEModel", "ViTMAEConfig", {"mask_ratio": 0.0}),
    ("hf mae", "ViTMAEForPreTraining", "ViTMAEConfig", {"mask_ratio": 0.0, **DECODER}),
    ("hf yolos", "YolosModel", "YolosConfig", {"image_size": [96, 80], "num_detection_tokens": 5}),
    (
        "hf yolos",
        "YolosForObjectDetection",
        "YolosConfig",
        {"image_size": [96, 80], "num_detection_tokens": 5, **LABELS},
    ),
    ("hf video", "VideoMAEModel", "VideoMAEConfig", {"use_mean_pooling": False, **VIDEO}),
    ("hf video", "VideoMAEForVideoClassification", "VideoMAEConfig", {**VIDEO, **LABELS}),
    ("hf video", "VJEPA2Model", "VJEPA2Config", CLIP),
    ("hf video", "VJEPA2ForVideoClassification", "VJEPA2Config", {**CLIP, **LABELS}),
    ("hf audio", "ASTModel", "ASTConfig", SPECTROGRAM),
    ("hf audio", "ASTForAudioClassification", "ASTConfig", {**SPECTROGRAM, **LABELS}),
    ("hf dense", "DPTModel", "DPTConfig", {**FOUR, **NECK}),
    ("hf dense", "DPTForDepthEstimation", "DPTConfig", {**FOUR, **NECK}),
    ("hf dense", "DPTForSemanticSegmentation", "DPTConfig", {**FOUR, **LABELS, **NECK}),
    ("hf dense", "DPTForDepthEstimation", "DPTConfig", {"backbone_config": ("Dinov2Config", FLAT), **SMALL_NECK}),
    (
        "hf dense",
        "DepthAnythingForDepthEstimation",
        "DepthAnythingConfig",
        {"backbone_config": ("Dinov2Config", FLAT), "reassemble_hidden_size": WIDTH},
    ),
    (
        "hf dense",
        "UperNetForSemanticSegmentation",
        "UperNetConfig",
        {"backbone_config": ("BeitConfig", PYRAMID), **LABELS, **UPERNET},
    ),
    ("hf eomt", "EomtForUniversalSegmentation", "EomtConfig", {**LABELS, **QUERIES}),
    ("hf eomt", "EomtForUniversalSegmentation", "EomtConfig", {"use_swiglu_ffn": True, **LABELS, **QUERIES}),
    ("hf eomt", "EomtDinov3ForUniversalSegmentation", "EomtDinov3Config", {**LABELS, **QUERIES}),
]


def hf_models() -> list[Candidate]:
    made = []
    for family, model, config, changes in HF:
        told = ", ".join(f"{name}={value}" for name, value in changes.items() if isinstance(value, bool))
        made.append(Candidate(family, f"{model} {told}".strip(), partial(reduced_hf, model, config, changes)))
    return made


def reduced_hf(model: str, config: str, changes: dict[str, Any]) -> nn.Module:
    """A model of transformers with few blocks of width 96 on 6 x 6 patches."""
    import transformers

    changes = dict(changes)
    if config.endswith(("CLIPConfig", "SiglipConfig", "MetaClip2Config")):
        changes = {
            "vision_config": dict(REDUCED),
            "text_config": {**TEXT, "projection_dim": 32},
            "projection_dim": 32,
            **changes,
        }
    elif isinstance(changes.get("backbone_config"), tuple):
        name, more = changes["backbone_config"]
        changes["backbone_config"] = getattr(transformers, name)(**{**REDUCED, **more})
    else:
        changes = {**REDUCED, **changes}
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**changes))
    return made.eval()


def torchvision_models() -> list[Candidate]:
    patches = {"vit_b_16": 16, "vit_b_32": 32, "vit_l_16": 16, "vit_l_32": 32, "vit_h_14": 14}
    return [Candidate("torchvision", name, partial(reduced_torchvision, patch)) for name, patch in patches.items()]


def reduced_torchvision(patch: int) -> nn.Module:
    """torchvision's VisionTransformer with two blocks of width 96 on 6 x 6 patches."""
    from torchvision.models import VisionTransformer

    model: nn.Module = VisionTransformer(6 * patch, patch, DEPTH, HEADS, WIDTH, 2 * WIDTH, num_classes=CLASSES)
    return model.eval()
