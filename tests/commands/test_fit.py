"""`vitrail.fit` with custom modules, losses and data: compared with a plain torch loop, stopped and resumed, and on two
processes."""

from __future__ import annotations

import io
import json
import math
import os
import random
import signal
import tomllib
from collections import UserDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import vitrail
from tests import ranks as processes
from vitrail.errors import Note, UserError
from vitrail.interrupt import Interrupted
from vitrail.tasks.custom_loss import CustomBatch
from vitrail.training import precision
from vitrail.training.batches import batches_from, batches_per_epoch, resumable_source

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
    return vitrail.fit(module, loss, source, out=folder, overrides=overrides, **others)


def test_fit_matches_a_plain_torch_loop(tmp_path):
    """AdamW with clipping over three epochs of five batches, in their order."""
    module, data = net(), DataLoader(samples(), batch_size=8)
    settings = (
        "schedule.shape=constant",
        "optimizer.lr=0.01",
        "optimizer.weight_decay=0.1",
        "optimizer.clip_grad_norm=0.5",
    )
    console = Console(file=io.StringIO(), width=200)
    result = go(tmp_path, module, data, *settings, evaluate=mean_loss, console=console)

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
    assert f"val loss {result.scores['val_loss']:.3f}" in console.file.getvalue().splitlines()[-2]
    assert (tmp_path / "curves.svg").is_file() and result.report is None
    with safe_open(result.weights, framework="pt") as file:
        facts = json.loads(file.metadata()["vitrail-module"])
    assert facts["config"] == tomllib.loads((tmp_path / "config.toml").read_text())
    assert facts["config"]["optimizer"]["clip_grad_norm"] == 0.5 and facts["config"].keys() == {
        "kind", "optimizer", "schedule", "precision", "train"
    }  # fmt: skip


class Noisy(Dataset):
    """Samples with random augmentation from each generator that people use."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = torch.randn(5) + random.random() + float(np.random.rand())
        inputs, wanted = samples()[index]
        return {"inputs": inputs + 0.1 * noise, "wanted": wanted}


class Stops(Exception):
    pass


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, workers):
    settings = ("train.ema=0.9", "train.micro_batch_size=3", "optimizer.clip_grad_norm=1", "train.checkpoint_every=4")

    def by_name(network, batch):
        return loss(network, (batch["inputs"], batch["wanted"]))

    def run(folder, objective=by_name, module=None, **others):
        data = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=workers)
        module = net(dropout=0.3) if module is None else module
        vitrail.fit(module, objective, data, out=folder, overrides=(*STEPS, *settings), **others)
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

    with pytest.raises(Interrupted, match=r"stopped and saved; .*resume=True"):
        run(tmp_path / "parts", stopped, resume=True)
    resumed = run(tmp_path / "parts", module=nn.Sequential(*net(dropout=0.3)), resume=True)
    assert all(torch.equal(whole[name], tensor) for name, tensor in resumed.items())
    finished = run(tmp_path / "parts", stopped, resume=True)  # nothing is left to do
    assert all(torch.equal(whole[name], tensor) for name, tensor in finished.items())


def loader_with(kind: str) -> DataLoader:
    own = torch.Generator().manual_seed(5)
    if kind == "own generator":
        return DataLoader(Noisy(), batch_size=8, shuffle=True, generator=own)
    if kind == "own batches":
        return DataLoader(Noisy(), batch_sampler=BatchSampler(RandomSampler(Noisy(), generator=own), 8, False))
    return DataLoader(Noisy(), batch_size=8, shuffle=True)


@pytest.mark.parametrize("kind", ["plain", "own generator", "own batches"])
def test_a_source_gives_the_same_batches_from_any_start(kind):
    data = loader_with(kind)

    def first(place, seed=1, rank=0):
        return next(batches_from(data, place, seed, rank))["inputs"]

    stream = batches_from(data, 0, 1)
    expected = [next(stream)["inputs"] for _ in range(12)]
    torch.rand(3)
    for place in (0, 4, 5, 11):
        assert torch.equal(first(place), expected[place])
    others = [first(0, seed=2), first(0, rank=1), expected[5]]
    assert not any(torch.equal(other, expected[0]) for other in others)


def test_functions_and_iterators_as_sources():
    assert list(batches_from(lambda place: range(place, 9), 6, 0)) == [6, 7, 8]
    noise = [
        [next(batches_from(lambda place: ((random.random(), np.random.rand()) for _ in [0]), at, 0))]
        for at in (4, 4, 5)
    ]
    assert noise[0] == noise[1] != noise[2]
    once = resumable_source(iter(range(100)))
    stream = batches_from(once, 3, 0)
    assert [next(stream) for _ in range(3)] == [3, 4, 5]
    assert next(batches_from(once, 6, 0)) == 6  # it continues from its position, for a run that was rolled back
    sized = DataLoader(Numbers(), batch_size=3, num_workers=2)
    assert batches_per_epoch(sized) is None and batches_per_epoch(loader_with("plain")) == 5


class Numbers(IterableDataset):
    """An iterable dataset with a length of seven, shared among its workers."""

    def __len__(self) -> int:
        return 7

    def __iter__(self):
        return iter(range(7))


def test_samplers_get_the_epoch():
    heard = []

    class Source(list):
        def set_epoch(self, epoch):
            heard.append(epoch)

    stream = batches_from(Source([1, 2]), 3, 0)
    assert [next(stream) for _ in range(3)] == [2, 1, 2] and heard == [1, 2]


class Pair(NamedTuple):
    inputs: np.ndarray
    wanted: list[torch.Tensor]
    scale: torch.Tensor
    name: str


def test_batches_of_any_structure(tmp_path):
    """Arrays, and tensors in named tuples and lists; values that are not per sample go with every micro-batch."""
    inputs, wanted = samples().tensors
    batch = Pair(inputs.numpy(), [wanted], torch.tensor([1.0, 1.0, 2.0]), "all")
    seen = []
    batch = batch._replace(wanted=[wanted, [str(i) for i in range(40)]])

    def by_field(network, part):
        assert part.wanted[1][0] == str(sum(seen) % 40) and len(part.wanted[1]) == len(part.inputs)
        assert isinstance(part, Pair) and part.name == "all" and part.scale.shape == (3,)
        seen.append(len(part.inputs))
        return ((network(part.inputs) - part.wanted[0]) * part.scale).square().mean()

    overrides = ("train.steps=2", "train.micro_batch_size=16", "precision.compute=fp32")
    vitrail.fit(net(), by_field, [batch], out=tmp_path, overrides=overrides)
    assert seen == [16, 16, 8] * 2


def test_batches_keep_their_type():
    """Such as those of tokenizers, with entries as attributes; the batch size is that of most tensors."""

    class Encoded(UserDict):
        def __getattr__(self, name):
            return self.data[name]

    given = Encoded(scale=torch.ones(3), a=torch.zeros(8, 2), b=torch.zeros(8))
    batch = CustomBatch.from_content(given, torch.device("cpu"))
    assert len(batch) == 8 and batch.content.a.shape == (8, 2) and batch.content is not given
    part = batch.micro_batch(2, 7).content
    assert (part.a.shape, part.b.shape, part.scale.shape) == ((5, 2), (5,), (3,))


def test_memory_formats(tmp_path):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(3))
    images, wanted = torch.randn(8, 3, 6, 6), torch.randn(8, 3)
    with pytest.raises(UserError, match=r"'2.weight' is a lazy parameter"):
        go(tmp_path, module, [(images, wanted)])
    module(images)
    module.to(memory_format=torch.channels_last)
    result = go(tmp_path, module, [(images, wanted)])
    assert torch.equal(load_file(result.weights)["0.weight"], module[0].weight)


def test_float64_stays_float64(tmp_path):
    module, data = net().double(), [tuple(tensor.double() for tensor in samples().tensors)]
    result = go(tmp_path, module, data, "train.ema=0.9")
    stored = load_file(result.weights)["4.weight"]
    assert stored.dtype == torch.float64 and torch.equal(stored, module[4].weight)
    assert not torch.equal(stored, stored.float().double())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"\(16, 5\) float64 .*\(16, 5\) float32"):
        go(tmp_path, net(), data, "train.ema=0.9", resume=True)


class Tied(nn.Module):
    """Two layers that share a matrix."""

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
    result = go(tmp_path, module, DataLoader(samples(), batch_size=8), "train.ema=0.5", "train.ema_warmup=false")
    assert module.first.weight is module.second.weight
    stored = load_file(result.weights)
    assert torch.equal(stored["first.weight"], stored["second.weight"])
    assert torch.equal(stored["first.weight"], module.first.weight)
    assert not torch.equal(module.first.weight, Tied().first.weight)


def _plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 3))


def _thirds(rank: int | None) -> list[tuple[torch.Tensor, ...]]:
    """Batches of nine samples: six for the first process, three for the second."""
    rows = slice(None) if rank is None else slice(0, 6) if rank == 0 else slice(6, 9)
    return [tuple(tensor[i : i + 9][rows] for tensor in samples().tensors) for i in range(0, 36, 9)]


def _together(folder: str, how: str) -> None:
    rank = int(os.environ["RANK"])
    settings = ("optimizer.lr=0.01", "train.ema=0.5", f"train.parallel={how}")
    go(Path(folder), _plain(seed=rank), _thirds(rank), *settings)  # the weights of the first process count


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_train_like_one(tmp_path, how):
    processes.start(2, tmp_path, _together, str(tmp_path / "two"), how).results()
    alone = _plain(seed=0)
    go(tmp_path / "one", alone, _thirds(None), "optimizer.lr=0.01", "train.ema=0.5")
    stored = load_file(tmp_path / "two" / "model.safetensors")
    assert stored.keys() == alone.state_dict().keys()
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(stored[name], tensor, rtol=0, atol=1e-5, msg=name)


def _uneven(folder: str) -> None:
    settings = ("train.parallel=fsdp", "train.micro_batch_size=3")
    go(Path(folder), _plain(seed=0), _thirds(int(os.environ["RANK"])), *settings)


def _own_numbers(folder: str) -> float:
    """Only the second process has a NaN."""
    rank = int(os.environ["RANK"])
    result = go(
        Path(folder), _plain(seed=0), _thirds(rank), evaluate=lambda net: {"val_loss": math.nan if rank else 0.5}
    )
    return result.scores["val_loss"]


@pytest.mark.slow
def test_uneven_batches_are_refused_and_the_first_process_validates(tmp_path):
    uneven = processes.start(2, tmp_path, _uneven, str(tmp_path / "uneven"))
    assert uneven.codes() == [1, 1]
    assert "train.parallel=fsdp" in uneven.errors() and "train.micro_batch_size" in uneven.errors()
    assert processes.start(2, tmp_path, _own_numbers, str(tmp_path / "own")).results() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("train.steps=0",), "train.steps"),
        (("optimizer.lrr=1",), "did you mean 'optimizer.lr'"),
        (("data.holdout_fraction=0.5",), "data.holdout_fraction has no effect on your own module"),
        (("train.batch_size=4",), "train.batch_size has no effect"),
        (("optimizer.momentum=0.8",), "optimizer.momentum has no effect without optimizer.name=sgd or muon"),
        (("optimizer.name=muon",), r"optimizer\.name=muon .*optimizer\.name=adamw"),
        (("optimizer.layer_decay=0.5",), r"optimizer\.layer_decay=0\.5 .*Transformer blocks"),
        (("train.compile=graphs",), "use off or network"),
        (("train.compile=network", "train.parallel=fsdp"), r"train\.compile=network .*fsdp"),
        (("train.evaluate_every=2",), "without evaluate=FUNCTION"),
        (
            ("optimizer.name=sgd", "optimizer.weight_decay=0.1", "optimizer.weight_decay_scale=schedule"),
            "is for adamw and muon",
        ),
        (("train.compile=blocks",), "use off or network"),
        (("schedule.warmup=50",), "longer than the run of 12 steps"),
    ],
)
def test_invalid_settings(tmp_path, settings, words):
    with pytest.raises(UserError, match=words):
        go(tmp_path / "run", net(), DataLoader(samples(), batch_size=8), *settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_arguments_are_checked(tmp_path):
    data = DataLoader(samples(), batch_size=8)

    def refused(words, model=None, objective=loss, source=data, **others):
        others = {"out": tmp_path / "run", "overrides": STEPS, "overwrite": True} | others
        with pytest.raises(UserError, match=words):
            vitrail.fit(model or net(), objective, source, **others)

    refused("model must be a torch module, not str", model="S/16")
    refused("task must be a function, not NoneType", objective=None)
    refused("out=FOLDER", out=None)
    refused(r"steps=\d+", overrides=())
    refused("choose one", resume=True)
    refused("train.epochs needs batches with a length", source=(batch for batch in data), overrides=["train.epochs=2"])
    refused("wrap it in a DataLoader", source=samples())
    refused("batches .*not int", source=5)
    refused("must take one argument", source=lambda: iter(data))
    refused("task must be a function, not str", objective="mse")
    refused("evaluate must be a function, not dict", evaluate={})
    refused("task has parameters", objective=nn.Bilinear(1, 1, 1))
    refused("no parameter of the model requires a gradient", model=net().requires_grad_(False))
    refused("no parameter of the model", model=nn.ReLU())
    refused("is complex", model=nn.Linear(5, 3, dtype=torch.complex64))
    assert not (tmp_path / "run").exists()  # all of that is known before anything is written
    refused("gave no batches", source=[])
    refused("ended before step 6 of 12", source=iter(list(data)))
    refused("ended before step 6 of 12", source=lambda place: list(data)[place:])
    refused("batch .*tensors.* str", source=["words"])
    refused("task .*tensor of shape \\(8, 3\\)", objective=lambda n, b: n(b[0]))
    refused("task .*float", objective=lambda n, b: 0.5)
    refused("does not depend on the network", objective=lambda n, b: b[0].mean())
    refused("evaluate must return a dict", evaluate=lambda n: [0.3])
    refused("evaluate must not return 'loss'.* val_loss", evaluate=lambda n: {"loss": 0.3})


def test_the_old_call_of_train_works_with_a_warning(tmp_path):
    """`vitrail.train(model=MODULE, objective=, source=, evaluator=)` is `vitrail.fit`."""
    data, module, other = DataLoader(samples(), batch_size=8), net(), net()
    with pytest.warns(Note, match=r"vitrail\.fit"):
        old = vitrail.train(
            model=module, objective=loss, source=data, evaluator=mean_loss, out=tmp_path / "old", overrides=STEPS
        )
    new = vitrail.fit(other, loss, data, evaluate=mean_loss, out=tmp_path / "new", steps=12, precision="fp32")
    assert old.scores == new.scores
    assert all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    )
    with pytest.raises(UserError, match="needs model=MODULE, objective=LOSS and source=BATCHES"):
        vitrail.train(model=module, objective=loss, out=tmp_path / "old")
    with pytest.raises(UserError, match="takes its data from source"):
        vitrail.train("photos", model=module, objective=loss, source=data, out=tmp_path / "old")
    with pytest.raises(TypeError, match="'batch_size'"):
        vitrail.fit(module, loss, data, out=tmp_path / "more", batch_size=8)


def test_a_folder_holds_one_run(tmp_path):
    data, folder = DataLoader(samples(), batch_size=8), tmp_path / "run"
    go(folder, net(), data)
    with pytest.raises(UserError, match="already holds a finished run"):
        go(folder, net(), data)
    with pytest.raises(UserError, match=r"was started with optimizer.lr=0.001, not 0.5"):
        go(folder, net(), data, "optimizer.lr=0.5", resume=True)
    with pytest.raises(UserError, match=r"model\.safetensors does not fit this module"):
        go(folder, tied := Tied(), data, resume=True)
    kept = Tied().state_dict()
    assert all(
        torch.equal(before, after) for before, after in zip(kept.values(), tied.state_dict().values(), strict=True)
    )
    weights = folder / "model.safetensors"
    go(folder, net(), data, resume=True)  # a finished run is read
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        go(folder, net(), data, resume=True)
    weights.unlink()
    wider = net()
    wider[0] = nn.Linear(5, 17, bias=False)
    with pytest.raises(UserError, match=r"'model/0.weight' is \(16, 5\) float32 .*\(17, 5\) float32"):
        go(folder, wider, data, resume=True)
    with pytest.raises(UserError, match=r"resume it with vitrail\.fit"):
        vitrail.train(out=folder, resume=True)
    with pytest.raises(UserError, match=r"kind=custom .*vitrail\.fit"):
        vitrail.train(recipe=str(folder / "config.toml"), out=tmp_path / "other")


def test_files_that_vitrail_did_not_write_stay(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine.ckpt").write_text("x")
    for resume in (False, True):
        with pytest.raises(UserError, match="holds no run, but has 'checkpoints'"):
            go(tmp_path, net(), DataLoader(samples(), batch_size=8), resume=resume)
    (tmp_path / "model.safetensors").write_text("x")
    with pytest.raises(UserError, match=r"holds no run: .*config\.toml"):
        go(tmp_path, net(), DataLoader(samples(), batch_size=8), resume=True)
    assert (tmp_path / "checkpoints" / "mine.ckpt").is_file()


def test_automatic_choices_stay_after_a_resume(tmp_path, monkeypatch):
    data = DataLoader(samples(), batch_size=8)

    def run(amx, **others):
        monkeypatch.setattr(precision, "has_amx", lambda: amx)
        overrides = ["train.steps=2"]
        vitrail.fit(net(), loss, data, out=tmp_path, overrides=overrides, **others)

    run(False)
    (tmp_path / "model.safetensors").unlink()
    run(True, resume=True)
    assert tomllib.loads((tmp_path / "config.toml").read_text())["precision"]["compute"] == "fp32"


def test_a_signal_that_also_ends_the_source(tmp_path):
    """A signal to the process group also kills the workers of a DataLoader; the run still saves."""

    def source(place):
        for number in range(place, 20):
            if number == 5:
                signal.raise_signal(signal.SIGTERM)
                raise RuntimeError("a worker exited unexpectedly")
            yield samples().tensors

    with pytest.raises(Interrupted):
        go(tmp_path, net(), source, "train.checkpoint_every=12")
    assert max((tmp_path / "checkpoints").iterdir()).name == "step_000000005.safetensors"


def test_the_length_can_be_given_in_epochs(tmp_path):
    overrides = ["train.epochs=2.4", "precision.compute=fp32"]
    data = DataLoader(samples(), batch_size=8)
    vitrail.fit(net(), loss, data, out=tmp_path, overrides=overrides)
    assert tomllib.loads((tmp_path / "config.toml").read_text())["train"]["steps"] == 12
