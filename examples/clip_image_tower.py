"""Compress the image tower of a CLIP or SigLIP model and see how well image embeddings keep their direction.

    python examples/clip_image_tower.py openai/clip-vit-base-patch32 --data photos -o clip-small
    python examples/clip_image_tower.py --random

The text tower is not touched: what was found by text before is found by text afterwards, as far as the cosine says. No
labels are needed. `--random` takes a small model with random weights and built-in pictures, so that everything runs
without a network.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmvit
from pmvit.data.opening import open_loader
from pmvit.hosts import host_of
from pmvit.hosts.outputs import predict
from pmvit.loading import create_model
from pmvit.runtime.export.run import built_in_images


def random_clip() -> nn.Module:
    """A small CLIP with random weights."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    shape = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    vision = {**shape, "image_size": 112, "patch_size": 16}
    text = {**shape, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    model: nn.Module = CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=64))
    return model.eval()


def prepared_images(model: nn.Module, data: str | None, count: int, batch_size: int) -> list[Tensor]:
    """Batches of images for the model: of the user's, or the built-in pictures."""
    if data is None:
        images = built_in_images(host_of(model).input_size(), count)
        return list(images.split(batch_size))
    loader = open_loader(model, data, labels=False, batch_size=batch_size, shuffle=True)
    batches = []
    for batch in loader:
        batches.append(batch if isinstance(batch, Tensor) else batch[0])
        if sum(map(len, batches)) >= count:
            break
    return batches


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

    model = random_clip() if arguments.random else create_model(f"hf:{arguments.model}")
    batches = prepared_images(model, arguments.data, arguments.images, arguments.batch_size)
    if len(batches) < 2:
        parser.error("expected two batches of images or more: some to measure, others to compare")
    half = len(batches) // 2
    small = pmvit.compress(model, pmvit.plan(pmvit.measure(model, batches[:half]), keep=arguments.keep))
    with torch.inference_mode():
        pairs = [(predict(model, images), predict(small, images)) for images in batches[half:]]
    cosine = torch.cat([F.cosine_similarity(before, after) for before, after in pairs])
    before, after = (pmvit.flops(each).gflops for each in (model, small))
    print(f"image tower: {before:.3f} -> {after:.3f} GFLOPs ({before / after:.2f}x fewer)")
    print(f"cosine of the image embeddings: mean {cosine.mean():.4f}, lowest {cosine.min():.4f}, {len(cosine)} images")
    if arguments.output is not None:
        pmvit.save(small, arguments.output)
        print(f"saved to {arguments.output}; pmvit.load gives the {type(small).__name__} again")


if __name__ == "__main__":
    main()
