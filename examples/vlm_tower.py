"""Compress the vision tower of a vision-language model and see what the language model gets of it.

    python examples/vlm_tower.py llava-hf/llava-1.5-7b-hf --data photos -o llava-small
    python examples/vlm_tower.py --random

The tower gives as many tokens as before, each in its place: projector, prompt, cache and language model stay as they
are, and `generate` is called as always. No labels are needed. `--random` takes a small LLaVA with random weights and
built-in pictures, so that everything runs without a network.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import pmvit
from pmvit.data.batches import first_images
from pmvit.data.opening import open_loader
from pmvit.hosts import host_of
from pmvit.loading import create_model
from pmvit.runtime.export.run import built_in_images


def random_llava() -> Any:
    """A small LLaVA with random weights."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 4}
    vision = CLIPVisionConfig(image_size=112, patch_size=16, num_hidden_layers=6, **shape)
    text = LlamaConfig(vocab_size=64, num_hidden_layers=2, bos_token_id=1, eos_token_id=2, pad_token_id=0, **shape)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=63)
    model: Any = LlavaForConditionalGeneration(config)
    return model.eval()


def answer(model: Any, image: torch.Tensor) -> list[int]:
    """The tokens that a LLaVA writes after an image; a processor makes such prompts of words."""
    count = host_of(model).call(image).shape[1]
    prompt = torch.tensor([[1, *[model.config.image_token_index] * count, 5, 6]])
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "pixel_values": image}
    written: list[int] = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :].tolist()
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="owner/name on the hub, or a folder of transformers")
    parser.add_argument("--random", action="store_true", help="a small model with random weights instead")
    parser.add_argument("--data", help="images to measure and compare on; built-in pictures if left out")
    parser.add_argument("--images", type=int, default=128, help="how many; half to measure, half to compare")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--keep", type=float, default=0.7)
    parser.add_argument("-o", "--output", type=Path, help="where to save the compressed model")
    arguments = parser.parse_args()
    if (arguments.model is None) == (not arguments.random):
        parser.error("expected a model or --random")
    if arguments.images < 2:
        parser.error("expected two images or more: some to measure, others to compare")

    model: Any = random_llava() if arguments.random else create_model(f"hf:{arguments.model}")
    if arguments.data is None:
        images = built_in_images(host_of(model).input_size(), arguments.images)
    else:
        loader = open_loader(model, arguments.data, labels=False, batch_size=arguments.batch_size, shuffle=True)
        images = first_images(loader, arguments.images)
    half = len(images) // 2
    measured = pmvit.measure(model, images[:half].split(arguments.batch_size))
    small = pmvit.compress(model, pmvit.plan(measured, keep=arguments.keep))

    found = pmvit.evaluate(small, images[half:].split(arguments.batch_size), reference=model)
    before, after = (pmvit.flops(each).gflops for each in (model, small))
    print(f"vision tower: {before:.3f} -> {after:.3f} GFLOPs ({before / after:.2f}x fewer)")
    print(f"cosine of what the language model reads: {found.cosine:.4f}, {found.images} images")
    if arguments.random:
        print(f"it writes {answer(model, images[:1])}, and with the compressed tower {answer(small, images[:1])}")
    if arguments.output is not None:
        pmvit.save(small, arguments.output)
        print(f"saved to {arguments.output}; pmvit.load gives the {type(small).__name__} again")


if __name__ == "__main__":
    main()
