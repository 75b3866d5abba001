"""Compress a video classifier of transformers: VideoMAE or V-JEPA 2, whose tokens stand in time, rows and columns.

    python examples/video_classifier.py MCG-NJU/videomae-base-finetuned-kinetics --clips clips.safetensors -o small
    python examples/video_classifier.py --random

Clips are what the model's video processor returns, (clips, frames, channels, height, width), saved as the tensor
`pixel_values` of a safetensors file. No labels are needed. `--random` takes a small model with random weights and clips
of a square that moves over noise, so that everything runs without a network: its figures say nothing of a trained one.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pmvit
from pmvit.hosts import host_of
from pmvit.hosts.outputs import predict
from pmvit.loading import create_model
from pmvit.tensors import read_tensors


def random_videomae() -> nn.Module:
    """A small VideoMAE with random weights, for 8 frames of 64 x 64 pixels."""
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    torch.manual_seed(0)
    blocks = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape: dict[str, Any] = {**blocks, "image_size": 64, "num_frames": 8, "num_labels": 10}
    config = VideoMAEConfig(**shape)
    model: nn.Module = VideoMAEForVideoClassification(config)
    return model.eval()


def moving_squares(count: int, size: tuple[int, ...]) -> Tensor:
    """Clips of a bright square that moves over noise, (clips, frames, channels, height, width)."""
    frames, _, height, width = size
    generator = torch.Generator().manual_seed(0)
    clips = 0.2 * torch.randn(count, *size, generator=generator)
    side = height // 4
    starts = torch.randint(0, height - side, (count, 2), generator=generator)
    for clip, (top, left) in zip(clips, starts.tolist(), strict=True):
        for frame in range(frames):
            across = (left + 2 * frame) % (width - side)
            clip[frame, :, top : top + side, across : across + side] += 2.0
    return clips


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="owner/name on the hub, or a folder of transformers")
    parser.add_argument("--random", action="store_true", help="a small model with random weights, and made-up clips")
    parser.add_argument("--clips", type=Path, help="a safetensors file with prepared clips; half to measure on")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--keep", type=float, default=0.6)
    parser.add_argument("-o", "--output", type=Path, help="where to save the compressed model")
    arguments = parser.parse_args()
    if (arguments.model is None) == (not arguments.random) or (arguments.clips is None) == (not arguments.random):
        parser.error("expected a model and --clips, or --random")

    model = random_videomae() if arguments.random else create_model(f"hf:{arguments.model}")
    size = host_of(model).input_size()
    clips = moving_squares(16, size) if arguments.random else read_tensors(arguments.clips)["pixel_values"]
    batches = clips.split(arguments.batch_size)
    if len(batches) < 2:
        parser.error("expected two batches of clips or more: some to measure, others to compare")
    half = len(batches) // 2
    plan = pmvit.plan(pmvit.measure(model, batches[:half], method="adaptive"), keep=arguments.keep)
    small = pmvit.compress(model, plan)
    print(f"grid: {' x '.join(map(str, host_of(model).layout.grid))} tokens (time x rows x columns)")
    print(f"tokens of each block: {', '.join(map(str, plan.tokens))}")
    before, after = (pmvit.flops(each).gflops for each in (model, small))
    print(f"{before:.4f} -> {after:.4f} GFLOPs ({before / after:.2f}x fewer)")
    with torch.inference_mode():
        pairs = [(predict(model, each).argmax(-1), predict(small, each).argmax(-1)) for each in batches[half:]]
    alike = torch.cat([first == second for first, second in pairs])
    print(f"same class as the original: {int(alike.sum())} of {len(alike)} clips")
    if arguments.output is not None:
        pmvit.save(small, arguments.output)
        print(f"saved to {arguments.output}; pmvit.load gives the {type(small).__name__} again")


if __name__ == "__main__":
    main()
