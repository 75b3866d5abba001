"""Vision-language models of transformers at reduced size for the sweep, one of each kind."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

FAMILIES = {
    "hf vlm": "transformers: vision towers of LLaVA (1.5, NeXT, OneVision), PaliGemma, Gemma 3, InternVL, Idefics3, "
    "SmolVLM",
}
IMAGE_TOKEN = 60  # of prompts
VISION: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 48,
    "patch_size": 8,
}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TILES = {"image_grid_pinpoints": [[48, 96], [96, 48], [96, 96]]}
TOLD = ("vision_feature_layer", "use_qk_norm")  # in the name
NO_HEAD = {"vision_use_head": False}
# Class of the model, types of its tower and of its language model, more for the tower's configuration and for its own.
VLMS: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("Llava", "clip_vision_model", "llama", {}, {}),
    ("Llava", "clip_vision_model", "llama", {}, {"vision_feature_layer": [-2, 1]}),
    ("Llava", "dinov2_with_registers", "llama", {}, {}),
    ("LlavaNext", "clip_vision_model", "mistral", {}, TILES),
    ("LlavaOnevision", "siglip_vision_model", "qwen2", NO_HEAD, {**TILES, "video_token_index": 61}),
    ("PaliGemma", "siglip_vision_model", "gemma", NO_HEAD, {"projection_dim": 32, "hidden_size": 32}),
    ("Gemma3", "siglip_vision_model", "gemma3_text", NO_HEAD, {"mm_tokens_per_image": 9}),
    ("InternVL", "internvl_vision", "qwen2", {}, {}),
    ("InternVL", "internvl_vision", "qwen3", {"use_qk_norm": True, "norm_type": "rms_norm"}, {}),
    ("Idefics3", "idefics3_vision", "llama", {}, {"scale_factor": 2}),
    ("SmolVLM", "smolvlm_vision", "llama", {}, {"scale_factor": 2}),
]


def makers() -> list[tuple[str, str, Callable[[], nn.Module]]]:
    """Family, name and factory of each."""
    found: list[tuple[str, str, Callable[[], nn.Module]]] = []
    for model, tower, text, of_tower, own in VLMS:
        told = "".join(f", {key}={value}" for key, value in {**of_tower, **own}.items() if key in TOLD)
        name = f"{model}ForConditionalGeneration {tower}{told}"
        found.append(("hf vlm", name, partial(create_vlm, model, tower, text, of_tower, own)))
    return found


def create_vlm(model: str, tower: str, text: str, of_tower: dict[str, Any], own: dict[str, Any]) -> nn.Module:
    """Three narrow blocks on 6 x 6 patches, and a language model of two."""
    import transformers

    configs = {
        "vision_config": transformers.AutoConfig.for_model(tower, **{**VISION, **of_tower}),
        "text_config": transformers.AutoConfig.for_model(text, **TEXT),
    }
    token = "image_token_id" if model in ("InternVL", "Idefics3", "SmolVLM") else "image_token_index"
    config = getattr(transformers, f"{model}Config")(**{**configs, token: IMAGE_TOKEN, **own})
    made: nn.Module = getattr(transformers, f"{model}ForConditionalGeneration")(config)
    return made.eval()
