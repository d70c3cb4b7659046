"""Shared test set-up."""

from __future__ import annotations

import os

# Tests never reach for a model hub, and never read or fill the user's cache.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # test processes run side by side; more threads would fight
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # where a test asks for more, those that wait leave the cores alone

import pytest

from vitrail.weights.peers import let_torchvision_import

let_torchvision_import()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
