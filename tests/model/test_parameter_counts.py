"""Parameter counts: the sizes the original code asserts in its own tests, and the closed formula for the rest."""

from __future__ import annotations

import pytest
import torch

from vitrail.config import ModelConfig
from vitrail.model.variants import COMMON, configure
from vitrail.model.vit import VisionTransformer

# name: (parameters, with representation layer, mean pooling, without head) at 224 px and 1000 classes
COUNTS = {
    "Ti/16": (5_717_416, 5_754_472, 5_717_032, 5_524_416),
    "S/32": (22_878_952, 23_026_792, 22_878_184, 22_493_952),
    "S/16": (22_050_664, 22_198_504, 22_049_896, 21_665_664),
    "M/16": (38_837_736, 39_100_392, 38_836_712, 38_324_736),
    "B/32": (88_224_232, 88_814_824, 88_222_696, 87_455_232),
    "B/16": (86_567_656, 87_158_248, 86_566_120, 85_798_656),
    "B/8": (86_576_872, 87_167_464, 86_575_336, 85_807_872),
    "L/32": (306_535_400, 307_585_000, 306_533_352, 305_510_400),
    "L/16": (304_326_632, 305_376_232, 304_324_584, 303_301_632),
    "H/14": (632_045_800, 633_685_480, 632_043_240, 630_764_800),
    "g/14": (1_012_611_432, 1_014_595_304, 1_012_608_616, 1_011_202_432),
    "G/14": (1_844_440_680, 1_847_211_240, 1_844_437_352, 1_842_775_680),
}
# (name, image size): (parameters, tokens); none where only the tokens are known
LARGER_IMAGES = {
    ("S/16", 384): (22_196_584, 577),
    ("B/16", 384): (86_859_496, 577),
    ("B/32", 384): (88_297_192, 145),
    ("L/16", 384): (304_715_752, 577),
    ("L/32", 384): (306_632_680, 145),
    ("L/16", 512): (None, 1025),
    ("H/14", 518): (None, 1370),
}


def count(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in VisionTransformer(config).parameters())


def test_every_named_size_is_counted():
    assert set(COUNTS) == set(COMMON)


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name):
    plain = configure(name, 1000)
    found = (
        count(plain),
        count(configure(name, 1000, representation=plain.width)),
        count(configure(name, 1000, pool="gap")),
        count(configure(name, 0)),
    )
    assert found == COUNTS[name]


@pytest.mark.parametrize(("name", "size"), LARGER_IMAGES)
def test_counts_at_fine_tuning_sizes(name, size):
    parameters, tokens = LARGER_IMAGES[name, size]
    config = configure(name, 1000, size)
    assert config.sequence == tokens
    if parameters:
        assert count(config) == parameters
