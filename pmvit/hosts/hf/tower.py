"""Where the vision transformer is in a model of Hugging Face transformers: found by its patch embedding."""

from typing import NamedTuple

from torch import nn

from pmvit.hosts.host import AnyModule

HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
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
)
# Parts of the names of classes that read or change tokens between the blocks.
READ_BETWEEN = ("Backbone", "SemanticSegmentation", "DepthEstimation", "DPT", "Yolos", "Data2Vec")
PIXEL_CLASSIFIERS = ("ForSemanticSegmentation", "ForUniversalSegmentation")
WITH_LOGITS = ("ForImageClassification", *PIXEL_CLASSIFIERS, "ForObjectDetection")
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


FAMILIES = {  # by the class of the patch embedding
    "ViTEmbeddings": Family(HALF),
    "ViTMSNEmbeddings": Family(IMAGENET),
    "ViTMAEEmbeddings": Family(IMAGENET),
    "IJepaEmbeddings": Family(IMAGENET),
    "DeiTEmbeddings": Family(IMAGENET),
    "BeitEmbeddings": Family(HALF),
    "Data2VecVisionEmbeddings": Family(HALF),
    "Dinov2Embeddings": Family(IMAGENET, any_size=True),
    "Dinov2WithRegistersEmbeddings": Family(IMAGENET, any_size=True),
    "DINOv3ViTEmbeddings": Family(IMAGENET, any_size=True),
    "PixioEmbeddings": Family(IMAGENET, any_size=True),
    "CLIPVisionEmbeddings": Family(CLIP),
    "MetaClip2VisionEmbeddings": Family(CLIP),
    "SiglipVisionEmbeddings": Family(HALF),
    "YolosEmbeddings": Family(IMAGENET, any_size=True),
    "DPTViTEmbeddings": Family(HALF, any_size=True),
    "EomtEmbeddings": Family(IMAGENET),
    "EomtDinov3Embeddings": Family(IMAGENET),
}


class Tower(NamedTuple):
    """The vision transformer in a model: its patch embedding, the paths of the blocks that count, its configuration."""

    embeddings: AnyModule
    blocks: list[str]
    config: AnyModule

    @property
    def family(self) -> Family:
        return FAMILIES[type(self.embeddings).__name__]

    @property
    def projection(self) -> nn.Conv2d:
        return next(module for module in self.embeddings.modules() if isinstance(module, nn.Conv2d))

    @property
    def patch_size(self) -> tuple[int, int]:
        height, width = self.projection.stride
        return height, width

    @property
    def num_prefix(self) -> int:
        """Tokens that are no patches; YOLOS has some of them at the end, which `hooks` brings to the front."""
        found = (getattr(self.embeddings, name, None) for name in TOKENS)
        return sum(1 if token.dim() == 1 else int(token.shape[1]) for token in found if token is not None)

    @property
    def has_class_token(self) -> bool:
        return any(getattr(self.embeddings, name, None) is not None for name in TOKENS[:2])


def find_tower(model: AnyModule) -> Tower | None:
    """The first vision transformer of a known family in a model."""
    for name, module in model.named_modules():
        if type(module).__name__ not in FAMILIES or not type(module).__module__.startswith("transformers."):
            continue
        parent = name.rpartition(".")[0]
        host: AnyModule = model.get_submodule(parent)
        for path in BLOCKS:
            try:
                blocks = host.get_submodule(path)
            except AttributeError:
                continue
            if isinstance(blocks, nn.ModuleList):
                count = _last_read(model, host, len(blocks))
                names = [f"{parent}.{path}.{index}".removeprefix(".") for index in range(count)]
                return Tower(module, names, host.config)
    return None


def _last_read(model: AnyModule, host: AnyModule, depth: int) -> int:
    """How many blocks there are to compress, from the first one.

    Pyramids may read nothing of the last ones. The last ones of EoMT are its decoder: queries stand among their tokens,
    and masks that the tokens themselves predict may part them.
    """
    name = type(model).__name__
    if name.startswith("Eomt"):
        return max(depth - int(model.config.num_blocks), 0)
    if name in ("BeitForSemanticSegmentation", "Data2VecVisionForSemanticSegmentation"):
        return int(max(model.config.out_indices)) - 1  # it counts from the patch embedding, as 1
    if name.startswith("DPTFor") and getattr(model, "backbone", None) is None:
        return int(max(model.config.backbone_out_indices)) + 1
    if any(base.__name__ == "BackboneMixin" for base in type(host).__mro__):
        return int(max(index % (depth + 1) for index in host.out_indices))
    return depth


def reads_between(model: AnyModule) -> bool:
    """Whether a model reads or changes tokens between its blocks."""
    names = {base.__name__ for module in model.modules() if hasattr(module, "config") for base in type(module).__mro__}
    is_unknown = hasattr(model, "get_image_features") and type(model).__name__ not in IMAGE_TOWERS
    return is_unknown or any(part in name for name in names for part in READ_BETWEEN)
