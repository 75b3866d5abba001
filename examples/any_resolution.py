"""Measure a vision transformer once, and run and export it for images of several sizes.

    python examples/any_resolution.py vit_small_patch14_reg4_dinov2 --data photos --sizes 224,336,448 -o any-size
    python examples/any_resolution.py --random

At every size as large a share of the patches merges. No labels are needed. `--random` takes a small model with random
weights and built-in pictures, so that everything runs without a network.
"""

import argparse
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import pmvit
from pmvit.compression import at_size
from pmvit.data.batches import first_images
from pmvit.data.opening import open_loader
from pmvit.hosts import host_of
from pmvit.hosts.outputs import predict
from pmvit.runtime.export.run import built_in_images


def random_vit(size: int) -> nn.Module:
    """A small ViT with random weights that takes any size."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"embed_dim": 48, "depth": 4, "num_heads": 3, "num_classes": 7}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=size, dynamic_img_size=True, **shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def prepared_images(model: nn.Module, data: str | None, count: int) -> Tensor:
    """Images of the model's own size: of the user's, or the built-in pictures."""
    if data is None:
        return built_in_images(host_of(model).input_size(), count)
    return first_images(open_loader(model, data, labels=False, batch_size=16, shuffle=True), count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="one of timm's plain vision transformers")
    parser.add_argument("--random", action="store_true", help="a small model with random weights instead")
    parser.add_argument("--data", help="images to measure and compare on; built-in pictures if left out")
    parser.add_argument("--images", type=int, default=64, help="how many to measure on, and to compare at every size")
    parser.add_argument("--sizes", default="96,128,192", help="sides in pixels, with commas; measured at the first")
    parser.add_argument("--keep", type=float, default=0.6)
    parser.add_argument("-o", "--output", type=Path, help="where to write a file of ONNX for each size")
    arguments = parser.parse_args()
    if (arguments.model is None) == (not arguments.random):
        parser.error("expected a model or --random")

    first, *others = (int(size) for size in arguments.sizes.split(","))
    if arguments.random:
        model = random_vit(first)
    else:
        model = timm.create_model(arguments.model, pretrained=True, img_size=first, dynamic_img_size=True).eval()
    images = prepared_images(model, arguments.data, arguments.images)
    small = pmvit.compress(model, pmvit.plan(pmvit.measure(model, images), keep=arguments.keep))

    for size in (first, *others):
        original, at = at_size(model, size), at_size(small, size)
        images = prepared_images(at, arguments.data, arguments.images)
        with torch.inference_mode():  # the model takes every size as it is
            before, after = (predict(each, images) for each in (model, small))
        cosine = torch.nn.functional.cosine_similarity(before, after).mean()
        costs = [pmvit.flops(each).gflops for each in (original, at)]
        print(f"{size} x {size}: {costs[0]:.3f} -> {costs[1]:.3f} GFLOPs, cosine of outputs {cosine:.4f}")
        if arguments.output is not None:
            exported = pmvit.export(at, arguments.output / f"model-{size}.onnx")
            print(f"  {exported.path}: largest error of an output {exported.max_error:.1e}")


if __name__ == "__main__":
    main()
