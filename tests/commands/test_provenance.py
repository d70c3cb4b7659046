"""The provenance in a report is that of the weights' card."""

from vitrail.config import ModelConfig, Preprocess, ResNetConfig
from vitrail.report.provenance import preprocessing_line, provenance
from vitrail.weights.bundle import Card, Postprocess

MODEL = ModelConfig(width=48, depth=2, mlp_dim=64, heads=2, patch=(8, 8), image_size=(32, 48), num_classes=2)


def test_everything_in_the_card_is_reported():
    card = Card(
        model=MODEL,
        preprocess=Preprocess(size=(32, 48), mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.25)),
        postprocess=Postprocess(temperature=1.5, threshold=0.7),
        recipe={"recipe": "finetune"},
        data={"name": "birds", "fingerprint": "0123abc", "images": {"train": 1200, "test": 300}},
        source="hf-hub:owner/name",
        licence="Apache 2.0",
        created_with="a test",
    )
    assert dict(provenance(card)) == {
        "network": "Vision Transformer, depth 2, width 48, 2 heads, patch size 8x8 px",
        "preprocessing": "resized to 32x48 px, aspect ratio not kept (bilinear); pixels scaled to 0..1, then "
        "normalised with mean 0.4, 0.5, 0.6 and std 0.2, 0.2, 0.25",
        "trained on": "1,200 images of birds",
        "data fingerprint": "0123abc",
        "recipe": "finetune",
        "starting weights": "hf-hub:owner/name",
        "licence of the starting weights": "Apache 2.0",
        "postprocessing": 'temperature 1.5, "none of these" below a probability of 0.7',
        "created with": "a test",
    }


def test_unknown_properties_are_omitted():
    net = ResNetConfig(kind="resnet", blocks=(3, 4, 6, 3), image_size=(64, 64), num_classes=0)
    rows = dict(provenance(Card(model=net, preprocess=Preprocess(size=(64, 64)), created_with="a test")))
    assert rows.keys() == {"network", "preprocessing", "trained on", "starting weights", "created with"}
    assert rows["network"] == "ResNet (BiT), blocks 3-4-6-3, root width 64"
    assert rows["trained on"] == "unknown" and rows["starting weights"] == "none (random)"


def test_a_crop_is_reported():
    line = preprocessing_line(Preprocess(size=(224, 224), resize="short_side", crop_fraction=0.875, antialias=False))
    for fact in ("bilinear without antialiasing", "centre-cropped to 224x224 px", "87.5%"):
        assert fact in line
