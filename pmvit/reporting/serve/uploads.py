"""Images that somebody sends: looked at before they are decoded."""

import io
import warnings
from dataclasses import dataclass

from PIL import Image, ImageOps, UnidentifiedImageError

from pmvit.data.samples import BROKEN_IMAGE, in_mode
from pmvit.errors import PmvitError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")


class RefusedError(PmvitError):
    """What was sent is not taken; `status` is that of the HTTP answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """How large an image may be."""

    megabytes: float = 16.0  # of its file
    megapixels: float = 50.0  # read off the head of the file, before anything is decoded

    def __post_init__(self) -> None:
        if self.megabytes <= 0 or self.megapixels <= 0:
            raise PmvitError(f"limits: expected more than 0, got {self.megabytes} MB and {self.megapixels} megapixels")


def read_upload(content: bytes, limits: Limits) -> Image.Image:
    """Decode an image, upright, its first frame if it has several.

    One that is too large, of another kind, or broken is refused, with a sentence for whoever sent it.
    """
    if not content:
        raise RefusedError(400, "The file is empty: choose an image.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's about odd metadata and large images: there is a limit here
        try:
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                if image.width * image.height > 1e6 * limits.megapixels:
                    raise Image.DecompressionBombError
                return in_mode(ImageOps.exif_transpose(image), "RGB")
        except UnidentifiedImageError:
            kinds = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
            raise RefusedError(415, f"This is no image that can be read: send a {kinds} file.") from None
        except Image.DecompressionBombError:
            message = f"The image has more than {limits.megapixels:g} million pixels: send a smaller one."
            raise RefusedError(413, message) from None
        except BROKEN_IMAGE:
            raise RefusedError(422, "The image is broken: its file ends too early or is damaged.") from None
