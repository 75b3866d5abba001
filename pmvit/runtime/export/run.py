"""Export: passes, the runtime's file, and a comparison with PyTorch on real images before anything is called done."""

import copy
import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock
from pmvit.data.batches import first_images
from pmvit.errors import PmvitError
from pmvit.files import check_writable, make_shared
from pmvit.hosts import host_of
from pmvit.hosts.modes import check_trainable, evaluation_mode
from pmvit.hosts.outputs import as_module, logits_of
from pmvit.runtime.export.quantize import QUANTIZERS
from pmvit.runtime.export.targets import RUNTIMES, Run, Runtime, runtime_called
from pmvit.runtime.optimize import optimize_for_inference

TOLERANCE = 1e-3  # largest error of a logit in float32, relative to the largest logit
INT8_AGREEMENT = 0.7  # share of images with the same top-1 below which eight bits have broken the model
MOST_OTHERWISE = 0.5  # of the images may have other tokens merged by an adaptive plan than in PyTorch


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
    """

    path: Path
    runtime: str
    images: int
    max_error: float
    agreement: float
    int8: bool
    megabytes: float
    chose_otherwise: int = 0


def export(
    model: nn.Module,
    path: str | Path,
    *,
    to: str | None = None,
    batch: int | None = None,
    images: Tensor | Iterable[Any] | None = None,
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
        images: Prepared images to compare on, and to calibrate on with `int8`: a tensor, or a loader. Built-in pictures
            serve where there are none.
        int8: Quantise weights and activations to eight bits after training; half of the images calibrate, half compare.
        threads: For the comparison.

    Raises:
        PmvitError: If a package is missing, the runtime cannot take the model, or gives something else than PyTorch.
    """
    path = Path(path)
    runtime = _runtime(path, to)
    check_trainable(model)
    check_writable(path)
    if int8 and runtime.name not in QUANTIZERS:
        raise PmvitError(f"expected {' or '.join(QUANTIZERS)} for int8; got {runtime.name}")
    if int8 and images is None:
        raise PmvitError("int8 is calibrated on images like those the model will see: pass some of yours")
    size = batch if batch is not None else 1 if runtime.fixed_batch else None
    is_adaptive = any(isinstance(module, AdaptiveBlock) for module in model.modules())
    shown = _whole_batches(_first_images(model, images, 64 if int8 else 32 if is_adaptive else 8), size)
    calibration, compared = _halves(shown, size or 1) if int8 else (shown, shown)
    plain = copy.deepcopy(model).to("cpu", torch.float32)
    expected = _outputs(plain, compared)
    ready = as_module(optimize_for_inference(plain, target=runtime.target), apart=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        written = Path(folder) / path.name
        try:
            example = torch.zeros(size or 2, *shown.shape[1:])  # not the user's: some formats store it
            runtime.write(ready, written, example, any_batch=size is None)
            if int8:
                QUANTIZERS[runtime.name](written, list(calibration.split(size or 1)))
            run = runtime.open(written, threads or torch.get_num_threads())
            got = _run(run, compared, size)
        except PmvitError:
            raise
        except Exception as error:  # whatever a converter or a runtime raises: it is about this model and this target
            raise PmvitError(f"{runtime.name} cannot take this model: {_first_line(error)}") from error
        errors = (got - expected).abs().flatten(1).amax(1) / expected.abs().max().clamp(min=1e-6)
        # Where two choices of an adaptive plan cost the same up to rounding, runtimes may take either.
        otherwise = errors > TOLERANCE if is_adaptive and not int8 else torch.zeros(len(errors), dtype=torch.bool)
        max_error = float(errors[~otherwise].max()) if not otherwise.all() else math.inf
        agreement = float((logits_of(got).argmax(-1) == logits_of(expected).argmax(-1)).float().mean())
        is_close = agreement >= INT8_AGREEMENT and math.isfinite(max_error) if int8 else max_error <= TOLERANCE
        if is_adaptive:
            is_close = is_close and agreement >= INT8_AGREEMENT and float(otherwise.float().mean()) <= MOST_OTHERWISE
        if not is_close:
            raise PmvitError(
                f"{runtime.name} gives other logits than PyTorch (by {max_error:.1%} of the largest, {agreement:.0%} "
                f"of {len(compared)} images agree): nothing was written"
            )
        del run
        files = [file for file in Path(folder).iterdir() if file.is_file()]
        megabytes = sum(file.stat().st_size for file in files) / 1e6
        for file in sorted(files, key=lambda file: file == written):  # the file itself last
            make_shared(file)
            file.replace(path.parent / file.name)
    return Exported(path, runtime.name, len(compared), max_error, agreement, int8, megabytes, int(otherwise.sum()))


def _whole_batches(images: Tensor, size: int | None) -> Tensor:
    """As many images as fill batches of a size, the same ones again if there are too few."""
    if size is None:
        return images
    return images.repeat(-(-size // len(images)), 1, 1, 1)[: max(1, len(images) // size) * size]


def _halves(images: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Images to calibrate on and others to compare on; the same where there is but one batch."""
    half = len(images) // (2 * size) * size
    return (images[:half], images[half:]) if half else (images, images)


def _runtime(path: Path, to: str | None) -> Runtime:
    if to is not None:
        runtime = runtime_called(to)
        if path.suffix != runtime.suffix:
            raise PmvitError(f"expected a name that ends in {runtime.suffix} for {to}; got {path.name}")
        return runtime
    fitting = [name for name, runtime in RUNTIMES.items() if runtime.suffix == path.suffix]
    if not fitting:
        endings = ", ".join(f"{runtime.suffix} ({name})" for name, runtime in RUNTIMES.items())
        raise PmvitError(f"expected a file name with one of the endings {endings}; got {path.name}")
    return runtime_called(fitting[0])


def _first_images(model: nn.Module, images: Tensor | Iterable[Any] | None, count: int) -> Tensor:
    """So many images, prepared for the model."""
    size = host_of(model).input_size()
    if images is None:
        return built_in_images(size, count)
    if not isinstance(images, Tensor):
        images = first_images(images, count)
    if tuple(images.shape[1:]) != size:
        raise PmvitError(f"expected images of shape {size}, as the model takes them; got {tuple(images.shape[1:])}")
    return images[:count].float().cpu()


def built_in_images(size: tuple[int, int, int], count: int) -> Tensor:
    """Pictures that come with the package, resized; of about unit variance, as prepared images are."""
    from pmvit.data.demo import MEAN, STD, demo_images

    pictures = (demo_images("test", count)[0][:, None].float() / 255 - MEAN) / STD
    return F.interpolate(pictures, size[1:], mode="bilinear").expand(-1, size[0], -1, -1).contiguous()


def _outputs(model: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode(), evaluation_mode(model):
        return torch.cat([as_module(model)(batch) for batch in images.split(16)]).clone()


def _run(run: Run, images: Tensor, size: int | None) -> Tensor:
    """Run all images; with any batch size, in batches of two sizes."""
    if size is not None:
        return torch.cat([run(batch) for batch in images.split(size)])
    rest = images[1:].split(16) if len(images) > 1 else ()
    return torch.cat([run(images[:1]), *(run(batch) for batch in rest)])


def _first_line(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:300]}"
