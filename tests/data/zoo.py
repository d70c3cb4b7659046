"""Unusual files in folders of images, each with its expected outcome."""

from __future__ import annotations

import io
import os
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

USED, IGNORED = "used", "ignored"
PLAIN = 6  # ordinary images of each class beside the odd ones


def photo(height: int = 60, width: int = 80, seed: int = 0) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, rows: bytes) -> bytes:
    """A colour PNG with this size in its header and any pixel data."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")


def turned(tag: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = tag
    return encode(photo(seed=20 + tag), "JPEG", exif=exif)


def wide_png() -> bytes:
    """Colour with 16 bits a channel, which Pillow does not write."""
    pixels = np.random.default_rng(5).integers(0, 65536, (40, 3 * 40)).astype(">u2")
    return png(40, 40, 16, b"".join(b"\0" + row.tobytes() for row in pixels))


def frames(count: int, seed: int) -> dict[str, object]:
    return {"save_all": True, "append_images": [photo(seed=seed + i) for i in range(1, count)], "duration": 80}


def _grey16() -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 65536, (40, 50)).astype(np.uint16))


def _see_through() -> Image.Image:
    image = photo(seed=3)
    image.putalpha(Image.fromarray(np.linspace(0, 255, 60 * 80).reshape(60, 80).astype(np.uint8)))
    return image


_TRUNCATED = "truncated"
_NO_IMAGE = "not a readable image"
# Name -> (bytes, outcome). An outcome other than used and ignored is part of the reason why the file is excluded.
FILES: dict[str, tuple[bytes, str]] = {
    "truncated.jpg": (encode(photo(200, 300, 1), "JPEG")[:-2000], _TRUNCATED),
    "truncated.png": (encode(photo(200, 300, 1), "PNG")[:-2000], _TRUNCATED),
    "empty.jpg": (b"", "the file is empty"),
    "one pixel.png": (encode(Image.new("RGB", (1, 1), "red"), "PNG"), USED),
    "line.png": (encode(Image.new("RGB", (30_000, 2), "blue"), "PNG"), USED),
    "bomb.png": (png(50_000, 50_000, 8, b""), "more pixels than"),
    "over the limit.png": (png(10_001, 10_000, 8, b""), "10001x10000 pixels is more than the limit of 100,000,000"),
    "print.jpg": (encode(photo(seed=2).convert("CMYK"), "JPEG"), USED),
    "palette.png": (encode(photo(seed=4).quantize(16), "PNG", transparency=bytes(range(0, 256, 16))), USED),
    "alpha.png": (encode(_see_through(), "PNG"), USED),
    "alpha.webp": (encode(_see_through(), "WEBP"), USED),
    "grey.jpg": (encode(photo(seed=6).convert("L"), "JPEG"), USED),
    "grey16.png": (encode(_grey16(), "PNG"), USED),
    "grey16.tif": (encode(_grey16(), "TIFF"), USED),
    "wide.png": (wide_png(), USED),
    "floating.tif": (encode(Image.fromarray(np.ones((20, 20), np.float32)), "TIFF"), USED),
    "sign.ppm": (encode(photo(seed=50), "PPM"), USED),
    "phone.avif": (encode(photo(seed=51), "AVIF"), USED),
    "scan.jp2": (encode(photo(seed=52), "JPEG2000"), USED),
    "no ending": (encode(photo(seed=53), "JPEG"), USED),
    "cache.dat": (encode(photo(seed=54), "PNG"), USED),
    "drawing.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG drawing"),
    "raw.nef": (encode(photo(seed=55), "TIFF"), "camera RAW"),
    "moving.gif": (encode(photo(seed=7), "GIF", **frames(3, 7)), USED),
    "moving.webp": (encode(photo(seed=11), "WEBP", **frames(3, 11)), USED),
    "pages.tiff": (encode(photo(seed=15), "TIFF", **frames(2, 15)), USED),
    **{f"turned {tag}.jpg": (turned(tag), USED) for tag in range(1, 9)},
    "really png.jpg": (encode(photo(seed=30), "PNG"), USED),
    "text.jpg": (b"This is not a picture at all.", _NO_IMAGE),
    "error page.jpg": (b"<!DOCTYPE html><html><title>404</title></html>", _NO_IMAGE),
    "日本 ñ 🌸.png": (encode(photo(seed=31), "PNG"), USED),
    "n" * 246 + ".png": (encode(photo(seed=32), "PNG"), USED),
    "new\nline.png": (encode(photo(seed=33), "PNG"), USED),
    os.fsdecode(b"latin-\xff.png"): (encode(photo(seed=34), "PNG"), USED),
    "[bold]<b>&'\".png": (encode(photo(seed=35), "PNG"), USED),
    "-rf.png": (encode(photo(seed=36), "PNG"), USED),
    "UPPER.JPG": (encode(photo(seed=37), "JPEG"), USED),
    "folder.jpg/inner.png": (encode(photo(seed=38), "PNG"), USED),
    ".hidden.jpg": (encode(photo(seed=39), "JPEG"), IGNORED),
    "Thumbs.db": (b"\xd0\xcf\x11\xe0", IGNORED),
    "notes.txt": (b"hello", IGNORED),
}


def _socket(path: Path) -> None:
    """Bind a socket by a short relative name, because socket paths are limited to 108 bytes."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(path.name)
    finally:
        os.chdir(before)


# Other than regular files: name -> (how to make it, outcome).
THINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    **({"fifo.jpg": (os.mkfifo, IGNORED), "socket.jpg": (_socket, IGNORED)} if hasattr(os, "mkfifo") else {}),
    "empty folder.jpg": (os.mkdir, IGNORED),
    "loop": (lambda path: path.symlink_to(path.parent), IGNORED),
    "dangling.jpg": (lambda path: path.symlink_to("nowhere"), "the file cannot be found"),
    "itself.jpg": (lambda path: path.symlink_to(path.name), "the file cannot be found"),
}


def make_zoo(root: Path) -> dict[str, str]:
    """Write two classes, `odd` with all of these files and `plain`; return the outcome of every name under `root`."""
    outcomes = {}
    for name, (data, outcome) in FILES.items():
        path = root / "odd" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        outcomes[f"odd/{name}"] = outcome
    for name, (make, outcome) in THINGS.items():
        make(root / "odd" / name)
        outcomes[f"odd/{name}"] = outcome
    if os.geteuid():  # nothing is unreadable for root
        (root / "odd" / "locked.jpg").write_bytes(encode(photo(), "JPEG"))
        (root / "odd" / "locked.jpg").chmod(0)
        outcomes["odd/locked.jpg"] = "cannot be read: Permission denied"
    for index in range(PLAIN):
        for folder, seed in (("plain", 100), ("odd", 200)):
            path = root / folder / f"{index}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(encode(photo(seed=seed + index), "JPEG"))
            outcomes[f"{folder}/{index}.jpg"] = USED
    return outcomes
