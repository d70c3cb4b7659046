"""Parameter counts: the sizes in the tests of the original code, and a closed formula for the others."""

from __future__ import annotations

import pytest
import torch

from vitrail.config import NetworkConfig
from vitrail.models.build import build_model
from vitrail.models.variants import AXIAL, MODEL_NAMES, config_from_name

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
# hybrids: (parameters, tokens) and BiT ResNets: parameters
HYBRIDS = {
    "R50+B/16": (98_659_112, 197),
    "R26+B/32": (101_383_976, 50),
    "R26+S/32": (36_431_912, 50),
    "R50+L/32": (328_994_856, 50),
    "R50+B/32": (110_945_832, 50),
    "R50+L/16": (316_483_624, 197),
    "R+Ti/16": (6_337_704, 50),
}
RESNETS = {
    "R50x1": 25_549_352,
    "R50x2": 97_988_712,
    "R50x3": 217_319_080,
    "R101x1": 44_541_480,
    "R101x3": 387_934_888,
    "R152x1": 60_185_128,
    "R152x2": 236_335_208,
    "R152x4": 936_533_224,
    "R200x3": 568_633_000,
}
# (name, image size): (parameters, tokens); None where only the tokens are known
LARGER_IMAGES = {
    ("S/16", 384): (22_196_584, 577),
    ("B/16", 384): (86_859_496, 577),
    ("B/32", 384): (88_297_192, 145),
    ("L/16", 384): (304_715_752, 577),
    ("L/32", 384): (306_632_680, 145),
    ("L/16", 512): (None, 1025),
    ("H/14", 518): (None, 1370),
}


def count(config: NetworkConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(config).parameters())


def test_every_named_size_is_counted():
    assert {*COUNTS, *HYBRIDS, *RESNETS, *AXIAL} == set(MODEL_NAMES)


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids(name):
    config = config_from_name(name, 1000)
    assert (count(config), config.sequence) == HYBRIDS[name]


@pytest.mark.parametrize("name", RESNETS)
def test_resnets(name):
    assert count(config_from_name(name, 1000)) == RESNETS[name]


def test_big_vision_s_small_recipe():
    """Mean pooling and fixed positions, with and without the tanh layer."""
    plain = {"pool": "gap", "positions": "sincos"}
    assert count(config_from_name("S/16", 1000, **plain)) == 21_974_632
    assert count(config_from_name("S/16", 1000, **plain, representation=384)) == 22_122_472


def test_an_axial_network_has_every_block_twice():
    block = count(config_from_name("B/16", 0, depth=2)) - count(config_from_name("B/16", 0, depth=1))
    plain = count(config_from_name("B/16", 1000, pool="gap"))
    assert count(config_from_name("Axial-B/16", 1000)) == plain + 12 * block


def test_the_net_of_appendix_d2():
    """8 layers, width 1024, MLP 2048, patch 32. The paper omits the number of heads, which has no effect here."""
    values = {"width": 1024, "depth": 8, "mlp_dim": 2048, "heads": 16}
    assert count(config_from_name("B/32", 1000, **values)) == 71_425_000


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name):
    plain = config_from_name(name, 1000)
    counts = (
        count(plain),
        count(config_from_name(name, 1000, representation=plain.width)),
        count(config_from_name(name, 1000, pool="gap")),
        count(config_from_name(name, 0)),
    )
    assert counts == COUNTS[name]


@pytest.mark.parametrize(("name", "size"), LARGER_IMAGES)
def test_counts_at_fine_tuning_sizes(name, size):
    parameters, tokens = LARGER_IMAGES[name, size]
    config = config_from_name(name, 1000, size)
    assert config.sequence == tokens
    if parameters:
        assert count(config) == parameters
