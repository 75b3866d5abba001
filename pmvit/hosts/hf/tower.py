"""Where the vision transformer is in a model of Hugging Face transformers: found by its patch embedding."""

from functools import reduce
from typing import NamedTuple

from torch import nn

from pmvit.hosts.host import AnyModule
from pmvit.hosts.making import IMAGENET

HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
AUDIOSET = ((-4.2677393,), (2 * 4.5689974,))  # of log mel energies; they are brought to half of unit variance
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
BLOCKS = ("layers", "encoder.layers", "encoder.layer", "layer", "model.layer")
# Heads that read nothing but the class token (and DeiT's distillation token).
READ_PREFIX = (
    "ViTForImageClassification",
    "ViTMSNForImageClassification",
    "DeiTForImageClassification",
    "DeiTForImageClassificationWithTeacher",
    "CLIPVisionModelWithProjection",
    "CLIPModel",
    "MetaClip2VisionModelWithProjection",
    "MetaClip2Model",
    "ASTForAudioClassification",
)
# Parts of the names of classes that read or change tokens between the blocks.
READ_BETWEEN = ("Backbone", "SemanticSegmentation", "DepthEstimation", "DPT", "Yolos", "Data2Vec")
PIXEL_CLASSIFIERS = ("ForSemanticSegmentation", "ForUniversalSegmentation")
CLASSIFIERS = ("ForImageClassification", "ForVideoClassification", "ForAudioClassification")
WITH_LOGITS = (*CLASSIFIERS, *PIXEL_CLASSIFIERS, "ForObjectDetection")
IMAGE_TOWERS = ("CLIPModel", "SiglipModel", "MetaClip2Model")  # of two, and nothing but the last tokens are read
TOKENS = ("cls_token", "class_embedding", "distillation_token", "register_tokens", "detection_tokens")


class Family(NamedTuple):
    """What cannot be read off a model of a family.

    Attributes:
        statistics: Mean and standard deviation its images were normalised with, where no image processor says so.
        any_size: It adapts its position embedding to the image, so that the image processor's size counts.
    """

    statistics: tuple[tuple[float, ...], tuple[float, ...]]
    any_size: bool = False


SWINS = {name: Family(IMAGENET, any_size=True) for name in ("SwinEmbeddings", "Swinv2Embeddings")}
SAMS = {name: Family(IMAGENET) for name in ("SamPatchEmbeddings", "SamHQPatchEmbeddings", "VitDetEmbeddings")}
VITS = {  # by the class of the patch embedding
    **dict.fromkeys(
        ("ViTEmbeddings", "BeitEmbeddings", "Data2VecVisionEmbeddings", "SiglipVisionEmbeddings"), Family(HALF)
    ),
    "DPTViTEmbeddings": Family(HALF, any_size=True),
    **dict.fromkeys(("CLIPVisionEmbeddings", "MetaClip2VisionEmbeddings"), Family(CLIP)),
    **dict.fromkeys(("ViTMSNEmbeddings", "ViTMAEEmbeddings", "IJepaEmbeddings", "DeiTEmbeddings"), Family(IMAGENET)),
    **dict.fromkeys(("EomtEmbeddings", "EomtDinov3Embeddings"), Family(IMAGENET)),
    **dict.fromkeys(("Dinov2Embeddings", "Dinov2WithRegistersEmbeddings"), Family(IMAGENET, any_size=True)),
    **dict.fromkeys(("DINOv3ViTEmbeddings", "PixioEmbeddings", "YolosEmbeddings"), Family(IMAGENET, any_size=True)),
    "InternVLVisionEmbeddings": Family(IMAGENET),
    **dict.fromkeys(("Idefics3VisionEmbeddings", "SmolVLMVisionEmbeddings"), Family(HALF)),
}


VIDEOS = {name: Family(IMAGENET) for name in ("VideoMAEEmbeddings", "VJEPA2Embeddings")}
AUDIO = {"ASTEmbeddings": Family(AUDIOSET)}


class Tower(NamedTuple):
    """The vision transformer in a model.

    Attributes:
        embeddings: Its patch embedding.
        path: Of the module that holds patch embedding and blocks.
        host: That module.
        blocks: The paths of the blocks, or of the stages of a Swin.
    """

    embeddings: AnyModule
    path: str
    host: AnyModule
    blocks: list[str]

    @property
    def family(self) -> Family:
        return (VITS | SWINS | SAMS | VIDEOS | AUDIO)[type(self.embeddings).__name__]

    @property
    def projection(self) -> nn.Conv2d | nn.Conv3d:
        """Of patches, which are as large as its stride, but for those of spectrograms."""
        return next(module for module in self.embeddings.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d)))

    @property
    def num_prefix(self) -> int:
        """Tokens that are no patches; YOLOS has some of them at the end, which `hooks` brings to the front."""
        found = (getattr(self.embeddings, name, None) for name in TOKENS)
        return sum(1 if token.dim() == 1 else int(token.shape[1]) for token in found if token is not None)

    @property
    def has_class_token(self) -> bool:
        return any(getattr(self.embeddings, name, None) is not None for name in TOKENS[:2])


def find_tower(model: AnyModule, families: dict[str, Family]) -> Tower | None:
    """The first vision transformer of one of these families in a model."""
    for name, module in model.named_modules():
        if type(module).__name__ not in families or not type(module).__module__.startswith("transformers."):
            continue
        parent = name.rpartition(".")[0]
        host: AnyModule = model.get_submodule(parent)
        for path in BLOCKS:
            blocks = reduce(lambda around, inside: getattr(around, inside, None), path.split("."), host)
            if isinstance(blocks, nn.ModuleList):
                names = [f"{parent}.{path}.{index}".removeprefix(".") for index in range(len(blocks))]
                return Tower(module, parent, host, names)
    return None


def num_read(model: AnyModule, tower: Tower) -> int:
    """How many blocks there are to compress, from the first one.

    Pyramids may read nothing of the last ones. The last ones of EoMT are its decoder: queries stand among their tokens,
    and masks that the tokens themselves predict may part them.
    """
    name, depth = type(model).__name__, len(tower.blocks)
    if is_vlm(model) and (layers := read_layers(model)) is not None:
        return max(index % (depth + 1) for index in layers)
    if name.startswith("Eomt"):
        return max(depth - int(model.config.num_blocks), 0)
    if name in ("BeitForSemanticSegmentation", "Data2VecVisionForSemanticSegmentation"):
        return int(max(model.config.out_indices)) - 1  # it counts from the patch embedding, as 1
    if name.startswith("DPTFor") and getattr(model, "backbone", None) is None:
        return int(max(model.config.backbone_out_indices)) + 1
    if is_backbone(tower.host):
        return int(max(index % (depth + 1) for index in tower.host.out_indices))
    return depth


def is_backbone(module: nn.Module) -> bool:
    """Whether a module is one of transformers' backbones, which put out feature maps."""
    return any(base.__name__ == "BackboneMixin" for base in type(module).__mro__)


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is one of transformers', or of a class that is derived from one."""
    return any(base.__module__.startswith("transformers.") for base in type(model).__mro__)


def is_vlm(model: AnyModule) -> bool:
    """Whether a model is a vision-language model of transformers: prompts have a token that stands for an image."""
    config = getattr(model, "config", None)
    has_token = any(getattr(config, f"image_token_{ending}", None) is not None for ending in ("id", "index"))
    return is_of_transformers(model) and has_token and getattr(config, "vision_config", None) is not None


def read_layers(model: AnyModule) -> list[int] | None:
    """Which hidden states of its tower a vision-language model reads; `None` if the last, behind all that follows."""
    layers = getattr(model.config, "vision_feature_layer", getattr(model.config, "vision_feature_layers", None))
    if layers is None or (layers == -1 and model.config.model_type == "internvl"):
        return None
    return [layers] if isinstance(layers, int) else list(layers)


def reads_between(model: AnyModule) -> bool:
    """Whether a model reads or changes tokens between its blocks."""
    if is_vlm(model):
        return read_layers(model) is not None  # they are hidden states, as transformers records them
    names = {base.__name__ for module in model.modules() if hasattr(module, "config") for base in type(module).__mro__}
    is_unknown = hasattr(model, "get_image_features") and type(model).__name__ not in IMAGE_TOWERS
    return is_unknown or any(part in name for name in names for part in READ_BETWEEN)
