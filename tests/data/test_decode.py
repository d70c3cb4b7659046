"""Image files of every kind, intact and damaged: the correct pixels, or BadImage with a reason, and nothing else."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from vitrail.data.decode import BadImage, decode
from vitrail.data.formats import CAN_READ_HEIF

if CAN_READ_HEIF:
    import pillow_heif

    pillow_heif.register_heif_opener()


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(height: int = 40, width: int = 60) -> np.ndarray:
    """Smooth, coloured and different in all four corners."""
    y, x = np.mgrid[0:height, 0:width]
    red, green = 255 * x / max(1, width - 1), 255 * y / max(1, height - 1)
    return np.stack([red, green, (red + green) / 2], -1).astype(np.uint8)


PICTURE = picture()
IMAGE = Image.fromarray(PICTURE)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(header: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    every = [(b"IHDR", header), *chunks, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, body) for kind, body in every)


# whole files


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("PPM", {}),
        ("QOI", {}),
        ("JPEG2000", {}),
    ],
)
def test_lossless_formats_are_bit_identical(kind: str, options: dict[str, object]) -> None:
    pixels = decode(encode(IMAGE, kind, **options))
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    np.testing.assert_array_equal(pixels, PICTURE)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0, "quality": 95}])
def test_jpeg_equals_pillow(options: dict[str, object]) -> None:
    data = encode(IMAGE, "JPEG", **options)
    np.testing.assert_array_equal(decode(data), np.array(Image.open(io.BytesIO(data))))


def test_grey_becomes_three_equal_channels() -> None:
    pixels = decode(encode(IMAGE.convert("L"), "PNG"))
    for channel in range(3):
        np.testing.assert_array_equal(pixels[:, :, channel], np.array(IMAGE.convert("L")))


def test_one_channel_is_luminance() -> None:
    for data in (encode(IMAGE, "PNG"), encode(IMAGE.convert("L"), "PNG")):
        np.testing.assert_array_equal(decode(data, channels=1)[:, :, 0], np.array(IMAGE.convert("L")))


def test_one_bit() -> None:
    bits = IMAGE.convert("1")
    for channels in (1, 3):
        np.testing.assert_array_equal(decode(encode(bits, "PNG"), channels=channels)[:, :, 0], np.array(bits) * 255)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_grey_is_scaled_not_clipped(kind: str) -> None:
    wide = np.linspace(0, 65535, 40 * 60).reshape(40, 60).astype(np.uint16)
    pixels = decode(encode(Image.fromarray(wide), kind))
    np.testing.assert_array_equal(pixels[:, :, 0], np.round(wide / 257).astype(np.uint8))


def test_thirty_two_bit_grey_within_sixteen_bits_is_scaled() -> None:
    wide = np.linspace(0, 65535, 40 * 60).reshape(40, 60).astype(np.int32)
    data = encode(Image.fromarray(wide), "TIFF")
    np.testing.assert_array_equal(decode(data)[:, :, 0], np.round(wide / 257).astype(np.uint8))


@pytest.mark.parametrize(
    ("values", "levels"),
    [
        (np.array([[-100, 0, 100]], np.int32), [0, 128, 255]),  # rescaled to its range
        (np.array([[0, 35_000, 70_000]], np.int32), [0, 128, 255]),
        (np.array([[-5, -5, -5]], np.int32), [0, 0, 0]),
        (np.array([[0, 65_535, 32_768]], np.int32), [0, 255, 128]),  # 16-bit grey in a larger type
        (np.array([[0.0, 0.5, 1.0]], np.float32), [0, 128, 255]),  # black to white
        (np.array([[0.0, 0.25, 0.5]], np.float32), [0, 64, 128]),
        (np.array([[0.0, 7.0, 250.0]], np.float32), [0, 7, 250]),  # levels
        (np.array([[-1.0, 0.0, 1.0]], np.float32), [0, 128, 255]),  # rescaled
        (np.array([[0.0, 1000.0, 4000.0]], np.float32), [0, 64, 255]),
        (np.array([[np.nan, 1000.0, 4000.0]], np.float32), [0, 0, 255]),
        (np.array([[-np.inf, 0.0, np.inf, 1.0]], np.float32), [0, 0, 255, 255]),
    ],
)
def test_thirty_two_bit_grey(values: np.ndarray, levels: list[int]) -> None:
    pixels = decode(encode(Image.fromarray(values), "TIFF"))
    assert pixels.shape == (*values.shape, 3)
    assert pixels[0].tolist() == [[level] * 3 for level in levels]


def test_an_image_without_finite_pixels_is_an_error() -> None:
    with pytest.raises(BadImage, match="NaN"):
        decode(encode(Image.fromarray(np.full((4, 4), np.nan, np.float32)), "TIFF"))


def tiff(pixels: np.ndarray, bits: int, **tags: int) -> bytes:
    """A grey TIFF with one row in one strip, of types that Pillow cannot write."""
    data = pixels.tobytes()
    entries = {256: pixels.shape[1], 257: 1, 258: bits, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: len(data)}
    entries |= {int(tag[1:]): value for tag, value in tags.items()}
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(entries.items()))
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(entries)) + table + bytes(4)


def test_unsigned_and_twelve_bit_tiffs() -> None:
    assert decode(tiff(np.array([[0, 2**31, 2**32 - 1]], "<u4"), 32))[0, :, 0].tolist() == [0, 128, 255]
    packed = np.frombuffer(bytes([0xFF, 0xF0, 0x00, 0x80, 0x00, 0x00]), np.uint8)[None]
    assert decode(tiff(packed, 12, t256=4))[0, :, 0].tolist() == [255, 0, 128, 0]


@pytest.mark.parametrize("tags", [{"t50706": 1}, {"t254": 1, "t330": 8}])
def test_camera_raw_is_rejected(tags: dict[str, int]) -> None:
    grey = np.arange(6, dtype=np.uint8)[None]
    assert decode(tiff(grey, 8))[0, :, 0].tolist() == list(range(6))
    with pytest.raises(BadImage, match="camera RAW"):
        decode(tiff(grey, 8, **tags))


def test_sixteen_bit_grey_with_a_transparent_value() -> None:
    rows = b"".join(b"\0" + struct.pack(">2H", 1000, 65535) for _ in range(2))
    data = png(
        struct.pack(">IIBBBBB", 2, 2, 16, 0, 0, 0, 0),
        (b"tRNS", struct.pack(">H", 1000)),
        (b"IDAT", zlib.compress(rows)),
    )
    pixels = decode(data, background=(10, 20, 30))
    assert pixels[0].tolist() == [[10, 20, 30], [255, 255, 255]]


def test_cmyk_jpeg_equals_pillow_and_is_close_to_the_original() -> None:
    data = encode(IMAGE.convert("CMYK"), "JPEG", quality=95)
    pixels = decode(data)
    np.testing.assert_array_equal(pixels, np.array(Image.open(io.BytesIO(data)).convert("RGB")))
    assert np.abs(pixels.astype(int) - PICTURE).mean() < 4


# transparency


def over(background: tuple[int, int, int], rgb: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    weight = alpha[..., None] / 255
    return rgb * weight + np.array(background) * (1 - weight)


@pytest.mark.parametrize("background", [(255, 255, 255), (0, 0, 0), (10, 200, 30)])
def test_alpha_is_composited_on_the_background(background: tuple[int, int, int]) -> None:
    alpha = np.linspace(0, 255, 40 * 60).reshape(40, 60).astype(np.uint8)
    image = IMAGE.copy()
    image.putalpha(Image.fromarray(alpha))
    for kind in ("PNG", "WEBP"):
        options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
        pixels = decode(encode(image, kind, **options), background=background)
        assert np.abs(pixels - over(background, PICTURE, alpha)).max() <= 1
    grey = image.convert("LA")
    expected = over(background, np.repeat(np.array(grey)[:, :, :1], 3, 2), alpha)
    assert np.abs(decode(encode(grey, "PNG"), background=background) - expected).max() <= 1


def test_colours_of_transparent_pixels_are_hidden() -> None:
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert (decode(encode(image, "PNG")) == 255).all()


def test_palettes_with_and_without_transparency() -> None:
    palette = IMAGE.quantize(16)
    np.testing.assert_array_equal(decode(encode(palette, "PNG")), np.array(palette.convert("RGB")))
    translucent = encode(palette, "PNG", transparency=3)
    expected = np.array(palette.convert("RGB"))
    expected[np.array(palette) == 3] = (1, 2, 3)
    np.testing.assert_array_equal(decode(translucent, background=(1, 2, 3)), expected)
    graded = bytes(range(0, 256, 16))
    pixels = decode(encode(palette, "PNG", transparency=graded), background=(1, 2, 3))
    alpha = np.array(list(graded), np.uint8)[np.array(palette)]
    assert np.abs(pixels - over((1, 2, 3), np.array(palette.convert("RGB")), alpha)).max() <= 1


def test_colour_key_transparency() -> None:
    image = Image.new("RGB", (2, 1), (9, 9, 9))
    image.putpixel((1, 0), (50, 60, 70))
    data = encode(image, "PNG", transparency=(9, 9, 9))
    assert decode(data, background=(0, 255, 0))[0].tolist() == [[0, 255, 0], [50, 60, 70]]


def test_four_channels_keep_alpha_and_the_colours_under_it() -> None:
    alpha = np.linspace(0, 255, 40 * 60).reshape(40, 60).astype(np.uint8)
    image = IMAGE.copy()
    image.putalpha(Image.fromarray(alpha))
    found = decode(encode(image, "PNG"), channels=4, background=(1, 2, 3))
    np.testing.assert_array_equal(found, np.dstack([PICTURE, alpha]))
    grey = decode(encode(image.convert("LA"), "PNG"), channels=4)
    np.testing.assert_array_equal(grey[:, :, 3], alpha)
    np.testing.assert_array_equal(grey[:, :, 0], np.array(IMAGE.convert("L")))
    key = Image.new("RGB", (2, 1), (9, 9, 9))
    key.putpixel((1, 0), (50, 60, 70))
    assert decode(encode(key, "PNG", transparency=(9, 9, 9)), channels=4)[0].tolist() == [
        [9, 9, 9, 0],
        [50, 60, 70, 255],
    ]


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "YCbCr"])
def test_four_channels_are_opaque_where_there_is_no_alpha(mode: str) -> None:
    kind = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
    data = encode(IMAGE.convert(mode), kind)
    found = decode(data, channels=4)
    assert found.shape == (40, 60, 4)
    assert (found[:, :, 3] == 255).all()
    np.testing.assert_array_equal(found[:, :, :3], decode(data))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_give_the_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "green", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert (decode(data) == (255, 0, 0)).all()


# orientation

_STORED = {  # the stored pixels of the same upright scene, for each orientation tag
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda a: np.rot90(a, -1),
}


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "JPEG"])
@pytest.mark.parametrize("tag", range(1, 9))
def test_every_orientation_gives_the_same_upright_image(tag: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = tag
    stored = Image.fromarray(np.ascontiguousarray(_STORED[tag](PICTURE)))
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    pixels = decode(encode(stored, kind, exif=exif, **options))
    assert pixels.shape == PICTURE.shape
    assert np.abs(pixels.astype(int) - PICTURE).max() <= (12 if kind == "JPEG" else 0)


@pytest.mark.parametrize("tag", [0, 9, 65535])
def test_invalid_orientations_are_ignored(tag: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = tag
    np.testing.assert_array_equal(decode(encode(IMAGE, "PNG", exif=exif)), PICTURE)


def test_broken_metadata_is_ignored() -> None:
    data = encode(IMAGE, "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\x01\x12" * 9)
    np.testing.assert_array_equal(decode(data), PICTURE)


# sizes


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 3000), (3000, 1)])
def test_extreme_shapes(height: int, width: int) -> None:
    np.testing.assert_array_equal(
        decode(encode(Image.fromarray(picture(height, width)), "PNG")), picture(height, width)
    )


def test_max_pixels_overrides_the_limit_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    data = io.BytesIO()
    Image.new("RGB", (60, 50)).save(data, "PNG")
    with pytest.raises(BadImage, match="more pixels"):
        decode(data.getvalue(), max_pixels=1000)
    assert decode(data.getvalue(), max_pixels=3000).shape == (50, 60, 3)


def test_a_decompression_bomb_is_rejected_from_its_header() -> None:
    data = png(struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0), (b"IDAT", zlib.compress(b"")))
    with pytest.raises(BadImage, match="more pixels"):
        decode(data)
    with pytest.raises(BadImage, match=r"10001x10000.* 100,000,000"):
        decode(png(struct.pack(">IIBBBBB", 10_001, 10_000, 8, 2, 0, 0, 0), (b"IDAT", zlib.compress(b""))))


def test_the_size_limit_counts_pixels() -> None:
    data = encode(IMAGE, "PNG")
    assert decode(data, max_pixels=40 * 60).shape == (40, 60, 3)
    with pytest.raises(BadImage, match=r"60x40.* 2,399"):
        decode(data, max_pixels=40 * 60 - 1)


# no image at all


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"hello, this is a text file",
        b"%PDF-1.4 and so on",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"\x59\xa6\x6a\x95" + struct.pack(">7I", 1, 1, 24, 3, 1, 0, 0) + b"abc",  # Sun raster, not on the list
        b"\xff\xd8\xff",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"RIFF\x04\0\0\0WEBP",
        b"BM" + bytes(60),
        png(struct.pack(">IIBBBBB", 0, 0, 8, 2, 0, 0, 0)),
    ],
)
def test_files_that_are_not_images_give_a_short_reason(data: bytes) -> None:
    with pytest.raises(BadImage) as caught:
        decode(data)
    reason = str(caught.value)
    assert reason
    assert "\n" not in reason
    assert "BytesIO" not in reason
    assert len(reason) < 200


KINDS = [
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("PNG", {}),
    ("WEBP", {}),
    ("BMP", {}),
    ("GIF", {}),
    ("TIFF", {}),
    ("PPM", {}),
    ("AVIF", {}),
    ("JPEG2000", {}),
    ("QOI", {}),
    *([("HEIF", {})] if CAN_READ_HEIF else []),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.6, 0.95])
def test_truncated_files_are_errors(kind: str, options: dict[str, object], fraction: float) -> None:
    data = encode(Image.fromarray(picture(200, 300)), kind, **options)
    with pytest.raises(BadImage):
        decode(data[: int(len(data) * fraction)])


def test_truncated_files_are_errors_even_if_another_library_allows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    data = encode(Image.fromarray(picture(200, 300)), "JPEG")
    with pytest.raises(BadImage, match="truncated"):
        decode(data[: len(data) // 2])


def test_no_warning_leaks() -> None:
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x05\xff\xff\xff\xff\0\0"
    odd_files = [
        encode(IMAGE, "JPEG", exif=exif),
        encode(IMAGE.quantize(16), "PNG", transparency=bytes(16)),
        png(struct.pack(">IIBBBBB", 9_900, 10_000, 8, 2, 0, 0, 0), (b"IDAT", zlib.compress(b""))),
        encode(IMAGE, "TIFF")[:-20],
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for data in odd_files:
            try:
                decode(data)
            except BadImage:
                continue
    assert caught == []


def test_two_channels_are_a_programming_error() -> None:
    with pytest.raises(ValueError, match=r"channels.* 2"):
        decode(encode(IMAGE, "PNG"), channels=2)


def test_many_threads_agree() -> None:
    files = [encode(IMAGE, kind, **options) for kind, options in KINDS] * 8
    expected = [decode(data) for data in files]
    with ThreadPoolExecutor(8) as pool:
        for pixels, reference in zip(pool.map(decode, files), expected, strict=True):
            np.testing.assert_array_equal(pixels, reference)


# damage

WHOLE = [encode(Image.fromarray(picture(24, 32)), kind, **options) for kind, options in KINDS]


@settings(max_examples=400, deadline=None)
@given(
    which=st.integers(0, len(WHOLE) - 1),
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=12),
    keep=st.floats(0.2, 1),
)
def test_damaged_bytes_give_pixels_or_bad_image(which: int, edits: list[tuple[float, int]], keep: float) -> None:
    data = bytearray(WHOLE[which])
    for place, value in edits:
        data[int(place * (len(data) - 1))] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            pixels = decode(bytes(data[: int(len(data) * keep)]), max_pixels=1_000_000)
        except BadImage as error:
            assert str(error)
        else:
            assert pixels.dtype == np.uint8
            assert pixels.ndim == 3
            assert pixels.shape[2] == 3
