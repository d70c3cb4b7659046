"""Bytes -> pixels: the only place that opens an image.

Pillow reads every header and has the last word on every file. JPEG pixels come from simplejpeg where it is installed:
it drives the same library, libjpeg-turbo, gives the same pixels to the bit and takes a half to nine tenths of the time.
HEIC pixels come from pillow-heif, a plugin of Pillow, where it is installed.
"""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import (  # the plugins of the allow-list, so that Pillow need not load every other one
    AvifImagePlugin,
    BmpImagePlugin,  # noqa: F401
    GifImagePlugin,  # noqa: F401
    Image,
    ImageFile,
    Jpeg2KImagePlugin,  # noqa: F401
    JpegImagePlugin,
    PngImagePlugin,  # noqa: F401
    PpmImagePlugin,  # noqa: F401
    QoiImagePlugin,  # noqa: F401
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401
)

from vitrail.data.formats import (
    CAN_READ_HEIF,
    EXTENSIONS,
    FORMATS,
    HEAD_BYTES,
    RAW,
    SUPPORTED_FORMATS,
    detect_format,
    unsupported_reason,
)

try:
    import simplejpeg
except ImportError:  # the pixels are the same without it
    simplejpeg = None

MAX_PIXELS = 100_000_000
JPEG_SCALES = (8, 4, 2)  # by which a JPEG can be decoded smaller

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_QUIET_MODULE = r"PIL\."
_QUIET = ("ignore", None, Warning, re.compile(_QUIET_MODULE), 0)
_ORIENTATION_TAG = 0x0112
_BITS_TAG, _SAMPLES_TAG = 0x0102, 0x0153  # of a TIFF: bits of a sample, and whether it is unsigned, signed or a float
_SUBFILE_TAG, _SUB_IFDS_TAG, _DNG_TAG = 0x00FE, 0x014A, 0xC612
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)


class BadImage(Exception):
    """These bytes give no picture; the text says why in one short sentence."""


def decode(
    data: bytes,
    *,
    channels: int = 3,
    background: tuple[int, int, int] = (255, 255, 255),
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """The upright picture in `data` as uint8 (height, width, channels): luminance, colour, or colour and alpha.

    Transparent pixels show `background`, unless there is a channel for alpha; an animation gives its first frame. A
    file that is damaged, cut short or larger than `max_pixels` (read from its header, before any pixel is decoded)
    raises BadImage and nothing else.
    """
    return open_image(data, channels=channels, background=background, max_pixels=max_pixels).pixels()


def open_image(
    data: bytes,
    *,
    channels: int = 3,
    background: tuple[int, int, int] = (255, 255, 255),
    max_pixels: int = MAX_PIXELS,
) -> OpenedImage:
    """As decode, but only the header is read; the pixels, whole or smaller, are decoded when they are asked for."""
    if channels not in _MODES:
        raise ValueError(f"channels must be 1, 3 or 4, not {channels}")
    if not data:
        raise BadImage("the file is empty")
    _strict_and_quiet(max_pixels)
    with _one_reason(data):
        image = Image.open(io.BytesIO(data), formats=pillow_formats(data))
        width, height = image.size
        if width * height > max_pixels:
            raise BadImage(f"{width}x{height} pixels is more than the limit of {max_pixels:,}")
        if isinstance(image, TiffImagePlugin.TiffImageFile) and _is_raw(image):
            raise BadImage(unsupported_reason(RAW))
        return OpenedImage(image, data, channels, background)


class OpenedImage:
    """A picture whose header has been read."""

    def __init__(
        self, image: ImageFile.ImageFile, data: bytes, channels: int, background: tuple[int, int, int]
    ) -> None:
        self._image, self._data, self._channels, self._background = image, data, channels, background
        self.can_shrink = isinstance(image, JpegImagePlugin.JpegImageFile)
        if not self.can_shrink:
            image.load()  # some formats have their orientation after the pixels
        # Without metadata there is nothing to parse, which takes Pillow as long as opening the file.
        self._tag = 1 if self.can_shrink and not {"exif", "xmp"} & image.info.keys() else exif_orientation(image)
        self._stored = image.height, image.width  # as the file has it; Pillow changes what it says for a smaller one

    @property
    def size(self) -> tuple[int, int]:
        """(height, width), upright."""
        return self._stored[::-1] if self._tag in _SIDEWAYS else self._stored

    def pixels(self, shrink: int = 1) -> np.ndarray:
        """uint8 (height, width, channels), or, of a JPEG, both sides divided by `shrink` (2, 4, 8) and rounded
        up. To be called once: Pillow forgets the file."""
        with _one_reason(self._data):
            stored = self._by_simplejpeg(shrink) if self.can_shrink else None
            if stored is None:
                stored = self._by_pillow(shrink)
            if (turn := _UPRIGHT.get(self._tag)) is not None:
                flat = Image.fromarray(stored[:, :, 0] if self._channels == 1 else stored)
                stored = np.array(flat.transpose(turn))
        return stored.reshape(*stored.shape[:2], self._channels)

    def _by_simplejpeg(self, shrink: int) -> np.ndarray | None:
        """None for what it refuses, has a remark about or was never asked: that is for Pillow to judge."""
        if self._image.mode not in ("RGB", "L") or not _same_library():
            return None
        height, width = (-(-side // shrink) for side in self._stored)
        grey = self._channels == 1
        space = "GRAY" if grey and self._image.mode == "L" else "RGB" if grey else _MODES[self._channels]
        try:
            found = simplejpeg.decode_jpeg(
                self._data,
                space,
                fastdct=False,
                fastupsample=False,
                min_height=height,
                min_width=width,
                min_factor=shrink,
            )
        except Exception:
            return None
        if found.shape[:2] != (height, width):
            return None
        if grey and space == "RGB":  # by Pillow's formula, since the file's own luminance rounds differently
            return np.array(Image.fromarray(found).convert("L"))[:, :, None]
        return found

    def _by_pillow(self, shrink: int) -> np.ndarray:
        with self._image as image:
            if shrink > 1:
                image.draft(image.mode, (image.width // shrink, image.height // shrink))
            image.load()
            return np.array(_to_mode(image, _MODES[self._channels], self._background), dtype=np.uint8)


def _to_mode(image: Image.Image, mode: str, background: tuple[int, int, int]) -> Image.Image:
    """Any Pillow mode as 8-bit "RGBA", "RGB" or "L": nothing is clipped and, but in the first, nothing transparent."""
    if image.mode == "F" or image.mode == "I" or image.mode.startswith("I;"):
        image = _eight_bit(image)
    if image.mode == "La":  # Pillow knows no direct way from premultiplied grey
        image = image.convert("LA")
    if mode == "RGBA":
        straight = image.has_transparency_data or image.mode in ("RGB", "L", "1")
        return image.convert("RGBA") if straight else image.convert("RGB").convert("RGBA")
    if image.has_transparency_data:
        canvas = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(canvas, image.convert("RGBA")).convert("RGB")
    elif image.mode not in ("RGB", "L", "1"):
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def _eight_bit(image: Image.Image) -> Image.Image:
    """Grey of more than 8 bits; Pillow's own conversion would clip everything above 255 to white.

    Integers from 0 to 65,535 are 16-bit grey, whatever they are stored in; floats from 0 to 1 run from black to white,
    and from 0 to 255 they are levels. There is no agreed range for other values: they are stretched from the smallest
    (black) to the largest (white) of the picture.
    """
    wide, tags = np.asarray(image), getattr(image, "tag_v2", {})
    if image.mode == "F":
        finite = np.isfinite(wide)
        if not finite.any():
            raise BadImage("no pixel of it is a finite number")
        low, high = float(wide[finite].min()), float(wide[finite].max())
        with np.errstate(invalid="ignore"):  # some kinds of NaN are remarked upon
            wide = np.nan_to_num(wide.astype(np.float64), nan=low, posinf=high, neginf=low)
        full = 1 if high <= 1 else 255
    else:
        if image.mode == "I" and tags.get(_BITS_TAG) == (32,) and tags.get(_SAMPLES_TAG, (1,)) == (1,):
            wide = wide.view(np.uint32)  # Pillow has no such mode, and gives the upper half as negative numbers
        wide = wide.astype(np.int64)
        low, high, full = int(wide.min()), int(wide.max()), 4095 if tags.get(_BITS_TAG) == (12,) else 65535
    if low < 0 or high > full:
        levels = (wide - low) * 255 / ((high - low) or 1)
    else:
        levels = wide * (255 / full) if image.mode == "F" else (wide * 255 + full // 2) // full
    narrow = Image.fromarray(np.round(levels).astype(np.uint8))
    key = image.info.get("transparency")
    if isinstance(key, int):
        narrow.putalpha(Image.fromarray(np.where(wide == key, 0, 255).astype(np.uint8)))
    return narrow


def _is_raw(image: TiffImagePlugin.TiffImageFile) -> bool:
    """Whether a TIFF is camera RAW, of which Pillow would read the thumbnail."""
    tags = image.tag_v2
    return _DNG_TAG in tags or bool(tags.get(_SUBFILE_TAG, 0) & 1 and _SUB_IFDS_TAG in tags)


def pillow_formats(data: bytes) -> tuple[str, ...]:
    """The formats in which Pillow may open the file: those of the list, and HEIF where that may be one."""
    return (*FORMATS, "HEIF") if data[4:8] == b"ftyp" and _heif() else FORMATS


@functools.cache
def _heif() -> bool:
    """Whether HEIC can be read. Only a file that may be one has the library loaded."""
    if not CAN_READ_HEIF:
        return False
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.options.DECODE_THREADS = 1  # as for AVIF
    pillow_heif.register_heif_opener(thumbnails=False)
    return True


def exif_orientation(image: Image.Image) -> int:
    """The camera's orientation tag; unreadable metadata counts as upright, since the pixels are fine."""
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:
        return 1


@functools.cache
def _same_library() -> bool:
    """Whether simplejpeg is here and gives Pillow's pixels: one of them may be built on another JPEG library."""
    if simplejpeg is None:
        return False
    noise = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8).repeat(5, axis=0).repeat(4, axis=1)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=60, subsampling="4:2:0")
    with Image.open(file, formats=("JPEG",)) as image:
        expected = np.array(image)
    found = simplejpeg.decode_jpeg(file.getvalue(), "RGB", fastdct=False, fastupsample=False)
    return np.array_equal(found, expected)


@contextmanager
def _one_reason(data: bytes) -> Iterator[None]:
    try:
        yield
    except BadImage:
        raise
    except Exception as error:  # Pillow's readers raise nearly every kind on damaged bytes
        raise BadImage(_reason(error, data)) from None


def _strict_and_quiet(max_pixels: int) -> None:
    """Ask Pillow for whole pictures only, of as many pixels as are asked for, and keep its remarks about odd metadata
    off the screen.

    All are settings of the process, which another library may have changed, so they are looked at on every call. They
    are never set back: swapping them in and out is not safe under threads, and touching the filters every time would
    make Python forget which warnings it has already shown.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # images are decoded beside each other, one on each core
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels
    if not warnings.filters or warnings.filters[0] != _QUIET:
        warnings.filterwarnings("ignore", module=_QUIET_MODULE)


def _reason(error: Exception, data: bytes) -> str:
    if isinstance(error, UnidentifiedImageError):
        kind = detect_format(data[:HEAD_BYTES])
        if refused := unsupported_reason(kind):
            return refused
        if kind in EXTENSIONS:
            return f"damaged, or a {kind} of a rare layout: its header cannot be read"
        return f"not a readable image ({SUPPORTED_FORMATS})"
    if isinstance(error, Image.DecompressionBombError):
        return "the header claims more pixels than the limit allows"
    if isinstance(error, MemoryError):
        return "not enough memory to decode it"
    text = " ".join(str(error).split())
    if "truncated" in text.lower():
        return "the file is cut short"
    return f"damaged ({text[:120] or type(error).__name__})"
