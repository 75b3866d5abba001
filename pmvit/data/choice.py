"""A few images of many, to look at."""

from itertools import islice
from pathlib import Path

from timm.data.readers.img_extensions import get_img_extensions

from pmvit.data.sources import Sample, Stream, open_source


def choose_samples(data: str | Path, count: int, num_classes: int | None = None) -> list[Sample]:
    """Images taken evenly from all that `open_source` finds, the first ones of a stream; or the one that is named."""
    if Path(data).is_file() and Path(data).suffix.lower() in get_img_extensions():
        return [Sample(Path(data), None, str(data))]
    source = open_source(data, num_classes)
    if isinstance(source, Stream):
        return list(islice(source.samples(0, 1, None), count))
    return [source[index] for index in spread(len(source), count)]


def spread(length: int, count: int) -> list[int]:
    """So many numbers below a length, evenly spread; all of them if there are fewer."""
    count = min(count, length)
    return [number * length // count for number in range(count)]
