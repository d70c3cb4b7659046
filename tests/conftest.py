"""Shared test set-up."""

from __future__ import annotations

import os

# Tests never reach for a model hub, and never read or fill the user's cache.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # test processes run side by side; more threads would fight

import pytest
import torch


def _let_timm_import() -> None:
    """timm imports torchvision, whose compiled part does not load beside a CPU-only torch; timm's ViTs need none of
    it. Declaring the two operators torchvision looks up at import is enough."""
    try:
        import torchvision  # noqa: F401
    except Exception:
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEEP.append(library)


_KEEP: list[object] = []
_let_timm_import()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
