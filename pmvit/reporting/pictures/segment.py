"""`segment`: a few whole images through a segmenter and its original, to look at."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from pmvit.compression import compression_of
from pmvit.data.loaders import Broken
from pmvit.data.opening import open_images
from pmvit.data.samples import Mask
from pmvit.data.segmentation import Split
from pmvit.data.sources import choose_samples
from pmvit.data.transforms import Preparation, color_mode
from pmvit.errors import PmvitError
from pmvit.evaluation.reference import opened, reference_for
from pmvit.evaluation.segmentation import classes_at
from pmvit.evaluation.sliding import check_stride, sliding_logits, window_of
from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode
from pmvit.progress import track
from pmvit.reporting.class_names import class_names
from pmvit.reporting.images import readable
from pmvit.reporting.pictures.segmentation import Segmentation, SegmentedImage


def segment(
    model: nn.Module,
    data: str | Path,
    *,
    original: str | Path | nn.Module | None = None,
    limit: int = 8,
    names: str | Path | None = None,
    stride: int | tuple[int, int] | None = None,
    batch_size: int = 8,
    split: Split = "val",
    first_label: int | None = None,
    progress: bool = True,
) -> Segmentation:
    """Label the pixels of whole images, at the size of their files, with a model and its original.

    Args:
        model: One that labels pixels, compressed or not.
        data: Images with masks, as `open_pairs` knows them; images alone, as `open_source` does; or an image file.
        original: What the model is compared with: a model, or its name or path as `create_model` takes it; if not
            given, what a compressed one was made of or, if that is not at hand, its own weights uncompressed.
        limit: How many images at most, taken evenly from all there are; the first ones of a stream.
        names: A text file with the names of the classes, one a line; those that the model says if not given.
        stride: Pixels from one window to the next; the window itself if not given.
        batch_size: Windows that run at a time.
        split: Which images with masks, where `data` does not say.
        first_label: The number of the first class in plain masks.
        progress: Show a progress bar.

    Raises:
        PmvitError: If the models do not label pixels alike, or there is no image that can be read.
    """
    host = host_of(model)
    classes = host.outputs().pixel_classes
    if classes is None:
        raise PmvitError(f"expected a model that labels pixels; a {type(model).__name__} does not")
    if limit < 1:
        raise PmvitError(f"limit: expected 1 or more, got {limit}")
    titles, models = ("original", "model"), [model]
    if compression_of(model) is not None:
        reference = reference_for(model, original)
        titles, models = (reference.heading, "compressed"), [reference.model, model]
    elif original is not None:
        models = [opened(original), model]
    traits = []
    for each in (model, models[0]):
        (channels, height, width), count = host_of(each).input_size(), host_of(each).outputs().pixel_classes
        traits.append(f"{count} classes at {height} x {width} pixels of {channels} channels")
    if traits[0] != traits[1]:
        raise PmvitError(f"expected an original with {traits[0]}, as the model has them; got one with {traits[1]}")
    check_stride(window_of(host), stride)
    words, made, broken = class_names(model, names), [], Broken()
    source = open_images(model, data, labels=False, split=split, first_label=first_label)
    chosen = choose_samples(source, limit)
    pictures = readable(chosen, "RGB", broken)
    for _, sample, picture in track(pictures, "segment", len(chosen), show=progress):
        found = [label_pixels(each, picture, stride=stride, batch_size=batch_size) for each in models]
        mask = sample.label.read((picture.height, picture.width)) if isinstance(sample.label, Mask) else None
        compressed = found[1] if len(found) > 1 else None
        made.append(SegmentedImage(sample.name, picture, classes, mask, found[0], compressed))
    return Segmentation(tuple(made), words, titles, broken)


def label_pixels(
    model: nn.Module, picture: Image.Image, *, stride: int | tuple[int, int] | None = None, batch_size: int = 8
) -> Tensor:
    """The class of each pixel of a whole image, as (height, width), by a window that slides over it."""
    host = host_of(model)
    config, window = host.data_config(), window_of(host)
    pixels = Preparation(config).whole(picture.convert(color_mode(config)))[None]
    with evaluation_mode(model), torch.inference_mode():
        on_device = pixels.to(next(model.parameters()).device)
        scores = sliding_logits(model, on_device, window, check_stride(window, stride), batch_size=batch_size)
        return classes_at(scores, (picture.height, picture.width))[0].cpu()
