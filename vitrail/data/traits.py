"""What an image file is, seen from its header alone: no pixel is decoded here."""

from __future__ import annotations

import io
from enum import IntFlag

from PIL import Image, ImageFile

from vitrail.data.decode import exif_orientation, pillow_formats
from vitrail.data.formats import FORMAT_OF, extension_of


class Trait(IntFlag):
    """Things worth knowing about a file that decodes well. The numbers are stored: never change one."""

    ROTATED = 1  # its metadata says how to turn it upright
    GREY = 2
    CMYK = 4
    PALETTE = 8
    ALPHA = 16
    SIXTEEN_BIT = 32
    ANIMATED = 64  # several frames or pages, of which the first is used
    MISNAMED = 128  # the name ends in that of another format
    WIDE = 256  # 32 bits a pixel: integers or floats, which have no agreed range


_APP1, _FRAMES = 0xE1, (0xC0, 0xC1, 0xC2)  # markers of a JPEG
_MAY_TURN = (b"eXIf", b"profile type", b"rientation")  # of a PNG: without these Pillow would decode it to find nothing


def read_traits(data: bytes, name: str) -> Trait:
    """Of bytes that `decode` takes. What the header does not tell is left out: it never fails."""
    if (plain := _plain_jpeg(data)) is not None:
        return plain | Trait.MISNAMED if _named_format(name) not in ("JPEG", None) else plain
    found = Trait(0)
    try:
        with Image.open(io.BytesIO(data), formats=pillow_formats(data)) as image:
            kind = "JPEG" if image.format == "MPO" else image.format  # a JPEG with previews behind it
            if _named_format(name) not in (kind, None):
                found |= Trait.MISNAMED
            if image.mode in ("1", "L", "LA", "La", "F") or image.mode.startswith("I"):
                found |= Trait.GREY
            if image.mode == "CMYK":
                found |= Trait.CMYK
            if image.mode in ("P", "PA"):
                found |= Trait.PALETTE
            if image.has_transparency_data:
                found |= Trait.ALPHA
            if image.mode == "F" or (image.mode == "I" and kind == "TIFF"):
                found |= Trait.WIDE
            elif image.mode.startswith("I") or (kind in ("PNG", "TIFF") and ";16" in _raw_mode(image)):
                found |= Trait.SIXTEEN_BIT
            if kind != "JPEG" and getattr(image, "is_animated", False):
                found |= Trait.ANIMATED
            if _is_turned(image, data):
                found |= Trait.ROTATED
    except Exception:  # Pillow raises nearly every kind on odd metadata, and the pixels are fine
        pass
    return found


def _named_format(name: str) -> str | None:
    """The format that a file name promises. In a shard a name is where the image came from, and promises nothing."""
    if ".parquet#" in name:
        return None
    return FORMAT_OF.get(extension_of(name))


def _plain_jpeg(data: bytes) -> Trait | None:
    """Of a JPEG without metadata, as most are, its traits in a tenth of the time that Pillow takes to open it again."""
    if data[:2] != b"\xff\xd8":
        return None
    place = 2
    while place + 9 < len(data) and data[place] == 0xFF:
        mark, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if mark == _APP1:  # EXIF or XMP
            return None
        if mark in _FRAMES:
            return {1: Trait.GREY, 3: Trait(0), 4: Trait.CMYK}.get(data[place + 9])
        place += 2 + length
    return None


def _raw_mode(image: ImageFile.ImageFile) -> str:
    """How the file stores pixels: Pillow opens 16-bit colour as 8-bit."""
    return " ".join(str(tile.args) for tile in image.tile)


def _is_turned(image: Image.Image, data: bytes) -> bool:
    if image.format in ("GIF", "BMP"):
        return False
    if image.format == "PNG" and not any(mark in data for mark in _MAY_TURN):
        return False
    return 2 <= exif_orientation(image) <= 8
