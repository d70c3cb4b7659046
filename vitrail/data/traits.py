"""Traits of an image file from its header, such as alpha or 16 bits. No pixels are decoded here."""

from __future__ import annotations

import io
from enum import IntFlag

from PIL import Image, ImageFile

from vitrail.data.decode import exif_orientation, pillow_formats
from vitrail.data.formats import FORMAT_OF, extension_of


class Trait(IntFlag):
    """Notable properties of a readable image. The numbers are stored in files: do not change them."""

    ROTATED = 1  # has an EXIF orientation other than upright
    GREY = 2
    CMYK = 4
    PALETTE = 8
    ALPHA = 16
    SIXTEEN_BIT = 32
    ANIMATED = 64  # several frames or pages; only the first is used
    MISNAMED = 128  # has the file extension of another format
    WIDE = 256  # 32-bit integers or floats, which have no standard range


_APP1, _FRAMES = 0xE1, (0xC0, 0xC1, 0xC2)  # markers of a JPEG
# A PNG without these bytes has no orientation; Pillow would decode the whole file to find that out.
_ORIENTATION_MARKS = (b"eXIf", b"profile type", b"rientation")


def read_traits(data: bytes, name: str) -> Trait:
    """Return the traits of an image that `decode` can read. Never fails; unknown traits are missing."""
    if (plain := _plain_jpeg(data)) is not None:
        return plain | Trait.MISNAMED if _named_format(name) not in ("JPEG", None) else plain
    traits = Trait(0)
    try:
        with Image.open(io.BytesIO(data), formats=pillow_formats(data)) as image:
            kind = "JPEG" if image.format == "MPO" else image.format  # MPO: a JPEG followed by previews
            if _named_format(name) not in (kind, None):
                traits |= Trait.MISNAMED
            if image.mode in ("1", "L", "LA", "La", "F") or image.mode.startswith("I"):
                traits |= Trait.GREY
            if image.mode == "CMYK":
                traits |= Trait.CMYK
            if image.mode in ("P", "PA"):
                traits |= Trait.PALETTE
            if image.has_transparency_data:
                traits |= Trait.ALPHA
            if image.mode == "F" or (image.mode == "I" and kind == "TIFF"):
                traits |= Trait.WIDE
            elif image.mode.startswith("I") or (kind in ("PNG", "TIFF") and ";16" in _raw_mode(image)):
                traits |= Trait.SIXTEEN_BIT
            if kind != "JPEG" and getattr(image, "is_animated", False):
                traits |= Trait.ANIMATED
            if _is_rotated(image, data):
                traits |= Trait.ROTATED
    except Exception:  # Pillow raises nearly every kind of error on unusual metadata, while the pixels are fine
        pass
    return traits


def _named_format(name: str) -> str | None:
    """Return the format of a file extension, or None. Names in shards do not count: they are from before packing."""
    if ".parquet#" in name:
        return None
    return FORMAT_OF.get(extension_of(name))


def _plain_jpeg(data: bytes) -> Trait | None:
    """Return the traits of a JPEG without metadata, in a tenth of the time that Pillow takes; None for other files."""
    if data[:2] != b"\xff\xd8":
        return None
    position = 2
    while position + 9 < len(data) and data[position] == 0xFF:
        mark, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4], "big")
        if mark == _APP1:  # EXIF or XMP
            return None
        if mark in _FRAMES:
            return {1: Trait.GREY, 3: Trait(0), 4: Trait.CMYK}.get(data[position + 9])
        position += 2 + length
    return None


def _raw_mode(image: ImageFile.ImageFile) -> str:
    """Return how the file stores pixels. Pillow opens 16-bit colour as 8-bit."""
    return " ".join(str(tile.args) for tile in image.tile)


def _is_rotated(image: Image.Image, data: bytes) -> bool:
    if image.format in ("GIF", "BMP"):
        return False
    if image.format == "PNG" and not any(mark in data for mark in _ORIENTATION_MARKS):
        return False
    return 2 <= exif_orientation(image) <= 8
