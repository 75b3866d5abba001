"""What may stand for images wherever a verb takes some, made a loader for a model: the one place that decides it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from pmvit.data.batches import DIMENSIONS, EveryNth, described, split_item
from pmvit.data.generated import GeneratedImages
from pmvit.data.loaders import ImageLoader, create_loader
from pmvit.data.segmentation import Split, has_masks, open_pairs
from pmvit.data.sources import Source, Stream, is_dataset, open_dataset, open_source
from pmvit.data.transforms import check_takes_images
from pmvit.errors import PmvitError
from pmvit.hosts import host_of
from pmvit.hosts.making import DATA_KEYS, check_data, one_line
from pmvit.hosts.outputs import num_classes_of

# A path or a word for a dataset, as `--data` takes it; a `Dataset`; prepared images, as one tensor, one batch of a
# processor's, or a loader of batches. `as_loader` says more.
ImageData = str | Path | Tensor | Dataset[Any] | Mapping[str, Any] | Iterable[Any]
BATCH = 64  # images of a tensor that are taken at a time


def as_loader(model: nn.Module, data: ImageData, **reading: Any) -> Iterable[Any]:
    """The batches that `data` stands for.

    Args:
        model: For which images are prepared.
        data: A path or a word for a dataset, as `open_images` knows them. A `torch.utils.data.Dataset`, or one of
            Hugging Face's `datasets`, of images with or without labels: Pillow's are prepared as those of a path,
            tensors are taken as they are. Or what is prepared: a tensor of shape (images, channels, height, width),
            what a processor returns (`pixel_values`, `pixel_values_videos`, `input_values`), or anything that yields
            batches, as a `DataLoader` does: images, `(images, labels)`, or such dictionaries, perhaps with `labels`.
            Videos and spectrograms have to be prepared, as the model takes them.
        reading: Arguments of `open_loader`, for what is opened here. Of a `Dataset`, which may not be able to go to
            other processes, this one reads unless `workers` says otherwise.

    Raises:
        PmvitError: If it is none of these.
    """
    if isinstance(data, (str, Path)):
        return open_loader(model, data, **reading)
    if is_dataset(data) and not _gives_batches(data):
        return open_loader(model, data, **{"workers": 0, **reading})
    if isinstance(data, Tensor) and data.dim() == len(host_of(model).input_size()) + 1:
        return list(data.split(BATCH))
    if isinstance(data, Mapping) and split_item(data)[0] is not None:
        return [data]
    if isinstance(data, (Tensor, Mapping, bytes)) or not isinstance(data, Iterable):
        raise PmvitError(
            "expected images: a path or a word for a dataset, a Dataset, a tensor of shape (images, "
            f"{', '.join(map(str, host_of(model).input_size()))}), or a loader of batches; got {described(data)}"
        )
    return data


def evaluation_loader(model: nn.Module, data: ImageData, **reading: Any) -> Iterable[Any]:
    """`as_loader` of images to evaluate on: whole, with the masks that they have, for a model that labels pixels."""
    labels = True
    if isinstance(data, (str, Path)):
        labels = host_of(model).outputs().pixel_classes is None or has_masks(data)
    return as_loader(model, data, labels=labels, whole=True, split="val", **reading)


def _gives_batches(dataset: Any) -> bool:
    """Whether a dataset makes batches itself, as a pipeline of webdataset may."""
    first = split_item(next(iter(dataset), None))[0] if isinstance(dataset, IterableDataset) else None
    return isinstance(first, Tensor) and first.dim() in DIMENSIONS[1:]


def prepare_as(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Change how images are prepared for a model: entries of timm's data configuration, as `mean` and `crop_pct`.

    Raises:
        PmvitError: If an entry is unknown or wrong, or the model cannot have it, as images of another size.
    """
    if not values:
        return
    host = host_of(model)
    if unknown := [name for name in values if name not in DATA_KEYS]:
        raise PmvitError(f"expected one of {', '.join(DATA_KEYS)} to prepare images by; got {unknown[0]}")
    host.model.pretrained_cfg.update(values)
    with one_line(f"expected what images can be prepared by; got {dict(values)}"):
        config = host.data_config()
    for name, value in values.items():
        if config[name] != (list(value) if isinstance(value, tuple) else value):
            more = ": make the model for these, by --img-size or img_size=" if name == "input_size" else ""
            raise PmvitError(f"{name}: expected {config[name]}, as this model has it; got {value}{more}")
    check_takes_images(config)
    check_data(config)


def open_images(
    model: nn.Module,
    data: str | Path | Dataset[Any] | None,
    *,
    labels: bool = True,
    split: Split = "train",
    first_label: int | None = None,
    seed: int = 0,
) -> Source | Stream:
    """Find the images that a path names: the one place where a path gets a meaning, which depends on the model.

    A `Dataset` is taken as it is, with the labels that it has. Without either, images are generated.

    Args:
        model: Whose classes count: of images, or of pixels.
        data: What `open_source` knows; for a model that labels pixels, what `open_pairs` knows.
        labels: Whether labels will be used, so that the classes have to be those of the model.
        split: What images with masks are for, where `data` does not say.
        first_label: The number of the first class in plain masks.
        seed: Of images that are generated.
    """
    if data is None:
        config = host_of(model).data_config()
        check_takes_images(config)
        return GeneratedImages(config, seed=seed)
    if not isinstance(data, (str, Path)):
        return open_dataset(data)
    classes = host_of(model).outputs().pixel_classes
    if classes is not None and (labels or has_masks(data)):
        return open_pairs(data, classes, split, first_label)
    if first_label is not None:
        raise PmvitError(f"first_label is for images with masks; got it for {data}")
    return open_source(data, num_classes_of(model) if labels else None)


def open_loader(
    model: nn.Module,
    data: str | Path | Dataset[Any] | None,
    *,
    labels: bool = True,
    whole: bool = False,
    split: Split = "train",
    first_label: int | None = None,
    batch_size: int | None = None,
    workers: int = 2,
    shuffle: bool = False,
    seed: int = 0,
    strict: bool = False,
    limit: int | None = None,
    process: tuple[int, int] = (0, 1),
) -> ImageLoader:
    """Make a loader of the images that a path names, of a `Dataset`, or of generated ones, prepared for the model.

    See `open_images` for what the path may be, `labels`, `split` and `first_label`, and `create_loader` for the rest.
    """
    return create_loader(
        open_images(model, data, labels=labels, split=split, first_label=first_label, seed=seed),
        host_of(model).data_config(),
        whole=whole,
        batch_size=batch_size,
        workers=workers,
        shuffle=shuffle,
        seed=seed,
        strict=strict,
        limit=limit,
        process=process,
    )


def open_validation(
    model: nn.Module,
    data: ImageData | None,
    labels: bool,
    workers: int,
    process: tuple[int, int],
    first_label: int | None,
) -> Any:
    """Batches of validation images for one of several processes, which can be read again; `None` if there is no data.

    Images with masks come whole, one at a time; of others, every process gets 64 at a time.
    """
    count = process[1]
    if data is None:
        return None
    loader = as_loader(
        model,
        data,
        labels=labels,
        whole=True,
        split="val",
        first_label=first_label,
        batch_size=BATCH * count,
        workers=workers,
        process=process,
    )
    is_shared = isinstance(loader, ImageLoader) and loader is not data
    return loader if count == 1 or is_shared else EveryNth(loader, process)
