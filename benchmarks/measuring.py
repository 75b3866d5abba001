"""What measuring a metric costs beside what it cannot do without: a forward and a backward pass.

`python -m benchmarks.measuring` takes the second moments of gradients of a ViT-S/14 (random weights) at 224 and at 518
pixels in turns with the passes alone, which compute the same gradients and keep nothing of them.
"""

import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import pmvit  # noqa: F401  # lets torchvision import, before timm
from pmvit.config import MetricConfig
from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode, frozen_parameters
from pmvit.measuring.metric_run import second_moments

import timm  # isort: skip

ROUNDS = 7
SIZES = {224: 8, 518: 2}  # pixels and images a batch


def passes(model: nn.Module, images: torch.Tensor) -> None:
    """Forward, and backward to what enters the first block."""
    model(images.clone().requires_grad_()).square().sum().backward()


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    """Print seconds and ratios."""
    for size, count in SIZES.items():
        model = timm.create_model("vit_small_patch14_reg4_dinov2", img_size=size, num_classes=0).eval()
        host, images, config = host_of(model), torch.randn(count, 3, size, size), MetricConfig()
        with evaluation_mode(model), frozen_parameters(model):
            turns = [
                (
                    seconds(lambda: second_moments(model, host, [images], config, progress=False, is_logits=True)),  # noqa: B023
                    seconds(lambda: passes(model, images)),  # noqa: B023
                )
                for _ in range(ROUNDS + 1)
            ][1:]
        ratio = statistics.median(measured / needed for measured, needed in turns)
        needed = statistics.median(needed for _, needed in turns)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{size} px: forward and backward {needed / count:.2f} s an image, the metric {ratio:.2f}x", end="")
        print(f" ({host.layout.num_tokens} tokens, {memory:.1f} GB at most)")


if __name__ == "__main__":
    main()
