"""simplejpeg gives bit-identical pixels to Pillow, and the same errors."""

from __future__ import annotations

import io
import itertools
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.data.images import encode, photo
from vitrail.data import decode as decode_module
from vitrail.data.decode import BadImage, decode, open_image

SIZES = [(1, 1), (1, 17), (23, 1), (8, 8), (7, 9), (16, 33), (31, 64), (100, 133)]


@pytest.fixture
def pillow_only(monkeypatch):
    """decode() without simplejpeg."""

    def decoded(data, **options):
        with monkeypatch.context() as patch:
            patch.setattr(decode_module, "_same_library", lambda: False)
            return decode(data, **options)

    return decoded


def by_pillow(data: bytes, mode: str = "RGB") -> np.ndarray:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert(mode))


def exif(tag: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = tag
    return tags


def marker(data: bytes, code: int, body: bytes) -> bytes:
    """The file with an added segment after its start."""
    return data[:2] + struct.pack(">BBH", 0xFF, code, len(body) + 2) + body + data[2:]


def adobe(data: bytes, transform: int) -> bytes:
    """Replace the JFIF marker by an Adobe one, which states the colour space."""
    assert data[2:4] == b"\xff\xe0"
    rest = data[:2] + data[4 + struct.unpack(">H", data[4:6])[0] :]
    return marker(rest, 0xEE, b"Adobe" + struct.pack(">HHHB", 100, 0, 0, transform))


def test_simplejpeg_is_in_use() -> None:
    assert decode_module._same_library()


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_bit_identical_to_pillow(size, pillow_only) -> None:  # type: ignore[no-untyped-def]
    image = Image.fromarray(photo(*size, seed=sum(size)))
    for subsampling, quality, progressive, rows in itertools.product((0, 1, 2), (5, 60, 90, 100), (0, 1), (0, 1)):
        options = {"subsampling": subsampling, "quality": quality, "progressive": bool(progressive)}
        if rows:
            options["restart_marker_rows"] = rows
        data = encode(image, "JPEG", **options)
        np.testing.assert_array_equal(decode(data), by_pillow(data))
        np.testing.assert_array_equal(decode(data, channels=1)[:, :, 0], by_pillow(data, "L"))
        np.testing.assert_array_equal(decode(data, channels=4), by_pillow(data, "RGBA"))
        np.testing.assert_array_equal(decode(data), pillow_only(data))
    grey = encode(image.convert("L"), "JPEG", quality=80)
    np.testing.assert_array_equal(decode(grey), by_pillow(grey))
    np.testing.assert_array_equal(decode(grey, channels=1)[:, :, 0], by_pillow(grey, "L"))
    np.testing.assert_array_equal(decode(grey, channels=4), by_pillow(grey, "RGBA"))


@pytest.mark.parametrize("tag", range(1, 9))
def test_orientation_colour_spaces_and_markers(tag: int) -> None:
    image = Image.fromarray(photo(45, 70, seed=tag))
    files = [
        encode(image, "JPEG", exif=exif(tag), quality=85),
        encode(image, "JPEG", exif=exif(tag), quality=85, progressive=True, subsampling=0),
        encode(image.convert("L"), "JPEG", exif=exif(tag)),
        encode(image.convert("CMYK"), "JPEG", exif=exif(tag)),
        encode(image, "JPEG", keep_rgb=True, exif=exif(tag)),
        adobe(encode(image, "JPEG"), 0),
        adobe(encode(image, "JPEG"), 1),
        marker(encode(image, "JPEG", exif=exif(tag)), 0xFE, b"a comment"),
        marker(encode(image, "JPEG"), 0xE2, b"ICC_PROFILE\0\1\1" + bytes(300)),
        encode(image, "JPEG", exif=exif(tag)) + b"trailing bytes of some cameras",
        encode(image, "MPO", save_all=True, append_images=[image.rotate(90)], exif=exif(tag)),
    ]
    for data in files:
        np.testing.assert_array_equal(decode(data), by_pillow(data))


@pytest.mark.parametrize("downscale", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [(17, 40), (64, 64), (75, 131)])
def test_downscaled_pixels_equal_pillow_draft(size, downscale, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    for tag, options in itertools.product((1, 6), ({}, {"progressive": True}, {"subsampling": 0})):
        data = encode(Image.fromarray(photo(*size)), "JPEG", quality=90, exif=exif(tag), **options)
        opened = open_image(data)
        assert opened.size == (size if tag == 1 else size[::-1])
        found = opened.pixels(downscale)
        assert found.shape[:2] == tuple(-(-side // downscale) for side in opened.size)
        draft = Image.open(io.BytesIO(data))
        draft.draft("RGB", (size[1] // downscale, size[0] // downscale))
        np.testing.assert_array_equal(found, np.asarray(ImageOps.exif_transpose(draft)))
        with monkeypatch.context() as patch:
            patch.setattr(decode_module, "_same_library", lambda: False)
            np.testing.assert_array_equal(found, open_image(data).pixels(downscale))


def test_a_downscaled_cmyk_image() -> None:
    data = encode(Image.fromarray(photo(40, 64)).convert("CMYK"), "JPEG")
    small, whole = open_image(data).pixels(4), decode(data)
    assert small.shape == (10, 16, 3)
    assert np.abs(small - whole.reshape(10, 4, 16, 4, 3).mean((1, 3))).mean() < 12


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_truncated_files_give_the_same_error(options, pillow_only) -> None:  # type: ignore[no-untyped-def]
    data = encode(Image.fromarray(photo(60, 90)), "JPEG", **options)
    for fraction in (0.4, 0.7, 0.95, 0.99, 1):
        short = data[: int(fraction * len(data)) - (2 if fraction == 1 else 0)]  # the last: without the end marker
        with pytest.raises(BadImage, match="truncated"):
            decode(short)
        with pytest.raises(BadImage, match="truncated"):
            pillow_only(short)


FILES = [
    encode(Image.fromarray(photo(24, 40)), "JPEG", quality=80),
    encode(Image.fromarray(photo(24, 40)), "JPEG", quality=80, progressive=True),
    encode(Image.fromarray(photo(24, 40)), "JPEG", quality=80, restart_marker_rows=1, subsampling=0),
    encode(Image.fromarray(photo(24, 40)).convert("L"), "JPEG"),
    encode(Image.fromarray(photo(24, 40)), "JPEG", exif=exif(5)),
]


def outcome(data: bytes) -> tuple[str, bytes]:
    try:
        pixels = decode(data, max_pixels=1_000_000)
        return str(pixels.shape), pixels.tobytes()
    except BadImage as error:
        return str(error), b""


@settings(max_examples=300, deadline=None)
@given(
    which=st.integers(0, len(FILES) - 1),
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=3),
    hole=st.tuples(st.floats(0, 1), st.integers(0, 40)),
    keep=st.sampled_from([1.0, 1.0, 0.99, 0.8, 0.5]),
)
def test_damaged_files_give_the_same_result_with_and_without_simplejpeg(which, edits, hole, keep) -> None:  # type: ignore[no-untyped-def]
    data = bytearray(FILES[which])
    for place, value in edits:
        data[int(place * (len(data) - 1))] = value
    start = int(hole[0] * len(data))
    del data[start : start + hole[1]]
    damaged = bytes(data[: int(len(data) * keep)])
    fast = outcome(damaged)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_module, "_same_library", lambda: False)
        assert outcome(damaged) == fast


def test_decoding_works_without_simplejpeg(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    expected = [decode(data) for data in FILES]
    monkeypatch.setattr(decode_module, "simplejpeg", None)
    decode_module._same_library.cache_clear()
    try:
        assert not decode_module._same_library()
        for data, pixels in zip(FILES, expected, strict=True):
            np.testing.assert_array_equal(decode(data), pixels)
    finally:
        decode_module._same_library.cache_clear()


def test_simplejpeg_with_other_pixels_is_not_used(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    class Other:
        @staticmethod
        def decode_jpeg(data, *_, **__):  # type: ignore[no-untyped-def]
            return np.asarray(Image.open(io.BytesIO(data))) ^ 1

    monkeypatch.setattr(decode_module, "simplejpeg", Other)
    decode_module._same_library.cache_clear()
    try:
        assert not decode_module._same_library()
        np.testing.assert_array_equal(decode(FILES[0]), by_pillow(FILES[0]))
    finally:
        decode_module._same_library.cache_clear()
