"""The metric of adaptive plans, measured by several processes."""

from pathlib import Path

import torch
from torch.multiprocessing.spawn import spawn

import pmvit
from pmvit.measuring import TokenMetric
from tests.helpers import small_vit


def images_of(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(3))


def _measure_half(rank: int, rendezvous: str, output: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mine = images_of(16)[8 * rank : 8 * rank + 8]
    model = small_vit(img_size=64, depth=4)
    metric = pmvit.measure(model, [mine], method="adaptive", rank=48, limit=16, progress=False)
    metric.save(f"{output}/{rank}.safetensors")
    torch.distributed.destroy_process_group()


def test_two_processes_measure_one_metric(tmp_path: Path) -> None:
    """Both have the same, of all images: not that of their own half."""
    spawn(_measure_half, (str(tmp_path / "rendezvous"), str(tmp_path)), nprocs=2)
    first, second = (TokenMetric.load(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert torch.equal(first.projections, second.projections)
    assert first.images == second.images == 16
    model = small_vit(img_size=64, depth=4)
    moments = []
    for rank, images in enumerate(images_of(16).split(8)):
        half = pmvit.measure(model, [images], method="adaptive", rank=48, seed=rank, progress=False)
        moments.append(half.projections @ half.projections.transpose(1, 2))
    together = first.projections @ first.projections.transpose(1, 2)
    assert torch.allclose(together, (moments[0] + moments[1]) / 2, atol=1e-4 * float(together.abs().max()))
