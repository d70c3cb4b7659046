"""Decode image files to pixels. This is the only module that opens an image.

Pillow reads every header and decides whether a file is valid. JPEG pixels come from simplejpeg if it is installed: it
uses the same library (libjpeg-turbo), gives bit-identical pixels and takes 50 to 90 % of the time. HEIC pixels come
from pillow-heif, a Pillow plugin, if it is installed.
"""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import (  # only the plugins of the supported formats, so that Pillow does not load all others
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
    unsupported_format_reason,
)

try:
    import simplejpeg
except ImportError:  # optional: the pixels are the same without it
    simplejpeg = None

MAX_PIXELS = 100_000_000
JPEG_DOWNSCALES = (8, 4, 2)  # factors by which libjpeg can decode a smaller image

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_QUIET_MODULE = r"PIL\."
_QUIET = ("ignore", None, Warning, re.compile(_QUIET_MODULE), 0)
_ORIENTATION_TAG = 0x0112
_BITS_TAG, _SAMPLES_TAG = 0x0102, 0x0153  # TIFF: bits per sample, and unsigned, signed or float
_SUBFILE_TAG, _SUB_IFDS_TAG, _DNG_TAG = 0x00FE, 0x014A, 0xC612
_TRANSPOSE = {  # EXIF orientation -> operation that makes the image upright
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
    """The bytes cannot be decoded to an image. The message gives the reason in one short sentence."""


def decode(
    data: bytes,
    *,
    channels: int = 3,
    background: tuple[int, int, int] = (255, 255, 255),
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Decode an image file to upright uint8 pixels (height, width, channels).

    `channels` is 1 (luminance), 3 (RGB) or 4 (RGBA). With 1 and 3, transparent pixels get the colour `background`. An
    animation gives its first frame. Raises BadImage, and nothing else, for files that are damaged, truncated or have
    more than `max_pixels` pixels. The limit is checked on the header, before any pixel is decoded.
    """
    return open_image(data, channels=channels, background=background, max_pixels=max_pixels).pixels()


def open_image(
    data: bytes,
    *,
    channels: int = 3,
    background: tuple[int, int, int] = (255, 255, 255),
    max_pixels: int = MAX_PIXELS,
) -> OpenedImage:
    """Like decode, but reads only the header. Call `pixels` of the result to decode, optionally at a smaller size."""
    if channels not in _MODES:
        raise ValueError(f"channels must be 1, 3 or 4, not {channels}")
    if not data:
        raise BadImage("the file is empty")
    _configure_pillow(max_pixels)
    with _as_bad_image(data):
        image = Image.open(io.BytesIO(data), formats=pillow_formats(data))
        width, height = image.size
        if width * height > max_pixels:
            raise BadImage(f"{width}x{height} pixels is more than the limit of {max_pixels:,}")
        if isinstance(image, TiffImagePlugin.TiffImageFile) and _is_raw(image):
            raise BadImage(unsupported_format_reason(RAW))
        return OpenedImage(image, data, channels, background)


class OpenedImage:
    """An image whose header has been read."""

    def __init__(
        self, image: ImageFile.ImageFile, data: bytes, channels: int, background: tuple[int, int, int]
    ) -> None:
        self._image, self._data, self._channels, self._background = image, data, channels, background
        self.can_downscale = isinstance(image, JpegImagePlugin.JpegImageFile)
        if not self.can_downscale:
            image.load()  # some formats store the orientation after the pixels
        # Parsing metadata takes as long as opening the file, so skip it if there is none.
        self._tag = 1 if self.can_downscale and not {"exif", "xmp"} & image.info.keys() else exif_orientation(image)
        self._stored = image.height, image.width  # not upright yet; Pillow changes image.size when it decodes smaller

    @property
    def size(self) -> tuple[int, int]:
        """(height, width), upright."""
        return self._stored[::-1] if self._tag in _SIDEWAYS else self._stored

    def pixels(self, downscale: int = 1) -> np.ndarray:
        """Decode to uint8 (height, width, channels). Call it once: Pillow closes the file.

        For a JPEG, both sides are divided by `downscale` (2, 4 or 8) and rounded up.
        """
        with _as_bad_image(self._data):
            stored = self._by_simplejpeg(downscale) if self.can_downscale else None
            if stored is None:
                stored = self._by_pillow(downscale)
            if (turn := _TRANSPOSE.get(self._tag)) is not None:
                flat = Image.fromarray(stored[:, :, 0] if self._channels == 1 else stored)
                stored = np.array(flat.transpose(turn))
        return stored.reshape(*stored.shape[:2], self._channels)

    def _by_simplejpeg(self, downscale: int) -> np.ndarray | None:
        """None if simplejpeg cannot be used or fails; then Pillow decodes the file or gives the reason."""
        if self._image.mode not in ("RGB", "L") or not _same_library():
            return None
        height, width = (-(-side // downscale) for side in self._stored)
        grey = self._channels == 1
        space = "GRAY" if grey and self._image.mode == "L" else "RGB" if grey else _MODES[self._channels]
        try:
            pixels = simplejpeg.decode_jpeg(
                self._data,
                space,
                fastdct=False,
                fastupsample=False,
                min_height=height,
                min_width=width,
                min_factor=downscale,
            )
        except Exception:
            return None
        if pixels.shape[:2] != (height, width):
            return None
        if grey and space == "RGB":  # Pillow's luminance formula: the JPEG's own luminance rounds differently
            return np.array(Image.fromarray(pixels).convert("L"))[:, :, None]
        return pixels

    def _by_pillow(self, downscale: int) -> np.ndarray:
        with self._image as image:
            if downscale > 1:
                image.draft(image.mode, (image.width // downscale, image.height // downscale))
            image.load()
            return np.array(_to_mode(image, _MODES[self._channels], self._background), dtype=np.uint8)


def _to_mode(image: Image.Image, mode: str, background: tuple[int, int, int]) -> Image.Image:
    """Convert any Pillow mode to 8-bit "RGBA", "RGB" or "L" without clipping. RGB and L are composited."""
    if image.mode == "F" or image.mode == "I" or image.mode.startswith("I;"):
        image = _eight_bit(image)
    if image.mode == "La":  # Pillow cannot convert premultiplied grey directly
        image = image.convert("LA")
    if mode == "RGBA":
        direct = image.has_transparency_data or image.mode in ("RGB", "L", "1")
        return image.convert("RGBA") if direct else image.convert("RGB").convert("RGBA")
    if image.has_transparency_data:
        canvas = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(canvas, image.convert("RGBA")).convert("RGB")
    elif image.mode not in ("RGB", "L", "1"):
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def _eight_bit(image: Image.Image) -> Image.Image:
    """Scale grey of more than 8 bits to 8 bits (Pillow's own conversion clips everything above 255).

    Integers from 0 to 65,535 are 16-bit grey, whatever their type. Floats from 0 to 1 are black to white; floats from 0
    to 255 are 8-bit levels. Other ranges are rescaled to the minimum and maximum of the image.
    """
    wide, tags = np.asarray(image), getattr(image, "tag_v2", {})
    if image.mode == "F":
        finite = np.isfinite(wide)
        if not finite.any():
            raise BadImage("all pixels are NaN or infinite")
        low, high = float(wide[finite].min()), float(wide[finite].max())
        with np.errstate(invalid="ignore"):  # signalling NaNs warn
            wide = np.nan_to_num(wide.astype(np.float64), nan=low, posinf=high, neginf=low)
        full = 1 if high <= 1 else 255
    else:
        if image.mode == "I" and tags.get(_BITS_TAG) == (32,) and tags.get(_SAMPLES_TAG, (1,)) == (1,):
            wide = wide.view(np.uint32)  # Pillow reads uint32 as int32
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
    """Whether a TIFF is camera RAW, for which Pillow would read only the thumbnail."""
    tags = image.tag_v2
    return _DNG_TAG in tags or bool(tags.get(_SUBFILE_TAG, 0) & 1 and _SUB_IFDS_TAG in tags)


def pillow_formats(data: bytes) -> tuple[str, ...]:
    """The formats that Pillow may try: the supported ones, and HEIF if the file looks like it."""
    return (*FORMATS, "HEIF") if data[4:8] == b"ftyp" and _heif() else FORMATS


@functools.cache
def _heif() -> bool:
    """Whether HEIC can be read. Imported only when a file may be HEIC."""
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
    """The EXIF orientation tag; 1 (upright) if the metadata cannot be read."""
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:
        return 1


@functools.cache
def _same_library() -> bool:
    """Whether simplejpeg is installed and gives the same pixels as Pillow (it may use another JPEG library)."""
    if simplejpeg is None:
        return False
    noise = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8).repeat(5, axis=0).repeat(4, axis=1)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=60, subsampling="4:2:0")
    with Image.open(file, formats=("JPEG",)) as image:
        expected = np.array(image)
    pixels = simplejpeg.decode_jpeg(file.getvalue(), "RGB", fastdct=False, fastupsample=False)
    return np.array_equal(pixels, expected)


@contextmanager
def _as_bad_image(data: bytes) -> Iterator[None]:
    """Turn every exception into BadImage."""
    try:
        yield
    except BadImage:
        raise
    except Exception as error:  # Pillow raises nearly any exception on damaged bytes
        raise BadImage(_reason(error, data)) from None


def _configure_pillow(max_pixels: int) -> None:
    """Make Pillow reject truncated files, allow `max_pixels`, and not warn about odd metadata.

    These settings are global and another library may have changed them, so they are checked on every call. They are
    not restored afterwards: that is not thread-safe, and changing the warning filters makes Python repeat warnings.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # images are already decoded in parallel, one per core
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels
    if not warnings.filters or warnings.filters[0] != _QUIET:
        warnings.filterwarnings("ignore", module=_QUIET_MODULE)


def _reason(error: Exception, data: bytes) -> str:
    if isinstance(error, UnidentifiedImageError):
        kind = detect_format(data[:HEAD_BYTES])
        if unsupported := unsupported_format_reason(kind):
            return unsupported
        if kind in EXTENSIONS:
            return f"damaged or unusual {kind}: its header cannot be read"
        return f"not a readable image; supported: {SUPPORTED_FORMATS}"
    if isinstance(error, Image.DecompressionBombError):
        return "the header states more pixels than the limit allows"
    if isinstance(error, MemoryError):
        return "not enough memory to decode it"
    text = " ".join(str(error).split())
    if "truncated" in text.lower():
        return "the file is truncated"
    return f"damaged ({text[:120] or type(error).__name__})"
