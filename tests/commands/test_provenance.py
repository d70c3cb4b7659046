"""What a report says of weights is what their card says."""

from vitrail.config import ModelConfig, Preprocess, ResNetConfig
from vitrail.report.provenance import preprocessing_line, provenance
from vitrail.weights.bundle import Card, Postprocess

MODEL = ModelConfig(width=48, depth=2, mlp_dim=64, heads=2, patch=(8, 8), image_size=(32, 48), num_classes=2)


def test_everything_the_card_knows_is_told():
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
        "network": "Vision Transformer, 2 blocks of 2 heads, 48 wide, patches of 8x8 px",
        "preprocessing": "resized to 32x48 px whatever the shape (bilinear); pixels from 0 to 1 less a mean of "
        "0.4, 0.5, 0.6, divided by 0.2, 0.2, 0.25",
        "trained on": "1,200 images of birds",
        "data fingerprint": "0123abc",
        "recipe": "finetune",
        "starting weights": "hf-hub:owner/name",
        "terms of the starting weights": "Apache 2.0",
        "answers": "temperature 1.5, none of these below a probability of 0.7",
        "made with": "a test",
    }


def test_what_it_does_not_know_is_left_out():
    net = ResNetConfig(kind="resnet", blocks=(3, 4, 6, 3), image_size=(64, 64), num_classes=0)
    rows = dict(provenance(Card(model=net, preprocess=Preprocess(size=(64, 64)), created_with="a test")))
    assert rows.keys() == {"network", "preprocessing", "trained on", "starting weights", "made with"}
    assert rows["network"] == "ResNet (BiT) with stages of 3-4-6-3 blocks, 64 channels wide at the root"
    assert rows["trained on"] == "unknown" and rows["starting weights"] == "none (random)"


def test_a_crop_is_told():
    line = preprocessing_line(Preprocess(size=(224, 224), resize="short_side", crop_fraction=0.875, antialias=False))
    assert line.startswith(
        "resized with the shape kept (bilinear without antialiasing), the centre cropped to 224x224 px, which is 87.5%"
    )
