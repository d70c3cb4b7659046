"""Bytes -> pixels: the only place that opens an image."""

from __future__ import annotations

import io
import re
import warnings

import numpy as np
from PIL import (  # the plugins of the allow-list, so that Pillow need not load every other one
    BmpImagePlugin,  # noqa: F401
    GifImagePlugin,  # noqa: F401
    Image,
    ImageFile,
    JpegImagePlugin,  # noqa: F401
    PngImagePlugin,  # noqa: F401
    TiffImagePlugin,  # noqa: F401
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401
)

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MAX_PIXELS = 100_000_000

_QUIET_MODULE = r"PIL\."
_QUIET = ("ignore", None, Warning, re.compile(_QUIET_MODULE), 0)
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadImage(Exception):
    """These bytes give no picture; the text says why in one short sentence."""


def decode(
    data: bytes,
    *,
    channels: int = 3,
    background: tuple[int, int, int] = (255, 255, 255),
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """The upright picture in `data` as uint8 (height, width, channels): colour for 3 channels, luminance for 1.

    Transparent pixels show `background`; an animation gives its first frame. A file that is damaged, cut short or
    larger than `max_pixels` (read from its header, before any pixel is decoded) raises BadImage and nothing else.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, not {channels}")
    if not data:
        raise BadImage("the file is empty")
    _strict_and_quiet()
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise BadImage(f"{width}x{height} pixels is more than the limit of {max_pixels:,}")
            image.load()
            flat = _to_mode(image, "L" if channels == 1 else "RGB", background)
            turn = _UPRIGHT.get(_orientation(image))
        upright = flat if turn is None else flat.transpose(turn)
        return np.array(upright, dtype=np.uint8).reshape(upright.height, upright.width, channels)
    except BadImage:
        raise
    except Exception as error:  # Pillow's readers raise nearly every kind on damaged bytes
        raise BadImage(_reason(error)) from None


def _to_mode(image: Image.Image, mode: str, background: tuple[int, int, int]) -> Image.Image:
    """Any Pillow mode as 8-bit "RGB" or "L", with nothing clipped and nothing transparent."""
    if image.mode == "F":
        raise BadImage("floating-point pixels have no agreed range; save the picture with 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;"):
        image = _eight_bit(image)
    if image.mode == "La":  # Pillow knows no direct way from premultiplied grey
        image = image.convert("LA")
    if image.has_transparency_data:
        canvas = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(canvas, image.convert("RGBA")).convert("RGB")
    elif image.mode not in ("RGB", "L", "1"):
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def _eight_bit(image: Image.Image) -> Image.Image:
    """16-bit grey scaled to 8 bits; Pillow's own conversion would clip everything above 255 to white."""
    wide = np.asarray(image).astype(np.int64)
    if wide.min() < 0 or wide.max() > 65535:
        raise BadImage("32-bit pixels outside 0..65535 have no agreed range; save the picture with 8 or 16 bits")
    narrow = Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    key = image.info.get("transparency")
    if isinstance(key, int):
        narrow.putalpha(Image.fromarray(np.where(wide == key, 0, 255).astype(np.uint8)))
    return narrow


def _orientation(image: Image.Image) -> int:
    """The camera's orientation tag; unreadable metadata counts as upright, since the pixels are fine."""
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:
        return 1


def _strict_and_quiet() -> None:
    """Ask Pillow for whole pictures only, and keep its remarks about odd metadata off the screen.

    Both are settings of the process, which another library may have changed, so they are looked at on every call. They
    are never set back: swapping them in and out is not safe under threads, and touching the filters every time would
    make Python forget which warnings it has already shown.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    if not warnings.filters or warnings.filters[0] != _QUIET:
        warnings.filterwarnings("ignore", module=_QUIET_MODULE)


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"not a readable image ({', '.join(FORMATS)})"
    if isinstance(error, Image.DecompressionBombError):
        return "the header claims more pixels than Pillow's own limit allows"
    if isinstance(error, MemoryError):
        return "not enough memory to decode it"
    text = " ".join(str(error).split())
    if "truncated" in text.lower():
        return "the file is cut short"
    return f"damaged ({text[:120] or type(error).__name__})"
