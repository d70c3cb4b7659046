"""Memory of the loader does not grow over epochs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.loader import memory_over_epochs
from bench.photos import make_photos
from vitrail.data.dataset import open_dataset

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(f"/proc/{os.getpid()}/smaps_rollup").exists(), reason="needs /proc/PID/smaps_rollup"),
]


@pytest.mark.parametrize("keep", [False, True])
def test_memory_is_flat_over_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    """PSS counts shared pages once; RSS counts the cache in every process that read it."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    make_photos(tmp_path / "photos", 512)
    samples = open_dataset(tmp_path / "photos", None).splits["all"]
    found = memory_over_epochs(samples, 5, keep)
    assert found["growth"]["pss"] < 0.02
    if not keep:
        assert found["growth"]["rss"] < 0.02
