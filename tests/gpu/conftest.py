"""Fixtures of the CUDA tests: exact fp32 matrix products, and networks with random weights in all tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

# cuBLAS reads this once, when its first handle is created. Without it, results can differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from vitrail.models.build import Network, build_model
from vitrail.models.variants import config_from_name


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    """Disable TF32, since its errors are larger than the tolerances."""
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
    """Networks with noise added to all weights: a head initialised to 0 would hide errors."""

    def make(name: str, num_classes: int = 1000, device: str = "cuda", **options: Any) -> Network:
        torch.manual_seed(0)
        net = build_model(config_from_name(name, num_classes, **options))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        return net.to(device)

    return make
