"""A few images for a page: as the model sees them, with what it and its original say of them."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from pmvit.data.demo import DEMO, demo_images, demo_loader
from pmvit.data.segmentation import has_masks, open_pairs
from pmvit.data.sources import BROKEN_IMAGE, FolderSource, Sample, Stream, open_source, spread
from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode
from pmvit.hosts.outputs import gives_logits, predict
from pmvit.loading import num_classes_of, open_loader
from pmvit.reporting.seen import Sight, data_uri, likeliest


class _Shown(NamedTuple):
    picture: Image.Image
    name: str
    label: int | None


def open_batches(model: nn.Module, data: str | Path, *, limit: int | None, workers: int = 2) -> Any:
    """Batches to evaluate on; if there is a limit, the images come in an order that depends on nothing but a seed."""
    if data == DEMO:
        return demo_loader("test")
    pixels = host_of(model).outputs().pixel_classes is not None
    masks = pixels and has_masks(data)
    return open_loader(
        model,
        data,
        labels=masks or not pixels,
        whole=masks,
        split="val",
        workers=workers,
        shuffle=limit is not None,
        **({} if masks else {"batch_size": 64}),
    )


def gallery(
    model: nn.Module, original: nn.Module, data: str | Path, count: int, names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Images taken evenly from all there are, each as JSON data: `src`, `caption`, and the first predictions."""
    sight = Sight(model)
    classifies = gives_logits(model) and host_of(model).outputs().pixel_classes is None
    names = _folder_names(model, data) or names
    device = next(model.parameters()).device
    made = []
    with evaluation_mode(model), evaluation_mode(original), torch.inference_mode():
        for shown in _choose(model, data, count):
            prepared = sight.prepare(shown.picture)
            entry: dict[str, Any] = {"src": data_uri(sight.picture(prepared)), "caption": shown.name}
            if shown.label is not None and classifies:
                entry["label"] = names[shown.label] if shown.label < len(names) else f"class {shown.label}"
            if classifies:
                image: Tensor = prepared[None].to(device)
                for key, each in (("original", original), ("compressed", model)):
                    entry[key] = likeliest(predict(each, image)[0].cpu(), names, 1)[0]
            made.append(entry)
    return made


def _choose(model: nn.Module, data: str | Path, count: int) -> Iterator[_Shown]:
    """Images that can be read, spread over all there are."""
    if data == DEMO:
        pictures, labels = demo_images("test", count)
        for number, (picture, label) in enumerate(zip(pictures, labels.tolist(), strict=True)):
            yield _Shown(Image.fromarray(picture.numpy()), f"Fashion-MNIST, test image {number}", label)
        return
    for sample in _samples(model, data, count):
        try:
            yield _Shown(sample.open(Sight(model).mode), Path(sample.name).name, sample.label)
        except BROKEN_IMAGE:
            continue


def _samples(model: nn.Module, data: str | Path, count: int) -> Iterator[Sample]:
    classes = host_of(model).outputs().pixel_classes
    if classes is not None and has_masks(data):
        pairs = open_pairs(data, classes, "val", None)
        yield from (pairs.sample(index) for index in spread(len(pairs), count))
        return
    source = open_source(data, num_classes_of(model))
    if isinstance(source, Stream):
        yield from islice(source.samples(0, 1, None), count)
    else:
        yield from (source[index] for index in spread(len(source), count))


def _folder_names(model: nn.Module, data: str | Path) -> tuple[str, ...]:
    """The names of the class folders, if there is one for each class of the model and they are more than numbers."""
    classes = num_classes_of(model)
    source = open_source(data, classes) if data != DEMO and host_of(model).outputs().pixel_classes is None else None
    if not isinstance(source, FolderSource) or source.labels is None:
        return ()
    root = Path(data)
    found = {n: path.relative_to(root).parts[0] for n, path in zip(source.labels, source.files, strict=True)}
    names = tuple(found.get(number, "") for number in range(classes or 0))
    return names if all(name and not name.isdecimal() for name in names) and not _are_synsets(names) else ()


def _are_synsets(names: tuple[str, ...]) -> bool:
    return all(name[0] == "n" and name[1:].isdecimal() for name in names)
