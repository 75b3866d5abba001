"""A few images for a page: as the model gets them, with what it and its original say of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import nn

from pmvit.data import demo
from pmvit.data.loaders import Broken
from pmvit.data.segmentation import has_masks, open_pairs
from pmvit.data.sources import choose_samples, open_source
from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode
from pmvit.hosts.outputs import gives_logits, predict
from pmvit.loading import num_classes_of
from pmvit.reporting.images import InputImages, data_uri, likeliest, readable


class _Shown(NamedTuple):
    picture: Image.Image
    name: str
    label: int | None


def gallery(
    model: nn.Module, original: nn.Module, data: str | Path, count: int, names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Images taken evenly from all there are, each as JSON data: `src`, `caption`, and the first predictions."""
    images = InputImages(model)
    classifies = gives_logits(model) and host_of(model).outputs().pixel_classes is None
    device = next(model.parameters()).device
    made = []
    with evaluation_mode(model), evaluation_mode(original), torch.inference_mode():
        for shown in _choose(model, data, count, images.mode):
            prepared = images.prepare(shown.picture)
            entry: dict[str, Any] = {"src": data_uri(images.picture(prepared)), "caption": shown.name}
            if shown.label is not None and classifies:
                entry["label"] = names[shown.label] if shown.label < len(names) else f"class {shown.label}"
            if classifies:
                for key, each in (("original", original), ("compressed", model)):
                    entry[key] = likeliest(predict(each, prepared[None].to(device))[0].cpu(), names, 1)[0]
            made.append(entry)
    return made


def _choose(model: nn.Module, data: str | Path, count: int, mode: str) -> Iterator[_Shown]:
    """Images that can be read, spread over all there are."""
    classes = host_of(model).outputs().pixel_classes
    if data == demo.DEMO:
        pictures, labels = demo.demo_images("test", count)
        for number, (picture, label) in enumerate(zip(pictures, labels.tolist(), strict=True)):
            yield _Shown(Image.fromarray(picture.numpy()), f"Fashion-MNIST, test image {number}", label)
        return
    if classes is not None and has_masks(data):
        samples = choose_samples(open_pairs(data, classes, "val"), count)
    else:
        samples = choose_samples(open_source(data, num_classes_of(model)), count)
    for _, sample, picture in readable(samples, mode, Broken()):
        yield _Shown(picture, Path(sample.name).name, sample.label if isinstance(sample.label, int) else None)
