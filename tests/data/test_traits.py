"""Traits from headers, for files that Pillow writes."""

from __future__ import annotations

import pytest
from PIL import Image

from tests.data.zoo import FILES, encode, photo, turned
from vitrail.data.formats import describe_non_image
from vitrail.data.traits import Trait, read_traits

NONE = Trait(0)


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("print.jpg", Trait.CMYK),
        ("palette.png", Trait.PALETTE | Trait.ALPHA),
        ("alpha.png", Trait.ALPHA),
        ("alpha.webp", Trait.ALPHA),
        ("grey.jpg", Trait.GREY),
        ("grey16.png", Trait.GREY | Trait.SIXTEEN_BIT),
        ("grey16.tif", Trait.GREY | Trait.SIXTEEN_BIT),
        ("wide.png", Trait.SIXTEEN_BIT),
        ("moving.gif", Trait.ANIMATED | Trait.PALETTE),
        ("moving.webp", Trait.ANIMATED),
        ("pages.tiff", Trait.ANIMATED),
        ("really png.jpg", Trait.MISNAMED),
        ("UPPER.JPG", NONE),
        ("turned 1.jpg", NONE),
        ("turned 6.jpg", Trait.ROTATED),
    ],
)
def test_traits_of_the_zoo(name: str, traits: Trait) -> None:
    assert read_traits(FILES[name][0], name) == traits


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("tag", range(10))
def test_orientation_tags(kind: str, tag: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = tag
    expected = Trait.ROTATED if 2 <= tag <= 8 else NONE
    assert read_traits(encode(photo(), kind, exif=exif), "row#7") == expected


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP"])
def test_the_extension_is_compared_with_the_format(kind: str) -> None:
    data = encode(photo(), kind)
    for extension in ("jpg", "JPEG", "jfif", "png", "webp", "tif", "tiff", "gif", "bmp"):
        correct = extension.lower().startswith(kind.lower()[:2]) or (kind == "JPEG" and extension == "jfif")
        assert (Trait.MISNAMED in read_traits(data, f"a/b.{extension}")) != correct
    for name in ("train.parquet#3", "train.parquet#3 a.jpg", "train.parquet#3 a.png", "no extension", "photo.jpg.orig"):
        assert Trait.MISNAMED not in read_traits(data, name)


def test_sixteen_bits_per_pixel_are_not_sixteen_per_channel() -> None:
    assert read_traits(encode(photo().convert("RGB"), "BMP"), "a.bmp") == NONE


def test_a_jpeg_with_previews_is_not_animated() -> None:
    data = encode(photo(), "MPO", save_all=True, append_images=[photo(seed=2)])
    assert read_traits(data, "phone.jpg") == NONE


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"\xff\xd8\xff\xc0", b"\xff\xd8\xff\xe1\0", turned(6)[:40], b"BM"])
def test_reading_traits_never_fails(data: bytes) -> None:
    assert read_traits(data, "a.jpg") in (NONE, Trait.MISNAMED)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\xef\xbb\xbf <!DOCTYPE HTML><p>", "an HTML page"),
        (b"%PDF-1.4", "a PDF file"),
        (b"\0\0\0\x18ftypheic", "a HEIC, AVIF or video file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer, not the file itself"),
        (b"just words", "text"),
        (b"", ""),
        (b"\x89PNG\r\n", ""),
    ],
)
def test_other_files_are_described(data: bytes, kind: str) -> None:
    assert describe_non_image(data) == kind
