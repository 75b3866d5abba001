"""`segment`: a few whole images through a segmenter and its original, to look at."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pmvit.compression import compression_of, decompress
from pmvit.data.choice import choose_samples, spread
from pmvit.data.folder import Broken, color_mode
from pmvit.data.pixels import Preparation
from pmvit.data.segmentation import PairSource, Split, has_masks, open_pairs
from pmvit.data.sources import BROKEN_IMAGE, Sample
from pmvit.errors import PmvitError
from pmvit.evaluation.segmentation import classes_at
from pmvit.evaluation.sliding import check_stride, sliding_logits
from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode
from pmvit.progress import track
from pmvit.reporting.segmentation import Segmentation, SegmentedImage, read_names


def segment(
    model: nn.Module,
    data: str | Path,
    *,
    original: nn.Module | None = None,
    images: int = 8,
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
        original: What the model is compared with; for a compressed one, its own weights uncompressed if not given.
        images: How many, taken evenly from all there are; the first ones of a stream.
        names: A text file with the names of the classes, one a line.
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
    if images < 1:
        raise PmvitError(f"images: expected 1 or more, got {images}")
    is_compressed = compression_of(model) is not None
    titles = ("original", "compressed" if is_compressed else "model")
    if original is None and is_compressed:
        original = decompress(copy.deepcopy(model))
        titles = ("original (same weights)", "compressed")
    models = [model] if original is None else [original, model]
    _check_alike(models)
    window = host.input_size()[1:]
    strides = check_stride(window, stride)
    words = () if names is None else read_names(Path(names), classes)
    config = host.data_config()
    preparation, mode = Preparation.of(config), color_mode(config)
    device = next(model.parameters()).device
    made: list[SegmentedImage] = []
    broken = Broken()
    chosen = _choose(data, classes, images, split, first_label)
    with evaluation_mode(model), evaluation_mode(original or model), torch.inference_mode():
        for candidate in track(chosen, "segment", len(chosen), show=progress):
            sample = candidate.sample
            try:
                picture, opened = sample.open("RGB"), sample.open(mode)
            except BROKEN_IMAGE as error:
                broken.files[sample.name] = f"{type(error).__name__}: {error}"
                continue
            size = picture.height, picture.width
            pixels = preparation.whole(opened)[None].to(device)
            found = []
            for each in models:
                scores = sliding_logits(each, pixels, window, strides, batch_size=batch_size)
                found.append(classes_at(scores, size)[0].cpu())
            compressed = found[1] if len(found) > 1 else None
            made.append(SegmentedImage(sample.name, picture, classes, candidate.mask(size), found[0], compressed))
    if not made:
        name, reason = next(iter(broken.files.items()))
        raise PmvitError(f"expected an image that can be read, got none: {name} ({reason})")
    return Segmentation(tuple(made), words, titles, broken)


def _check_alike(models: Sequence[nn.Module]) -> None:
    """Raise `PmvitError` if the models have other classes, or are made for images of another size."""
    traits = [(host_of(each).outputs().pixel_classes, host_of(each).input_size()) for each in models]
    if len(set(traits)) > 1:
        wanted, got = (f"{classes} classes at {size[1]} x {size[2]} pixels" for classes, size in reversed(traits))
        raise PmvitError(f"expected an original with {wanted}, as the model has them; got one with {got}")


class _Candidate(NamedTuple):
    """An image that is not decoded yet, and where its mask is, if it has one."""

    sample: Sample
    pairs: PairSource | None = None
    number: int = 0

    def mask(self, size: tuple[int, int]) -> Tensor | None:
        return None if self.pairs is None else self.pairs.mask(self.number, size)


def _choose(data: str | Path, classes: int, count: int, split: Split, first_label: int | None) -> list[_Candidate]:
    if has_masks(data):
        pairs = open_pairs(data, classes, split, first_label)
        return [_Candidate(pairs.sample(index), pairs, index) for index in spread(len(pairs), count)]
    if first_label is not None:
        raise PmvitError(f"first_label is for images with masks; got it for {data}")
    return [_Candidate(sample) for sample in choose_samples(data, count)]
