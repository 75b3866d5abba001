"""The vision towers of the vision-language models of Hugging Face transformers, where they are."""

from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from pmvit.errors import PmvitError
from pmvit.files import check_fields
from pmvit.flow import Groups
from pmvit.hosts.hf.hooks import outside_inference_mode
from pmvit.hosts.hf.tower import VITS, Tower, find_tower, is_vlm, read_layers
from pmvit.hosts.hf.vit import HuggingFaceViT
from pmvit.hosts.host import AnyModule, Outputs, register
from pmvit.hosts.making import check_numbers
from pmvit.prune_merge import PruneMerge, is_recorded

# What a saved model says of how it writes; transformers has settings that read other files or run what they name.
GENERATION = frozenset(
    (
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "num_beams", "early_stopping"),
        *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens"),
        *("pad_token_id", "bos_token_id", "eos_token_id"),
    )
)


@register
class HuggingFaceVLM(HuggingFaceViT):
    """A model that reads images and text: its vision tower is one that `HuggingFaceViT` knows, and all that is run.

    What it puts out, for measuring and comparing, are the tokens of the tower that the rest of the model reads.
    """

    key = "hf-vlm"
    family = (
        "Hugging Face vision-language model on one of these towers (LLaVA, PaliGemma, Gemma 3, InternVL, Idefics3, "
        "SmolVLM and others of their kind)"
    )

    described = (*HuggingFaceViT.described, "generation")

    @classmethod
    def matches(cls, model: AnyModule) -> bool:
        return is_vlm(model)

    @cached_property
    def tower(self) -> Tower:
        towers = [module for module in self.model.modules() if type(module).__name__ in VITS]
        found = find_tower(self.model, VITS)
        if found is None or len(towers) > 1:
            raise PmvitError(_refusal(self.model, len(towers)))
        return found

    def call(self, images: Tensor) -> Any:
        """The tokens of the tower that the rest of the model reads, (images, tokens, width of all layers read)."""
        layers, config = read_layers(self.model), self.model.config
        with outside_inference_mode():
            output = self.tower.host(images, output_hidden_states=layers is not None, return_dict=True)
        tokens = [output.last_hidden_state] if layers is None else [output.hidden_states[layer] for layer in layers]
        drops_class_token = getattr(config, "vision_feature_select_strategy", None) == "default"
        return torch.cat(tokens, dim=-1)[:, 1 if drops_class_token else 0 :]

    def outputs(self) -> Outputs:
        return Outputs(gives_logits=False, returns_tensor=False)

    def settings(self, arguments: dict[str, Any]) -> dict[str, Any]:
        known = getattr(self.model, "generation_config", None)
        found = {name: value for name in sorted(GENERATION) if (value := getattr(known, name, None)) is not None}
        return {**super().settings(arguments), "generation": found}

    @classmethod
    def make(cls, description: dict[str, Any]) -> AnyModule:
        generation = check_fields(description["generation"], (), "the settings of generation", optional=GENERATION)
        check_numbers(generation, "the settings of generation")
        model = super().make(description)
        if model.can_generate():
            model.generation_config = type(model.generation_config)(**generation)
        return model

    @classmethod
    def arguments_at_centres(cls, wrapper: PruneMerge | Groups, arguments: dict[str, Any]) -> dict[str, Any]:
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and not is_recorded(mask) and not _allows_all(mask):
            raise PmvitError(
                "expected images that fill their tiles, got some with padding (pixel_attention_mask), whose patches "
                "would merge with those of the image: prepare them so that all patches are of the image, as with "
                "do_image_splitting=True, or pmvit.decompress the model for them"
            )
        return super().arguments_at_centres(wrapper, arguments)


def _allows_all(mask: Tensor) -> bool:
    """Whether a mask of attention, boolean or added to scores, lets every token be seen by every other."""
    return bool((mask == 0).all() if mask.is_floating_point() else mask.bool().all())


def _refusal(model: AnyModule, num_towers: int) -> str:
    """Why there is no vision tower that can be compressed in a vision-language model."""
    name, vision = type(model).__name__, model.config.vision_config
    if num_towers > 1:
        return f"expected a model with one vision tower, got a {name} with {num_towers}: compress each by itself"
    if getattr(vision, "window_size", None):
        return (
            f"expected a vision tower that attends over the whole image; that of a {name} attends inside windows, "
            "whose number and shape differ from image to image, each with tokens of its own to merge: it stays as it is"
        )
    if any("grid_thw" in signature(module.forward).parameters for module in model.modules()):
        return (
            f"expected a vision tower that takes a batch of images; that of a {name} takes the patches of all images "
            "in one row, with any number each, and its attention no bias that counts the members of groups: it stays "
            "as it is"
        )
    return (
        f"expected a vision tower with one of the patch embeddings {', '.join(VITS)}; that of a {name} "
        f"({type(vision).__name__}) has none: docs/hosts.md says how to add one"
    )
