"""A custom module, loss and dataset, trained on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import vitrail
from vitrail.models.build import build_model
from vitrail.models.variants import config_from_name

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Stops(Exception):
    pass


def samples() -> TensorDataset:
    draw = torch.Generator().manual_seed(7)
    images = torch.randn(64, 3, 32, 32, generator=draw)
    return TensorDataset(images, images.mean((2, 3)))


def loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, wanted = batch
    assert images.is_cuda and wanted.is_cuda
    return nn.functional.mse_loss(network(images).float(), wanted)


def go(folder: Path, objective=loss, **others: object) -> dict[str, Tensor]:
    torch.manual_seed(3)
    settings = (
        "train.steps=24",
        "train.ema=0.9",
        "train.micro_batch_size=5",
        "train.checkpoint_every=4",
        "optimizer.clip_grad_norm=1",
    )
    module = build_model(config_from_name("Ti/8", 3, 32, dropout=0.1))
    data = DataLoader(samples(), batch_size=16, shuffle=True, num_workers=2, pin_memory=True)
    overrides = (*settings, f"train.compile={others.pop('compile')}")
    vitrail.fit(module, objective, data, out=folder, overrides=overrides, **others)
    assert all(parameter.is_cuda for parameter in module.parameters())
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("compile", ["off", "blocks", "network"])
def test_a_stopped_fit_resumes_bit_for_bit(tmp_path: Path, compile: str) -> None:
    whole = go(tmp_path / "whole", compile=compile)
    calls = 0

    def breaks(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 40:  # in step 10: each batch has four micro-batches
            raise Stops
        return loss(network, batch)

    with pytest.raises(Stops):
        go(tmp_path / "parts", breaks, compile=compile)
    resumed = go(tmp_path / "parts", compile=compile, resume=True)
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


def test_it_learns_in_bfloat16_what_torch_learns_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 3))
    other = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 3)).cuda()
    other.load_state_dict(module.state_dict())
    data = DataLoader(samples(), batch_size=16)
    overrides = ("train.steps=40", "schedule.shape=constant", "optimizer.lr=1e-3", "optimizer.weight_decay=0.1")
    vitrail.fit(module, loss, data, out=tmp_path, overrides=overrides)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(10):
        for images, wanted in data:
            optimizer.zero_grad()
            loss(other, (images.cuda(), wanted.cuda())).backward()
            optimizer.step()
    images, wanted = samples().tensors
    with torch.no_grad():
        losses = [nn.functional.mse_loss(net(images.cuda()), wanted.cuda()).item() for net in (module, other)]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
