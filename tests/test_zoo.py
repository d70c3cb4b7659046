"""Unusual image files give the same outcome in check, train and predict; corrupt bytes give a clean error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from tests.commands.conftest import vitrail
from tests.data.zoo import FILES, IGNORED, USED, encode, frames, make_zoo, photo
from tests.small import SMALL
from vitrail.data.dataset import open_dataset
from vitrail.data.scan import scan_image
from vitrail.doctor.check import check_dataset
from vitrail.workflows.train_run import train


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    root = tmp_path_factory.mktemp("zoo") / "zoo"
    return root, make_zoo(root)


def assert_outcomes(expected: dict[str, str], used: set[str], skipped: dict[str, str]) -> None:
    assert used == {name for name, outcome in expected.items() if outcome == USED}
    bad = {name: outcome for name, outcome in expected.items() if outcome not in (USED, IGNORED)}
    assert skipped.keys() == bad.keys()
    for name, reason in bad.items():
        assert reason in skipped[name], name
        assert "\n" not in skipped[name]


def test_check(zoo: tuple[Path, dict[str, str]]) -> None:
    root, expected = zoo
    result = check_dataset(root)
    unusable = [finding for finding in result.findings if finding.kind in ("corrupt", "format", "missing")]
    skipped = {case.names[0]: case.detail for finding in unusable for case in finding.cases}
    assert_outcomes(expected, set(result.rows) - set(skipped), skipped)
    assert "an HTML page" in skipped["odd/error page.jpg"]
    assert "it is text" in skipped["odd/text.jpg"]
    assert {row.name for row in result.quarantine} == set(skipped)  # the files have no duplicates
    kinds = {finding.kind: {case.names[0] for case in finding.cases} for finding in result.findings}
    assert kinds["missing"] == {"odd/dangling.jpg", "odd/itself.jpg"}
    assert kinds["format"] == {"odd/drawing.svg", "odd/raw.nef"}
    assert kinds["wide"] == {"odd/floating.tif"}
    assert kinds["misnamed"] == {"odd/really png.jpg"}
    assert kinds["rotated"] == {f"odd/turned {tag}.jpg" for tag in range(2, 9)}
    assert kinds["cmyk"] == {"odd/print.jpg"}
    assert kinds["palette"] == {"odd/palette.png", "odd/moving.gif"}
    assert kinds["alpha"] == {"odd/palette.png", "odd/alpha.png", "odd/alpha.webp"}
    assert kinds["sixteen-bit"] == {"odd/grey16.png", "odd/grey16.tif", "odd/wide.png"}
    assert kinds["animated"] == {"odd/moving.gif", "odd/moving.webp", "odd/pages.tiff"}
    assert kinds["grey"] == {"odd/floating.tif", "odd/grey.jpg", "odd/grey16.png", "odd/grey16.tif"}
    assert kinds["near-duplicate"] == {"odd/alpha.png", "odd/grey16.png"}  # the same pixels twice, in two formats
    assert kinds["shape"] == {"odd/one pixel.png", "odd/line.png"}


@pytest.mark.slow
def test_train_and_predict(zoo: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    root, expected = zoo
    data = open_dataset(root)
    used = {samples.name(i) for samples in data.splits.values() for i in range(len(samples))}
    assert_outcomes(expected, used, dict(data.excluded))
    with (tmp_path / "log").open("w") as log:
        overrides = (*SMALL, "train.steps=2", "augment.mixup=0.2", "train.batch_size=16")
        train(root, out=tmp_path / "run", overrides=overrides, console=Console(file=log, width=200))
    counts = re.search(r"images: (\d+) train, (\d+) val", (tmp_path / "log").read_text())
    assert counts and int(counts[1]) + int(counts[2]) == len(used)
    done = vitrail("predict", tmp_path / "run", root, "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    names = {row["file"]: str(Path(row["file"]).relative_to(root)) for row in rows}
    errors = {names[row["file"]]: row["error"] for row in rows if "error" in row}
    assert_outcomes(expected, set(names.values()) - set(errors), errors)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: {len(errors)} of the images could not be read"


# Mutated bytes

SEEDS = [
    encode(photo(40, 50, 1), "JPEG"),
    encode(photo(40, 50, 2), "JPEG", progressive=True, exif=FILES["turned 6.jpg"][0][20:120]),
    encode(photo(40, 50, 3).convert("CMYK"), "JPEG"),
    encode(photo(40, 50, 4), "PNG"),
    encode(photo(40, 50, 5).quantize(16), "PNG", transparency=3),
    encode(photo(40, 50, 6), "WEBP"),
    encode(photo(40, 50, 7), "WEBP", lossless=True),
    encode(photo(40, 50, 8), "GIF", **frames(2, 8)),
    encode(photo(40, 50, 9), "TIFF", compression="tiff_lzw"),
    encode(photo(40, 50, 10), "TIFF"),
    encode(Image.fromarray(np.arange(2000, dtype=np.uint16).reshape(40, 50)), "TIFF"),
    encode(photo(40, 50, 11), "BMP"),
    encode(photo(40, 50, 12), "PPM"),
    encode(photo(40, 50, 13), "AVIF"),
    encode(photo(40, 50, 14), "JPEG2000"),
    encode(photo(40, 50, 15), "QOI"),
    encode(Image.fromarray(np.linspace(-1, 2, 2000, dtype=np.float32).reshape(40, 50)), "TIFF"),
]


def mutate(random: np.random.Generator) -> bytes:
    """Return a valid file with flipped bits, an edited header, or a part cut out or replaced."""
    data = bytearray(SEEDS[random.integers(len(SEEDS))])
    for _ in range(random.integers(1, 4)):
        kind = random.integers(5)
        position = int(random.integers(len(data) or 1))
        if not data:
            break
        if kind == 0:
            data[position] ^= 1 << random.integers(8)
        elif kind == 1:  # a length or size in the header
            start = position % 64
            data[start : start + 4] = random.choice([0, 1, 255, 65535, 2**31 - 1, 2**32 - 1]).astype(">u4").tobytes()
        elif kind == 2:
            del data[position:]
        elif kind == 3:
            del data[position : position + int(random.integers(1, 200))]
        else:
            other = SEEDS[random.integers(len(SEEDS))]
            start = int(random.integers(len(other)))
            data[position:position] = other[start : start + int(random.integers(1, 300))]
    return bytes(data)


def assert_clean(data: bytes, name: str = "a.jpg") -> None:
    seen = scan_image(data, name, max_pixels=1_000_000)
    height, width = seen.shape
    assert bool(seen.problem) == (height * width == 0)
    assert height * width <= 1_000_000
    assert "\n" not in seen.problem
    assert len(seen.problem) < 250
    assert 0 <= seen.traits < 512
    if not seen.problem:
        assert (
            isinstance(seen.descriptor, np.ndarray)
            and seen.descriptor.dtype == np.int8
            and seen.descriptor.shape == (64,)
        )


@pytest.mark.slow
@settings(max_examples=500, deadline=2000)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(["a.jpg", "a.png", "a", "b.tiff"]))
def test_mutated_bytes_give_pixels_or_an_error(seed: int, name: str) -> None:
    assert_clean(mutate(np.random.default_rng(seed)), name)


@pytest.mark.slow
@settings(max_examples=500, deadline=2000)
@given(data=st.binary(max_size=200))
def test_random_bytes_after_a_file_signature(data: bytes) -> None:
    for seed in SEEDS:
        assert_clean(seed[:8] + data)


@pytest.mark.slow
def test_mutated_bytes_within_memory_and_time_limits() -> None:
    """The process may use 400 MB more than at its start, and a minute of CPU time."""
    code = """
import resource, sys
import numpy as np
from tests.test_zoo import assert_clean, mutate
assert_clean(mutate(np.random.default_rng(0)))
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 400_000_000,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for seed in range(6000):
    assert_clean(mutate(np.random.default_rng(seed)))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) < 150  # MB
