"""Features on disk: none is computed twice, none is lost, none is another network's."""

import numpy as np
import pytest
import torch
from torch import nn

from vitrail.config import Preprocess
from vitrail.errors import UserError
from vitrail.inference.feature_cache import FeatureCache

CPU = torch.device("cpu")


def digests(*numbers):
    return np.array(numbers, np.uint64)


def test_features_are_returned_in_the_requested_order(tmp_path):
    cache = FeatureCache(tmp_path / "new")
    assert cache.missing(digests(5, 9, 5)).tolist() == [0, 1]
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    cache.add(digests(9, 1), values[:2])
    cache.add(digests(7, 2**64 - 1), values[2:])
    asked = digests(2**64 - 1, 3, 1, 9, 1)
    assert cache.missing(asked).tolist() == [1]
    found, there = cache.take(asked)
    assert there.tolist() == [True, False, True, True, True]
    np.testing.assert_array_equal(found, values[[3, 1, 0, 1]])


def test_an_image_in_two_files_is_returned_once(tmp_path):
    cache = FeatureCache(tmp_path)
    for _ in range(2):
        cache.add(digests(4, 6), np.ones((2, 3), np.float32))
    assert sorted(row for rows, _ in cache.rows(digests(6, 4, 6)) for row in rows.tolist()) == [0, 1, 2]


def test_a_damaged_file_is_skipped(tmp_path):
    cache = FeatureCache(tmp_path)
    cache.add(digests(1), np.ones((1, 3), np.float32))
    cache.add(digests(2), np.ones((1, 3), np.float32))
    path = next(tmp_path.glob("*.npz"))
    path.write_bytes(path.read_bytes()[:100])
    assert len(cache.missing(digests(1, 2))) == 1
    assert cache.take(digests(1, 2))[1].sum() == 1


def test_the_cache_depends_on_weights_and_preprocessing():
    net, spec = nn.Linear(3, 2), Preprocess(size=(16, 16))
    before = FeatureCache.for_network(net, spec, CPU).folder
    assert FeatureCache.for_network(net, spec, CPU).folder == before
    assert FeatureCache.for_network(net, Preprocess(size=(16, 24)), CPU).folder != before
    with torch.no_grad():
        net.weight[0, 0] += 1e-6
    assert FeatureCache.for_network(net, spec, CPU).folder != before


def test_a_full_disk_is_a_user_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*VITRAIL_CACHE"):
        FeatureCache(tmp_path / "file" / "features").add(digests(1), np.ones((1, 2), np.float32))
