"""Export: passes, the runtime's file, and a comparison with PyTorch on real images before anything is called done."""

import copy
import math
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock
from pmvit.data.batches import first_images
from pmvit.data.opening import ImageData, as_loader
from pmvit.errors import PmvitError
from pmvit.files import check_writable, make_shared
from pmvit.hosts import host_of
from pmvit.hosts.making import channels_of
from pmvit.hosts.modes import check_trainable
from pmvit.hosts.outputs import as_module, check_size, logits_of
from pmvit.runtime.export.int8 import WAYS
from pmvit.runtime.export.targets import QUANTIZING, RUNTIMES, Runtime, quietly, reason, runtime_called
from pmvit.runtime.optimize import optimize_for_inference

TOLERANCE = 1e-3  # largest error of a logit in float32, relative to the largest logit
ENOUGH = 0.96  # share of images with the same top-1 above which eight bits are as good as float
INT8_AGREEMENT = 0.7  # and below which they have broken the model
CALIBRATING, INT8_IMAGES = 64, 256  # images that calibrate, and these with those that compare
MOST_OTHERWISE = 0.25  # share of images of which an adaptive plan may merge other tokens than in PyTorch


@dataclass(frozen=True)
class Int8Trial:
    """One way to quantise a model that was tried.

    Attributes:
        way: What was quantised.
        agreement: Share of images with the same top-1 as in PyTorch.
        max_error: Largest difference of a logit, relative to the largest logit.
        megabytes: The size of the file, with those beside it.
        kept: This one was written.
    """

    way: str
    agreement: float
    max_error: float
    megabytes: float
    kept: bool


@dataclass(frozen=True)
class Exported:
    """A file that was written and gave the same as PyTorch.

    Attributes:
        path: The file.
        runtime: What runs it.
        images: How many images it was compared on.
        max_error: Largest difference of a logit, relative to the largest logit.
        agreement: Share of images with the same top-1.
        int8: Whether it is quantised.
        megabytes: Its size, with the files beside it.
        chose_otherwise: Images of which other tokens merged than in PyTorch, because two choices cost the same up to
            rounding; `max_error` is that of the others. Only with an adaptive plan.
        tried: With `int8`, the ways to quantise that were tried, in their order.
    """

    path: Path
    runtime: str
    images: int
    max_error: float
    agreement: float
    int8: bool
    megabytes: float
    chose_otherwise: int = 0
    tried: tuple[Int8Trial, ...] = ()

    @property
    def warning(self) -> str | None:
        """That eight bits change more than a few predictions, if they do."""
        if not self.int8 or self.agreement >= ENOUGH:
            return None
        ways = "; ".join(f"{trial.way}: {trial.agreement:.1%}" for trial in self.tried)
        return (
            f"eight bits change the top-1 of {1 - self.agreement:.1%} of {self.images} images in {self.runtime}; kept "
            f"of it by what was tried: {ways}. Calibrate on more images like yours, or export in float"
        )


def export(
    model: nn.Module,
    path: str | Path,
    *,
    to: str | None = None,
    batch: int | None = None,
    images: ImageData | None = None,
    limit: int | None = None,
    int8: bool = False,
    threads: int | None = None,
) -> Exported:
    """Write a model for a runtime, load it back there, compare it with PyTorch, and only then put it in place.

    A file of a model that returns several feature maps has as many outputs.

    Args:
        model: What `compress` or `load` returned, or an original model; a copy is optimised for inference.
        path: The file to write.
        to: The runtime: onnx, openvino, torch-export, aot-inductor, torchscript, executorch, litert; by the file's
            ending if left out.
        batch: The batch size the file is for; any, if left out and the runtime allows it (otherwise 1).
        images: Images to compare on, and to calibrate on with `int8`, as `as_loader` knows them: a path or a word for a
            dataset, a `Dataset`, a tensor, or a loader. Built-in pictures serve where there are none.
        limit: How many of them to use at most: 8 if not given, 16 with an adaptive plan, 256 with `int8`.
        int8: Quantise weights and activations to eight bits after training. Up to 64 of the images calibrate and the
            others compare; where more than 4 % of their top-1 change, the products that suffer most stay in float, an
            eighth, a quarter or half of them, and what changes least is written.
        threads: For the comparison.

    Raises:
        PmvitError: If a package is missing, the runtime cannot take the model, or gives something else than PyTorch.
    """
    path = Path(path)
    runtime = _runtime(path, to)
    check_trainable(model)
    check_writable(path)
    if int8 and runtime.name not in QUANTIZING:
        raise PmvitError(f"expected {' or '.join(QUANTIZING)} for int8; got {runtime.name}")
    if int8 and images is None:
        raise PmvitError("int8 is calibrated on images like those the model will see: pass some of yours")
    size = batch if batch is not None else 1 if runtime.fixed_batch else None
    if limit is not None and limit < 1:
        raise PmvitError(f"limit: expected 1 or more, got {limit}")
    is_adaptive = any(isinstance(module, AdaptiveBlock) for module in model.modules())
    shown = prepared_images(model, images, limit or (INT8_IMAGES if int8 else 16 if is_adaptive else 8))
    if size is not None:  # as many as fill batches, the same ones again if there are too few
        shown = shown.repeat(-(-size // len(shown)), 1, 1, 1)[: max(1, len(shown) // size) * size]
    first = min(CALIBRATING, len(shown) // 2) // (size or 1) * (size or 1) if int8 else 0
    calibration, compared = shown[:first] if first else shown, shown[first:]
    sizes = size or [1, *(len(rest) for rest in compared[1:].split(16) if len(rest))]  # more than one, if any will do
    plain = copy.deepcopy(model).to("cpu", torch.float32).eval()
    with torch.inference_mode():
        expected = torch.cat([as_module(plain)(some) for some in compared.split(sizes)])
    ready = as_module(optimize_for_inference(plain, target=runtime.target), apart=True)
    example = torch.zeros(size or 2, *shown.shape[1:])  # not the user's: some formats store it
    path.parent.mkdir(parents=True, exist_ok=True)
    compare = partial(_compared, runtime, compared, sizes, expected, threads or torch.get_num_threads(), is_adaptive)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        written, found = Path(folder) / path.name, []
        try:
            with quietly():
                runtime.write(ready, written, example, size is None)
            for file in _quantized(runtime, written, calibration.split(size or 1)) if int8 else [written]:
                found.append(compare(file, int8))
                if found[-1].agreement >= ENOUGH:
                    break
        except PmvitError:
            raise
        except Exception as error:  # whatever a converter or a runtime raises: it is about this model and this target
            raise PmvitError(f"{runtime.name} cannot take this model: {reason(error)}") from error
        best = max(found, key=lambda one: one.agreement)
        if not _is_close(best, is_adaptive):
            raise PmvitError(
                f"{runtime.name} gives other logits than PyTorch (by {best.max_error:.1%} of the largest, "
                f"{best.agreement:.0%} of {best.images} images agree): nothing was written"
            )
        for file in sorted(_files(best.path), key=lambda file: file == best.path):  # the file itself last
            make_shared(file)
            file.replace(path.parent / file.name)
    ways = zip(WAYS, found, strict=False) if int8 else ()
    tried = (Int8Trial(way.title, one.agreement, one.max_error, one.megabytes, one is best) for way, one in ways)
    result = replace(best, path=path, tried=tuple(tried))
    if result.warning is not None:
        warnings.warn(result.warning, stacklevel=2)
    return result


def _quantized(runtime: Runtime, path: Path, calibration: Sequence[Tensor]) -> Iterator[Path]:
    """A file in eight bits, one way after the other, each in a folder of its own."""
    for number, way in enumerate(WAYS):
        output = path.parent / str(number) / path.name
        output.parent.mkdir()
        with quietly():
            runtime.quantize(path, output, calibration, way)
        yield output


def _compared(
    runtime: Runtime,
    images: Tensor,
    sizes: int | list[int],
    expected: Tensor,
    threads: int,
    is_adaptive: bool,
    path: Path,
    int8: bool,
) -> Exported:
    """Open a file, run it on images, and see what differs from what is expected."""
    with quietly():
        run = runtime.open(path, threads)
        got = torch.cat([run(some) for some in images.split(sizes)])
    errors = (got - expected).abs().flatten(1).amax(1) / expected.abs().max().clamp(min=1e-6)
    # Where two choices of an adaptive plan cost the same up to rounding, runtimes may take either.
    otherwise = errors > TOLERANCE if is_adaptive and not int8 else torch.zeros(len(errors), dtype=torch.bool)
    max_error = math.inf if otherwise.all() else float(errors[~otherwise].max())
    agreement = float((logits_of(got).argmax(-1) == logits_of(expected).argmax(-1)).float().mean())
    megabytes = sum(file.stat().st_size for file in _files(path)) / 1e6
    return Exported(path, runtime.name, len(images), max_error, agreement, int8, megabytes, int(otherwise.sum()))


def _is_close(found: Exported, is_adaptive: bool) -> bool:
    """Whether a file gives what PyTorch does, as near as it can be expected to."""
    if found.int8:
        return found.agreement >= INT8_AGREEMENT and math.isfinite(found.max_error)
    if is_adaptive and (found.agreement < INT8_AGREEMENT or found.chose_otherwise > MOST_OTHERWISE * found.images):
        return False
    return found.max_error <= TOLERANCE


def _files(path: Path) -> list[Path]:
    """A file, and those that lie beside it."""
    return [file for file in path.parent.iterdir() if file.is_file()]


def _runtime(path: Path, to: str | None) -> Runtime:
    name = to or next((name for name, runtime in RUNTIMES.items() if runtime.suffix == path.suffix), None)
    if name is None:
        endings = ", ".join(f"{runtime.suffix} ({name})" for name, runtime in RUNTIMES.items())
        raise PmvitError(f"expected a file name with one of the endings {endings}; got {path.name}")
    runtime = runtime_called(name)
    if path.suffix != runtime.suffix:
        raise PmvitError(f"expected a name that ends in {runtime.suffix} for {to}; got {path.name}")
    return runtime


def prepared_images(model: nn.Module, images: ImageData | None, count: int) -> Tensor:
    """The first of some images, prepared for the model; built-in pictures if there are none."""
    host = host_of(model)
    if images is None:
        return built_in_images(host.input_size(), count)
    found = first_images(as_loader(model, images, labels=False, shuffle=True), count)
    check_size(host, found)
    return found.float().cpu()


def built_in_images(size: tuple[int, ...], count: int) -> Tensor:
    """Pictures that come with the package, resized; of about unit variance, as prepared images are.

    The shape of an example ends with height and width: each frame of a video is a picture of its own, and one stands
    for a spectrogram.
    """
    from pmvit.data.demo import MEAN, STD, demo_images

    frames, drawn = math.prod(size[:-3]), demo_images("test")[0]
    drawn = drawn[: count * frames] if frames == 1 else drawn[torch.arange(count * frames) % len(drawn)]
    pictures = (drawn[:, None].float() / 255 - MEAN) / STD
    resized = F.interpolate(pictures, size[-2:], mode="bilinear").expand(-1, channels_of(size), -1, -1)
    return resized.reshape(-1, *size).contiguous()
