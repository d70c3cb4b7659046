"""What the CUDA tests share: exact fp32 products, and networks whose every weight matters."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

# cuBLAS reads this once, when its first handle is made; without it its products may differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from vitrail.models.build import Network, build_model
from vitrail.models.variants import config_from_name


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    """TF32 off: it would blur what the tolerances are about."""
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.fixture(autouse=True)
def _clean_device() -> Iterator[None]:
    """Each test starts with an empty compiler cache and leaves no memory behind."""
    torch.compiler.reset()
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def make_net() -> Callable[..., Network]:
    """Networks with noise on every weight: the zeros a head starts from would hide any error."""

    def make(name: str, num_classes: int = 1000, device: str = "cuda", **options: Any) -> Network:
        torch.manual_seed(0)
        net = build_model(config_from_name(name, num_classes, **options))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        return net.to(device)

    return make
