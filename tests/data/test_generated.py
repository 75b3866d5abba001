"""Images that are made up: the same for a seed, like photographs in what can be counted, of any size and channels."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmvit
from pmvit.data.demo import demo_model
from pmvit.data.generated import GeneratedImages
from pmvit.data.opening import open_loader
from pmvit.measuring import Measured, TokenMetric
from tests.helpers import small_vit
from tests.swins import small_swin


def pixels(count: int, *size: int, seed: int = 0) -> Tensor:
    """Generated images before they are normalised."""
    plain = {"input_size": size, "mean": (0.0,) * size[0], "std": (1.0,) * size[0]}
    images = GeneratedImages(plain, count, seed)
    return torch.stack([image for image, _, _ in map(images.__getitem__, range(count)) if isinstance(image, Tensor)])


def test_an_image_depends_on_the_seed_and_its_number_alone() -> None:
    first, again, more, other = (
        pixels(3, 3, 40, 56),
        pixels(3, 3, 40, 56),
        pixels(5, 3, 40, 56),
        pixels(3, 3, 40, 56, seed=1),
    )
    assert torch.equal(first, again)
    assert torch.equal(first, more[:3])
    everything = [*more, *other]
    assert all(not torch.equal(a, b) for i, a in enumerate(everything) for b in everything[:i])


@pytest.mark.parametrize("size", [(1, 28, 28), (3, 96, 64), (4, 33, 57), (2, 8, 8)])
def test_any_size_and_channels(size: tuple[int, int, int]) -> None:
    images = pixels(4, *size)
    assert images.shape == (4, *size)
    assert 0 <= float(images.min()) < 0.5 < float(images.max()) <= 1


def test_the_spectrum_falls_as_that_of_photographs() -> None:
    """Power falls with the frequency to about 2, where white noise has 0 and blurred noise falls ever faster."""
    images = pixels(48, 3, 128, 128).mean(1)
    power = torch.fft.rfft2(images - images.mean((-2, -1), keepdim=True)).abs().square().mean(0)
    frequency = (torch.fft.fftfreq(128)[:, None] ** 2 + torch.fft.rfftfreq(128) ** 2).sqrt()
    middle = (frequency > 3 / 128) & (frequency < 0.35)
    x, y = frequency[middle].log(), power[middle].log()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    assert -2.6 < slope < -1.4


def test_neighbours_differ_rarely_but_then_much() -> None:
    """Flat parts and edges: differences have a kurtosis far above the 3 of noise."""
    differences = pixels(32, 3, 128, 128).mean(1).diff(dim=-1)
    kurtosis = float(differences.pow(4).mean() / differences.square().mean() ** 2)
    assert kurtosis > 6


def test_they_are_normalised_as_the_model_takes_them() -> None:
    model = demo_model()
    (batch,) = open_loader(model, None, workers=0, batch_size=256)
    assert batch.shape == (256, 1, 28, 28)
    cfg: dict[str, tuple[float, ...]] = model.pretrained_cfg  # type: ignore[assignment]  # timm's, not a module
    plain = batch * cfg["std"][0] + cfg["mean"][0]
    assert float(plain.min()) == pytest.approx(0, abs=1e-6)
    assert float(plain.max()) == pytest.approx(1, abs=1e-6)


def test_a_metric_needs_no_images() -> None:
    model = small_vit()
    metric = pmvit.measure(model, limit=8, progress=False)
    assert isinstance(metric, TokenMetric)
    assert metric.images == 8
    assert metric.data.startswith("generated images")
    assert pmvit.plan(metric, keep=0.6).made_by["metric"]["data"] == metric.data
    again, other = (pmvit.measure(model, method="adaptive", limit=8, seed=seed, progress=False) for seed in (0, 1))
    assert torch.equal(metric.projections, again.projections)
    assert not torch.equal(metric.projections, other.projections)


@pytest.mark.parametrize(
    ("model", "options"), [(small_swin, {}), (small_vit, {"groups": "any"}), (small_vit, {"loss": "entropy"})]
)
def test_what_needs_images_says_so(model: type[nn.Module], options: dict[str, str]) -> None:
    with pytest.raises(pmvit.PmvitError, match=r"expected images to measure (merge costs|scores) on; got none"):
        pmvit.measure(model(), progress=False, **options)  # type: ignore[call-overload]


@pytest.mark.data
def test_the_metric_is_near_that_of_photographs(vit_tiny: nn.Module, real_images: Tensor) -> None:
    """Of real weights, before the blocks that usually merge: nearer than that of white noise, and than any direction.

    How near is the cosine of two second moments, which that of one without directions has with the real one by chance.
    """
    noise = torch.rand(16, 3, 224, 224, generator=torch.Generator().manual_seed(0)) * 2 - 1
    photographs, white = (pmvit.measure(vit_tiny, [each], progress=False) for each in (real_images, noise))
    generated = pmvit.measure(vit_tiny, limit=16, progress=False)
    real, *others = (moments(each)[2:9] for each in (photographs, generated, white))
    same, of_noise = (F.cosine_similarity(real, each).mean() for each in others)
    by_chance = F.cosine_similarity(real, torch.eye(192).flatten().expand_as(real)).mean()
    assert same > max(of_noise, by_chance) + 0.1


def moments(metric: Measured) -> Tensor:
    """`P P^T` of each block, flat."""
    assert isinstance(metric, TokenMetric)
    return (metric.projections @ metric.projections.mT).flatten(1)
