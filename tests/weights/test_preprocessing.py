"""Converting preprocessing to and from other libraries: the same pixels, or a UserError."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from tests.weights.configs import card_of, random_state
from vitrail.config import ModelConfig, Preprocess
from vitrail.data.transforms import eval_transform, normalise
from vitrail.errors import UserError
from vitrail.weights.bundle import write_bundle
from vitrail.weights.read import read_weights

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application invoked")

MODEL = ModelConfig(width=48, depth=1, mlp_dim=96, heads=3, patch=(8, 8), image_size=(32, 32), num_classes=5)


@pytest.fixture
def source(tmp_path):
    def write(model=MODEL, **preprocess):
        spec = Preprocess(size=model.image_size, **preprocess)
        write_bundle(tmp_path / "ours.safetensors", random_state(model), card_of(model, preprocess=spec))
        return tmp_path / "ours.safetensors"

    return write


@pytest.mark.parametrize("size", [(60, 80), (90, 40), (33, 50)])
@pytest.mark.parametrize(
    "how",
    [
        {"resize": "squash", "interpolation": "bilinear"},
        {"resize": "short_side", "crop_fraction": 0.875, "interpolation": "bicubic"},
        {"resize": "short_side"},
    ],
    ids=str,
)
def test_timms_transform_gives_the_same_pixels(tmp_path, convert, source, how, size):
    assert convert(source(**how), tmp_path / "timm", "--to", "timm")[0] == 0
    network = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=network))
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    timm_pixels = transform(Image.fromarray(image))
    spec = read_weights(str(tmp_path / "timm")).card.preprocess
    pixels = normalise(eval_transform(image, spec)[None], spec)[0]
    assert (timm_pixels - pixels).abs().mean() * 127.5 < 0.5  # rounding in grey levels; a shift of one pixel gives 70


def test_preprocessing_that_timm_does_differently_is_rejected(tmp_path, convert, source):
    model = MODEL.model_copy(update={"image_size": (16, 64)})
    code, _, error = convert(source(model, resize="short_side"), tmp_path / "timm", "--to", "timm")
    assert code == 2 and "16x64 images" in error and "aspect ratio" in error


def test_the_crop_difference_of_transformers_is_printed(tmp_path, convert, source):
    code, output, _ = convert(source(resize="short_side", crop_fraction=0.8), tmp_path / "hf", "--to", "huggingface")
    assert code == 0 and "crop can differ by one pixel" in output


def test_image_size_is_not_stored_in_googles_layout(tmp_path, convert, source):
    model = MODEL.model_copy(update={"image_size": (16, 64), "dropout": 0.1})
    code, output, _ = convert(source(model, antialias=False), tmp_path / "vit.npz", "--to", "google")
    assert code == 0 and all(fact in output for fact in ("dropout", "drop_path", "the image size"))
    back = read_weights(str(tmp_path / "vit.npz"))
    assert "square 32x32 images" in back.assumed
    assert read_weights(str(tmp_path / "vit.npz"), image_size=(16, 64)).assumed == ""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"size": {"height": 384, "width": 384}}, "384x384 images.* 32x32"),
        ({"size": {"longest_edge": 32}}, "no fixed output size.*'longest_edge': 32"),
        ({"size": {"height": 32, "width": 0}}, "no fixed output size"),
        ({"do_resize": False}, "not resize"),
        ({"do_center_crop": True, "size": {"shortest_edge": 40}, "crop_size": {"height": 0, "width": 0}}, "0"),
    ],
    ids=str,
)
def test_processors_that_do_not_fit(tmp_path, convert, source, change, expected):
    assert convert(source(), tmp_path / "hf", "--to", "huggingface")[0] == 0
    file = tmp_path / "hf" / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=expected):
        read_weights(str(tmp_path / "hf"))


def test_the_smaller_images_of_dinov2(tmp_path):
    config = transformers.Dinov2Config(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=3, mlp_ratio=2, image_size=42, patch_size=14
    )
    transformers.Dinov2Model(config).save_pretrained(tmp_path)
    processor = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 32}, "resample": 3}
    crop = {"do_center_crop": True, "crop_size": {"height": 28, "width": 28}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**processor, **crop}))
    weights = read_weights(str(tmp_path))
    assert weights.assumed in weights.card.source
    assert all(fact in weights.assumed for fact in ("resized to 42x42", "preprocessor_config.json has 28x28"))
    assert weights.card.preprocess.size == (42, 42) and weights.card.preprocess.crop_fraction == 28 / 32
