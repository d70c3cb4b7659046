"""Networks, losses and data of anybody's own in the training loop: against torch written out, stopped and gone on with,
and on two processes."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import tomllib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import vitrail
from tests import ranks as processes
from vitrail.errors import UserError
from vitrail.runs.source import drawn_from
from vitrail.training.interrupt import Interrupted

STEPS = ("train.steps=12", "precision.compute=fp32")


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    first = nn.Linear(5, 16, bias=False)  # whose gradient would be nothing but rounding
    return nn.Sequential(first, nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 3))


def samples() -> TensorDataset:
    draw = torch.Generator().manual_seed(7)
    inputs = torch.randn(40, 5, generator=draw)
    return TensorDataset(inputs, inputs @ torch.randn(5, 3, generator=draw))


def loss(network: nn.Module, batch) -> torch.Tensor:
    inputs, wanted = batch
    return nn.functional.mse_loss(network(inputs), wanted)


def mean_loss(network: nn.Module) -> dict[str, float]:
    assert not network.training and not torch.is_grad_enabled()
    return {"val_loss": loss(network, samples().tensors).item()}


def go(folder: Path, module: nn.Module, source, *settings: str, **others):
    overrides = (*STEPS, *settings)
    return vitrail.train(model=module, objective=loss, source=source, out=folder, overrides=overrides, **others)


def test_it_takes_the_steps_that_torch_takes(tmp_path):
    """AdamW with clipping over three epochs of five batches, in their order."""
    module, data = net(), DataLoader(samples(), batch_size=8)
    settings = ("schedule.shape=constant", "optimizer.lr=0.01", "optimizer.weight_decay=0.1", "optimizer.clip=0.5")
    console = Console(file=io.StringIO(), width=200)
    result = go(tmp_path, module, data, *settings, evaluator=mean_loss, console=console)

    other = net()
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01, weight_decay=0.1)
    batches = [batch for _ in range(3) for batch in data][:12]
    other.train()
    for batch in batches:
        optimizer.zero_grad()
        loss(other, batch).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        optimizer.step()
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=0, atol=1e-6, msg=name)
    stored = load_file(result.weights)
    assert stored.keys() == other.state_dict().keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in module.state_dict().items())
    other.eval()
    with torch.no_grad():
        assert result.scores["val_loss"] == pytest.approx(mean_loss(other)["val_loss"], rel=1e-5)
    assert f"held-out loss {result.scores['val_loss']:.3f}" in console.file.getvalue().splitlines()[-2]
    assert (tmp_path / "curves.svg").is_file() and result.report is None
    with safe_open(result.weights, framework="pt") as file:
        facts = json.loads(file.metadata()["vitrail-module"])
    assert facts["config"] == tomllib.loads((tmp_path / "config.toml").read_text())
    assert facts["config"]["optimizer"]["clip"] == 0.5 and facts["config"].keys() == {
        "kind", "optimizer", "schedule", "precision", "train"
    }  # fmt: skip


class Noisy(Dataset):
    """Samples that are changed at random, by each of the generators that people use."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = torch.randn(5) + random.random() + float(np.random.rand())
        inputs, wanted = samples()[index]
        return {"inputs": inputs + 0.1 * noise, "wanted": wanted}


class Stops(Exception):
    pass


@pytest.mark.parametrize("workers", [0, 2])
def test_stopped_and_gone_on_with_it_ends_with_the_same_bits(tmp_path, workers):
    settings = ("train.ema=0.9", "train.micro_batch=3", "optimizer.clip=1", "train.checkpoint_every=4")

    def by_name(network, batch):
        return loss(network, (batch["inputs"], batch["wanted"]))

    def run(folder, objective=by_name, module=None, **others):
        data = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=workers)
        module = net(dropout=0.3) if module is None else module
        vitrail.train(
            model=module, objective=objective, source=data, out=folder, overrides=(*STEPS, *settings), **others
        )
        return module.state_dict()

    whole = run(tmp_path / "whole")
    calls = 0

    def breaks(network, batch):
        nonlocal calls
        calls += 1
        if calls == 20:  # three parts of a batch each: in step 7
            raise Stops
        return by_name(network, batch)

    with pytest.raises(Stops):
        run(tmp_path / "parts", breaks)

    def stopped(network, batch):
        signal.raise_signal(signal.SIGTERM)
        return by_name(network, batch)

    with pytest.raises(Interrupted, match="stopped and saved; the same call with resume=True goes on"):
        run(tmp_path / "parts", stopped, resume=True)
    resumed = run(tmp_path / "parts", module=nn.Sequential(*net(dropout=0.3)), resume=True)
    assert all(torch.equal(whole[name], tensor) for name, tensor in resumed.items())
    finished = run(tmp_path / "parts", stopped, resume=True)  # nothing is left to do
    assert all(torch.equal(whole[name], tensor) for name, tensor in finished.items())


def test_a_source_is_the_same_from_any_batch_on():
    data = DataLoader(Noisy(), batch_size=8, shuffle=True)

    def first(place, seed=1, rank=0):
        return next(drawn_from(data, place, seed, rank))["inputs"]

    stream = drawn_from(data, 0, 1)
    expected = [next(stream)["inputs"] for _ in range(12)]
    torch.rand(3)
    for place in (0, 4, 5, 11):
        assert torch.equal(first(place), expected[place])
    others = [first(0, seed=2), first(0, rank=1), expected[5]]
    assert not any(torch.equal(other, expected[0]) for other in others)
    assert list(drawn_from(lambda place: range(place, 9), 6, 0)) == [6, 7, 8]
    endless = drawn_from(iter(range(1, 100)), 3, 0)
    assert [next(endless) for _ in range(3)] == [4, 5, 6]


def test_epochs_are_told_to_samplers():
    heard = []

    class Source(list):
        def set_epoch(self, epoch):
            heard.append(epoch)

    stream = drawn_from(Source([1, 2]), 3, 0)
    assert [next(stream) for _ in range(3)] == [2, 1, 2] and heard == [1, 2]


class Pair(NamedTuple):
    inputs: np.ndarray
    wanted: list[torch.Tensor]
    scale: torch.Tensor
    name: str


def test_batches_of_any_make(tmp_path):
    """Arrays, and tensors in named tuples and lists; what is not there for each sample goes with every part."""
    inputs, wanted = samples().tensors
    batch = Pair(inputs.numpy(), [wanted], torch.tensor([1.0, 1.0, 2.0]), "all")
    seen = []

    def by_field(network, part):
        assert isinstance(part, Pair) and part.name == "all" and part.scale.shape == (3,)
        seen.append(len(part.inputs))
        return ((network(part.inputs) - part.wanted[0]) * part.scale).square().mean()

    overrides = ("train.steps=2", "train.micro_batch=16", "precision.compute=fp32")
    vitrail.train(model=net(), objective=by_field, source=[batch], out=tmp_path, overrides=overrides)
    assert seen == [16, 16, 8] * 2


class Tied(nn.Module):
    """Two layers with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(5, 3)

    def forward(self, inputs):
        return self.last(self.second(self.first(inputs)))


def test_layers_that_share_weights(tmp_path):
    module = Tied()
    result = go(tmp_path, module, DataLoader(samples(), batch_size=8), "train.ema=0.5", "train.ema_ramp=false")
    assert module.first.weight is module.second.weight
    stored = load_file(result.weights)
    assert torch.equal(stored["first.weight"], stored["second.weight"])
    assert torch.equal(stored["first.weight"], module.first.weight)
    assert not torch.equal(module.first.weight, Tied().first.weight)


def _plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 3))


def _thirds(rank: int | None) -> list[tuple[torch.Tensor, ...]]:
    """Batches of nine; of each, the first process gets six samples and the second three."""
    rows = slice(None) if rank is None else slice(0, 6) if rank == 0 else slice(6, 9)
    return [tuple(tensor[i : i + 9][rows] for tensor in samples().tensors) for i in range(0, 36, 9)]


def _together(folder: str, how: str) -> None:
    rank = int(os.environ["RANK"])
    settings = ("optimizer.lr=0.01", "train.ema=0.5", f"train.parallel={how}")
    go(Path(folder), _plain(seed=rank), _thirds(rank), *settings)  # the weights of the first process count


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_does(tmp_path, how):
    processes.start(2, tmp_path, _together, str(tmp_path / "two"), how).results()
    alone = _plain(seed=0)
    go(tmp_path / "one", alone, _thirds(None), "optimizer.lr=0.01", "train.ema=0.5")
    stored = load_file(tmp_path / "two" / "model.safetensors")
    assert stored.keys() == alone.state_dict().keys()
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(stored[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("train.steps=0",), "train.steps"),
        (("optimizer.lrr=1",), "did you mean 'optimizer.lr'"),
        (("data.holdout=0.5",), "nothing would read data.holdout where the network and the data are your own"),
        (("train.batch_size=4",), "nothing would read train.batch_size"),
        (("optimizer.momentum=0.8",), "nothing would read optimizer.momentum: it needs optimizer.name=sgd or muon"),
        (("optimizer.name=muon",), "no matrix of a Transformer block"),
        (("optimizer.layer_decay=0.5",), "no Transformer blocks"),
        (("train.compile=graphs",), "use off or network"),
        (("train.compile=blocks",), "use off or network"),
        (("schedule.warmup=50",), "longer than the run of 12 steps"),
    ],
)
def test_settings_that_cannot_be(tmp_path, settings, words):
    with pytest.raises(UserError, match=words):
        go(tmp_path / "run", net(), DataLoader(samples(), batch_size=8), *settings)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_what_the_caller_gives_is_looked_at(tmp_path):
    data = DataLoader(samples(), batch_size=8)

    def refused(words, model=None, objective=loss, source=data, **others):
        others = {"out": tmp_path / "run", "overrides": STEPS, "overwrite": True} | others
        with pytest.raises(UserError, match=words):
            vitrail.train(model=model or net(), objective=objective, source=source, **others)

    refused("takes all of model=MODULE, objective=LOSS and source=BATCHES", model="S/16")
    refused("takes all of", objective=None)
    refused("takes its data from source", data="photos")
    refused("out=FOLDER", out=None)
    refused("say how long to train", overrides=())
    refused("choose one", resume=True)
    refused("needs a source that has a length", source=(batch for batch in data), overrides=["train.epochs=2"])
    refused("wrap it in a DataLoader", source=samples())
    refused("gave no batches", source=[])
    refused("gave no batches when it was iterated again", source=iter(list(data)))
    refused("ended before step 6 of 12", source=lambda place: list(data)[place:])
    refused("must hold tensors .* this one is str", source=["words"])
    refused("the mean loss of a batch: it gave a tensor of shape \\(8, 3\\)", objective=lambda n, b: n(b[0]))
    refused("it gave float", objective=lambda n, b: 0.5)
    refused("does not depend on the network", objective=lambda n, b: b[0].mean())
    refused("names with numbers", evaluator=lambda n: [0.3])


def test_a_folder_holds_one_run(tmp_path):
    data, folder = DataLoader(samples(), batch_size=8), tmp_path / "run"
    go(folder, net(), data)
    with pytest.raises(UserError, match="already holds a finished run"):
        go(folder, net(), data)
    with pytest.raises(UserError, match=r"was started with optimizer.lr=0.001, and not 0.5"):
        go(folder, net(), data, "optimizer.lr=0.5", resume=True)
    with pytest.raises(UserError, match="is not of this module"):
        go(folder, Tied(), data, resume=True)
    (folder / "model.safetensors").unlink()
    wider = net()
    wider[0] = nn.Linear(5, 17, bias=False)
    with pytest.raises(UserError, match=r"is of another network: 'model/0.weight' is \(16, 5\) and \(17, 5\)"):
        go(folder, wider, data, resume=True)
    with pytest.raises(UserError, match="a network of your own: go on with vitrail"):
        vitrail.train(out=folder, resume=True)
    with pytest.raises(UserError, match="settings of a network of your own"):
        vitrail.train(recipe=str(folder / "config.toml"), out=tmp_path / "other")


def test_the_length_may_be_given_in_epochs(tmp_path):
    overrides = ["train.epochs=2.4", "precision.compute=fp32"]
    data = DataLoader(samples(), batch_size=8)
    vitrail.train(model=net(), objective=loss, source=data, out=tmp_path, overrides=overrides)
    assert tomllib.loads((tmp_path / "config.toml").read_text())["train"]["steps"] == 12
