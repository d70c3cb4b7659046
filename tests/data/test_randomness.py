import numpy as np
import pytest
from scipy import stats

from vitrail.data.randomness import Stream, bits, epoch_permutation, philox, step_seed, uniform

# Known answers of philox4x32-10 published with Random123 (kat_vectors).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_equals_the_published_vectors(counter, key, expected):
    words = philox(tuple(np.array([c], np.uint64) for c in counter), key)
    assert tuple(int(w[0]) for w in words) == expected


def test_numbers_do_not_depend_on_the_batch():
    together = uniform(7, Stream.CROP, [0, 0, 3], [5, 6, 5], 8)
    for row, (epoch, sample) in zip(together, [(0, 5), (0, 6), (3, 5)], strict=True):
        assert np.array_equal(row, uniform(7, Stream.CROP, epoch, sample, 8))
    assert np.array_equal(together[:, :3], uniform(7, Stream.CROP, [0, 0, 3], [5, 6, 5], 3))


def test_seed_stream_epoch_and_sample_each_change_the_numbers():
    base = bits(1, Stream.CROP, 2, 3, 4)
    others = [
        bits(2, Stream.CROP, 2, 3, 4),
        bits(1, Stream.FLIP, 2, 3, 4),
        bits(1, Stream.CROP, 3, 3, 4),
        bits(1, Stream.CROP, 2, 4, 4),
        bits(1, Stream.CROP, 2, 3 + 2**32, 4),
    ]
    assert all((base != other).any() for other in others)


def test_uniform_is_uniform_and_open():
    values = uniform(0, Stream.FLIP, 0, np.arange(20_000), 1)[:, 0]
    assert values.min() > 0 and values.max() < 1
    assert stats.kstest(values, "uniform").pvalue > 0.001


def test_epoch_permutation_changes_with_epoch_and_seed():
    first = epoch_permutation(0, 0, 1000)
    assert np.array_equal(np.sort(first), np.arange(1000))
    assert np.array_equal(first, epoch_permutation(0, 0, 1000))
    assert not np.array_equal(first, epoch_permutation(0, 1, 1000))
    assert not np.array_equal(first, epoch_permutation(1, 0, 1000))
    assert not np.array_equal(first, np.arange(1000))


def test_step_seeds_fit_torch_and_differ():
    seeds = [step_seed(0, step) for step in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_streams_keep_their_numbers():
    """Changed numbers would change every run that is resumed with a newer version."""
    first = ["ORDER", "CROP", "FLIP", "MIXUP", "NETWORK", "FLIP_VERTICAL", "RANDAUGMENT", "THREE_AUGMENT", "JITTER"]
    names = [*first, "ERASE", "ERASE_NOISE", "CUTMIX"]
    assert [stream.name for stream in Stream][: len(names)] == names
    assert [int(stream) for stream in Stream] == list(range(len(Stream)))
