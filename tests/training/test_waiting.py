"""The fraction of time that training waits for data: measured, shown, and a reason for advice, once."""

from __future__ import annotations

import io
import time

import pytest
import torch
from rich.console import Console

from tests.data.images import MemorySource
from vitrail.config import AugmentConfig, DataConfig, Preprocess
from vitrail.data.loader import memory as memory_module
from vitrail.data.loader.cache import PixelCache
from vitrail.data.loader.loader import training_loader
from vitrail.data.loader.reader import Reader
from vitrail.training.progress import MetricsLog, TrainingProgress, read_metrics
from vitrail.training.step import StepResult
from vitrail.training.throughput import Throughput

ONE = torch.tensor(1.0)
DONE = StepResult(loss=ONE, correct=ONE, weight=ONE, grad_norm=ONE, finite=torch.tensor(True))


def test_data_wait_is_the_fraction_of_time_spent_waiting_for_items():
    def slow():
        for number in range(6):
            time.sleep(0.03)
            yield number

    throughput, seen = Throughput(), []
    for number in throughput.timed(slow()):
        seen.append(number)
        time.sleep(0.01)
        throughput.add(DONE, 4)
    row = throughput.summary()
    assert seen == list(range(6))
    assert row["data_wait"] == pytest.approx(0.75, abs=0.1)
    throughput.add(DONE, 4)
    assert throughput.summary()["data_wait"] == 0  # reset by each summary


def test_pauses_do_not_count():
    throughput = Throughput()
    for _ in throughput.timed([1]):
        with throughput.paused():
            time.sleep(0.05)
        time.sleep(0.02)
    throughput.add(DONE, 1)
    assert throughput.summary()["images_per_second"] > 20


def logged(tmp_path, waits, advise_after=0, advice="buy a faster disk", every=10):
    text = io.StringIO()
    with TrainingProgress(Console(file=text, width=200), MetricsLog(tmp_path / "m.jsonl", 0), 1000, 0) as progress:
        progress.advise(advice, advise_after)
        for number, wait in enumerate(waits, 1):
            row = {"step": number * every, "loss": 1.0, "images_per_second": 9.0, "data_wait": wait, "lr": 0.1}
            progress.last_plain = 0.0  # a line for every row
            progress.log(row)
    return text.getvalue()


def test_data_wait_is_logged_and_shown_if_large(tmp_path):
    text = logged(tmp_path, [0.05, 0.35, 0.02])
    assert [row["data_wait"] for row in read_metrics(tmp_path / "m.jsonl")] == [0.05, 0.35, 0.02]
    assert [("data wait 35 %" in line, "data wait" in line) for line in text.splitlines()] == [
        (False, False),
        (True, True),
        (False, False),
    ]


def test_advice_is_printed_once_and_not_at_the_start(tmp_path):
    assert logged(tmp_path, [0.9] * 5).count("faster disk") == 0  # the first 50 steps may be slow
    text = logged(tmp_path, [0.9] * 12)
    assert sum("90 %" in line and "buy a faster disk" in line for line in text.splitlines()) == 1
    assert text.count("faster disk") == 1
    assert logged(tmp_path, [0.9] * 12, advise_after=200).count("faster disk") == 0
    assert logged(tmp_path, [0.9, 0.1] * 10).count("faster disk") == 0  # occasional waits are normal
    assert logged(tmp_path, [0.25] * 20).count("faster disk") == 0


@pytest.mark.parametrize(
    ("workers", "keep", "memory", "advice"),
    [
        (2, False, 10**9, "--set data.workers=4"),
        (4, False, 10**9, "--set data.cache=memory"),
        (4, False, 0, "vitrail pack photos OUT --resize 256"),
        (4, True, 10**9, "vitrail pack photos OUT --resize 256"),
    ],
)
def test_advice_names_the_remedy(monkeypatch, workers, keep, memory, advice):
    monkeypatch.setattr(memory_module, "cores", lambda: 4)
    monkeypatch.setattr(memory_module, "available_memory", lambda: memory)
    source, spec = MemorySource.noise(6), Preprocess(size=(224, 224))
    reader = Reader(source, spec, 10**6, PixelCache(source.areas, 3) if keep else None)
    loader = training_loader(reader, 2, AugmentConfig(), 0, workers, torch.device("cpu"))
    assert advice in memory_module.data_wait_advice(loader, source, spec, DataConfig(path="photos"))
