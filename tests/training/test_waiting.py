"""The share of time that training waits for data: measured, shown, and advised on once."""

from __future__ import annotations

import io
import time

import pytest
import torch
from rich.console import Console

from tests.data.images import MemorySource
from vitrail.config import AugmentConfig, DataConfig, Preprocess
from vitrail.data.loader import memory as outputs
from vitrail.data.loader.cache import PixelCache
from vitrail.data.loader.loader import training_loader
from vitrail.data.loader.reader import Reader
from vitrail.training.progress import MetricsLog, TrainingProgress, read_metrics
from vitrail.training.step import StepResult
from vitrail.training.throughput import Throughput

ONE = torch.tensor(1.0)
DONE = StepResult(loss=ONE, correct=ONE, weight=ONE, grad_norm=ONE, finite=torch.tensor(True))


def test_the_share_is_that_of_the_time_between_items():
    def slow():
        for number in range(6):
            time.sleep(0.03)
            yield number

    pace, seen = Throughput(), []
    for number in pace.timed(slow()):
        seen.append(number)
        time.sleep(0.01)
        pace.add(DONE, 4)
    row = pace.summary()
    assert seen == list(range(6))
    assert row["data_wait"] == pytest.approx(0.75, abs=0.1)
    pace.add(DONE, 4)
    assert pace.summary()["data_wait"] == 0  # counted anew after each log


def test_pauses_are_not_waiting_and_not_training():
    pace = Throughput()
    for _ in pace.timed([1]):
        with pace.paused():
            time.sleep(0.05)
        time.sleep(0.02)
    pace.add(DONE, 1)
    assert pace.summary()["images_per_second"] > 20


def logged(tmp_path, waits, settled=0, advice="buy a faster disk", every=10):
    text = io.StringIO()
    with TrainingProgress(Console(file=text, width=200), MetricsLog(tmp_path / "m.jsonl", 0), 1000, 0) as progress:
        progress.advise(advice, settled)
        for number, wait in enumerate(waits, 1):
            row = {"step": number * every, "loss": 1.0, "images_per_second": 9.0, "data_wait": wait, "lr": 0.1}
            progress.last_plain = 0.0  # a line for every row
            progress.log(row)
    return text.getvalue()


def test_waiting_is_written_and_shown_where_it_matters(tmp_path):
    text = logged(tmp_path, [0.05, 0.35, 0.02])
    assert [row["data_wait"] for row in read_metrics(tmp_path / "m.jsonl")] == [0.05, 0.35, 0.02]
    assert [("data wait 35 %" in line, "data wait" in line) for line in text.splitlines()] == [
        (False, False),
        (True, True),
        (False, False),
    ]


def test_advice_comes_once_and_not_at_the_start(tmp_path):
    assert logged(tmp_path, [0.9] * 5).count("faster disk") == 0  # 50 steps: all may be the start
    text = logged(tmp_path, [0.9] * 12)
    assert text.count("Training waits for images 90 % of its time; buy a faster disk") == 1
    assert logged(tmp_path, [0.9] * 12, settled=200).count("faster disk") == 0
    assert logged(tmp_path, [0.9, 0.1] * 10).count("faster disk") == 0  # now and then is no habit
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
def test_advice_is_what_would_help(monkeypatch, workers, keep, memory, advice):
    monkeypatch.setattr(outputs, "cores", lambda: 4)
    monkeypatch.setattr(outputs, "available_memory", lambda: memory)
    source, spec = MemorySource.noise(6), Preprocess(size=(224, 224))
    reader = Reader(source, spec, 10**6, PixelCache(source.areas, 3) if keep else None)
    loader = training_loader(reader, 2, AugmentConfig(), 0, workers, torch.device("cpu"))
    assert advice in outputs.data_wait_advice(loader, source, spec, DataConfig(path="photos"))
