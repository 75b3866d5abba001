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
from pmvit.hosts.modes import check_trainable
from pmvit.hosts.outputs import as_module, logits_of
from pmvit.runtime.export.targets import QUANTIZING, RUNTIMES, Runtime, first_line, runtime_called
from pmvit.runtime.optimize import optimize_for_inference

TOLERANCE = 1e-3  # largest error of a logit in float32, relative to the largest logit
INT8_AGREEMENT = 0.7  # share of images with the same top-1 below which eight bits have broken the model
MOST_OTHERWISE = 0.25  # share of images of which an adaptive plan may merge other tokens than in PyTorch


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
    if int8 and runtime.name not in QUANTIZING:
        raise PmvitError(f"expected {' or '.join(QUANTIZING)} for int8; got {runtime.name}")
    if int8 and images is None:
        raise PmvitError("int8 is calibrated on images like those the model will see: pass some of yours")
    size = batch if batch is not None else 1 if runtime.fixed_batch else None
    is_adaptive = any(isinstance(module, AdaptiveBlock) for module in model.modules())
    shown = prepared_images(model, images, 64 if int8 else 16 if is_adaptive else 8)
    if size is not None:  # as many as fill batches, the same ones again if there are too few
        shown = shown.repeat(-(-size // len(shown)), 1, 1, 1)[: max(1, len(shown) // size) * size]
    half = len(shown) // (2 * (size or 1)) * (size or 1) if int8 else 0
    calibration, compared = shown[:half] if half else shown, shown[half:]
    sizes = size or [1, *(len(rest) for rest in compared[1:].split(16) if len(rest))]  # more than one, if any will do
    plain = copy.deepcopy(model).to("cpu", torch.float32).eval()
    with torch.inference_mode():
        expected = torch.cat([as_module(plain)(some) for some in compared.split(sizes)])
    ready = as_module(optimize_for_inference(plain, target=runtime.target), apart=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        written = Path(folder) / path.name
        try:
            example = torch.zeros(size or 2, *shown.shape[1:])  # not the user's: some formats store it
            calibrating = calibration.split(size or 1) if int8 else ()
            run = runtime.make(ready, written, example, size is None, calibrating, threads or torch.get_num_threads())
            got = torch.cat([run(some) for some in compared.split(sizes)])
        except PmvitError:
            raise
        except Exception as error:  # whatever a converter or a runtime raises: it is about this model and this target
            raise PmvitError(f"{runtime.name} cannot take this model: {first_line(error, 300)}") from error
        errors = (got - expected).abs().flatten(1).amax(1) / expected.abs().max().clamp(min=1e-6)
        # Where two choices of an adaptive plan cost the same up to rounding, runtimes may take either.
        otherwise = errors > TOLERANCE if is_adaptive and not int8 else torch.zeros(len(errors), dtype=torch.bool)
        max_error = math.inf if otherwise.all() else float(errors[~otherwise].max())
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


def _runtime(path: Path, to: str | None) -> Runtime:
    name = to or next((name for name, runtime in RUNTIMES.items() if runtime.suffix == path.suffix), None)
    if name is None:
        endings = ", ".join(f"{runtime.suffix} ({name})" for name, runtime in RUNTIMES.items())
        raise PmvitError(f"expected a file name with one of the endings {endings}; got {path.name}")
    runtime = runtime_called(name)
    if path.suffix != runtime.suffix:
        raise PmvitError(f"expected a name that ends in {runtime.suffix} for {to}; got {path.name}")
    return runtime


def prepared_images(model: nn.Module, images: Tensor | Iterable[Any] | None, count: int) -> Tensor:
    """The first of some images, prepared for the model; built-in pictures if there are none."""
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
