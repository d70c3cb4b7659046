"""Network inputs of unusual images are bit-identical to a plain Pillow pipeline."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.data.images import encode, photo
from vitrail.config import Preprocess
from vitrail.data.decode import decode
from vitrail.data.transforms import eval_transform

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
WHITE = (255, 255, 255, 255)


def rgb(height: int, width: int) -> Image.Image:
    return Image.fromarray(photo(height, width, seed=height + width))


def with_exif(image: Image.Image, tag: int, kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = tag
    return encode(image, kind, exif=exif)


def translucent(image: Image.Image) -> Image.Image:
    result = image.copy()
    result.putalpha(Image.fromarray(photo(image.height, image.width, seed=9)[:, :, 0]))
    return result


def sixteen_bit() -> bytes:
    return encode(Image.fromarray(photo(60, 50)[:, :, 0].astype(np.uint16) * 257), "PNG")


UNUSUAL = {
    "one row": encode(rgb(1, 30), "PNG"),
    "one column": encode(rgb(30, 1), "PNG"),
    "one pixel": encode(rgb(1, 1), "PNG"),
    "tiny": encode(rgb(3, 5), "BMP"),
    "odd": encode(rgb(131, 77), "JPEG", quality=90),
    "huge": encode(rgb(1500, 2001), "JPEG", quality=70),
    "exact size": encode(rgb(56, 56), "PNG"),
    "one side exact": encode(rgb(56, 90), "PNG"),
    "grey": encode(rgb(90, 70).convert("L"), "JPEG"),
    "grey and alpha": encode(translucent(rgb(90, 70)).convert("LA"), "PNG"),
    "palette": encode(rgb(90, 70).quantize(32), "PNG"),
    "palette and alpha": encode(rgb(90, 70).quantize(32), "PNG", transparency=bytes(range(0, 256, 8))),
    "alpha": encode(translucent(rgb(90, 70)), "PNG"),
    "alpha in WebP": encode(translucent(rgb(90, 70)), "WEBP", lossless=True),
    "one bit": encode(rgb(90, 70).convert("1"), "PNG"),
    "sixteen bits": sixteen_bit(),
    "CMYK": encode(rgb(90, 71).convert("CMYK"), "JPEG", quality=95),
    "animation": encode(
        rgb(60, 40).quantize(64), "GIF", save_all=True, append_images=[rgb(60, 40).rotate(90, expand=False)]
    ),
    "pages": encode(rgb(60, 40), "TIFF", save_all=True, append_images=[rgb(50, 50)]),
    "rotated PNG": with_exif(rgb(90, 60), 6, "PNG"),
    **{f"orientation {tag}": with_exif(rgb(93, 60), tag) for tag in range(2, 9)},
}


def plain(data: bytes, mode: str = "RGB") -> Image.Image:
    """Open, transpose by EXIF, composite on white, convert."""
    image = Image.open(io.BytesIO(data))
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = Image.fromarray(np.round(np.asarray(image) / 257).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image.convert("RGBA"))
    return image.convert("RGB").convert(mode)


def pipeline(image: Image.Image, spec: Preprocess) -> np.ndarray:
    """Resize and crop as torchvision's transforms do on Pillow images."""
    height, width = spec.size
    if spec.resize == "squash":
        return np.asarray(image.resize((width, height), FILTERS[spec.interpolation], reducing_gap=None))
    short = math.floor(height / spec.crop_fraction)
    size = (short, short * image.height // image.width)
    if image.height < image.width:
        size = (short * image.width // image.height, short)
    image = image.resize(size, FILTERS[spec.interpolation], reducing_gap=None)
    top, left = round((image.height - height) / 2), round((image.width - width) / 2)
    return np.asarray(image)[top : top + height, left : left + width]


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("resize", ["squash", "short_side"])
def test_pixels_equal_a_pillow_pipeline(name: str, interpolation: str, resize: str) -> None:
    for size, fraction in ((56, 1.0), (56, 0.875), (33, 0.9)):
        spec = Preprocess(size=(size, size), resize=resize, interpolation=interpolation, crop_fraction=fraction)
        found = eval_transform(decode(UNUSUAL[name]), spec)
        np.testing.assert_array_equal(found.permute(1, 2, 0).numpy(), pipeline(plain(UNUSUAL[name]), spec))


@pytest.mark.parametrize("name", ["odd", "grey", "alpha", "CMYK", "sixteen bits", "orientation 6", "huge"])
@pytest.mark.parametrize("resize", ["squash", "short_side"])
def test_one_channel(name: str, resize: str) -> None:
    spec = Preprocess(size=(40, 40), resize=resize, mean=(0.5,), std=(0.5,))
    found = eval_transform(decode(UNUSUAL[name], channels=1), spec)
    assert found.shape == (1, 40, 40)
    np.testing.assert_array_equal(found[0].numpy(), pipeline(plain(UNUSUAL[name], "L"), spec))


@pytest.mark.parametrize("name", ["odd", "grey", "alpha", "palette and alpha", "alpha in WebP", "orientation 7"])
def test_four_channels_keep_alpha(name: str) -> None:
    spec = Preprocess(size=(40, 40), mean=(0.5,) * 4, std=(0.5,) * 4)
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(UNUSUAL[name]))).convert("RGBA")
    found = eval_transform(decode(UNUSUAL[name], channels=4), spec)
    np.testing.assert_array_equal(found.permute(1, 2, 0).numpy(), pipeline(image, spec))


@settings(max_examples=80, deadline=None)
@given(
    source=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    size=st.integers(1, 80),
    interpolation=st.sampled_from(sorted(FILTERS)),
    resize=st.sampled_from(["squash", "short_side"]),
)
def test_any_size(source: tuple[int, int], size: int, interpolation: str, resize: str) -> None:
    if max(source) > 30 * min(source):
        source = (source[0], source[0])  # longer images are trimmed first
    image = photo(*source)
    spec = Preprocess(size=(size, size), resize=resize, interpolation=interpolation)
    found = eval_transform(image, spec).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(found, pipeline(Image.fromarray(image), spec))
