"""The progress of a run: TFLOP/s, lines that fit the terminal, time left, and TensorBoard files."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vitrail.errors import UserError
from vitrail.models.estimate import peak_flops
from vitrail.training import progress as module
from vitrail.training.progress import MetricsLog, TrainingProgress, downsample_curves, read_metrics
from vitrail.training.tensorboard import TensorBoardWriter

ROW = {
    "step": 1200,
    "loss": 1.2345,
    "accuracy": 0.712,
    "lr": 3e-4,
    "images_per_second": 4000.0,
    "data_wait": 0.01,
    "grad_norm": 0.9,
}
FLOPS = 6 * 17.17e9  # per image: 412 TFLOP/s at 4000 images/s


class Clock:
    """A clock that tests set."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def make_progress(width: int = 120, *, terminal: bool = False, metrics: MetricsLog | None = None, **options: Any):
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=terminal, highlight=False, soft_wrap=not terminal)
    return TrainingProgress(console, metrics, 120_000, 0, **options), text


def live_line(progress: TrainingProgress, text: io.StringIO) -> str:
    """The live line as last drawn, without colours."""
    progress.bar.refresh()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()][-1].rstrip()


def test_training_rows_have_tflops(tmp_path: Path) -> None:
    metrics = MetricsLog(tmp_path / "m.jsonl", 0)
    with make_progress(metrics=metrics, flops_per_image=FLOPS, peak=8 * 989e12)[0] as progress:
        progress.log(ROW)
        progress.log({"step": 1200, "val_loss": 1.0, "val_top1": 0.5})
    trained, measured = read_metrics(tmp_path / "m.jsonl")
    assert trained == {**ROW, "tflops": 412.1, "peak_share": round(4000 * FLOPS / (8 * 989e12), 4)}
    assert measured == {"step": 1200, "val_loss": 1.0, "val_top1": 0.5}


@pytest.mark.parametrize(
    ("flops", "peak", "shown"),
    [
        (FLOPS, 989e12, "412 TFLOP/s (42 % of peak)"),
        (FLOPS, None, "412 TFLOP/s"),
        (FLOPS / 1e4, None, "0.041 TFLOP/s"),
        (FLOPS / 100, None, "4.1 TFLOP/s"),
    ],
)
def test_tflops_are_shown(flops: float, peak: float | None, shown: str) -> None:
    progress, text = make_progress(flops_per_image=flops, peak=peak)
    with progress:
        progress.last_plain = -math.inf
        progress.log(ROW)
    assert text.getvalue() == f"step 1200/120000  loss 1.234  train 71.2%  lr 0.0003  4000 images/s  {shown}\n"


def test_a_non_finite_number_is_written_as_null(tmp_path: Path) -> None:
    with make_progress(metrics=MetricsLog(tmp_path / "m.jsonl", 0))[0] as progress:
        progress.log({**ROW, "grad_norm": math.inf})
    written = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)
    assert written["grad_norm"] is None and written["loss"] == ROW["loss"]


def test_events_are_printed_at_once_and_written(tmp_path: Path) -> None:
    progress, text = make_progress(metrics=MetricsLog(tmp_path / "m.jsonl", 0))
    with progress:
        progress.log({"step": 7, "event": "skipped 3 steps [1, 2, 3]"})
    assert text.getvalue() == "step 7: skipped 3 steps [1, 2, 3]\n"
    assert read_metrics(tmp_path / "m.jsonl")[0]["event"] == "skipped 3 steps [1, 2, 3]"


def test_plain_lines_are_printed_every_30_seconds_with_the_time_left(clock: Clock) -> None:
    progress, text = make_progress()
    with progress:
        clock.now += 500  # the first step compiles; its duration does not count
        for step in range(1, 2001):
            progress.step(step)
            if step % 100 == 0:
                progress.log({**ROW, "step": step})
            clock.now += 0.1
        progress.log({"step": 2000, "val_loss": 1.0, "val_accuracy": 0.25})
    lines = text.getvalue().splitlines()
    # One row every 10 s: the first comes late, then each that is more than 30 s after the last, and the validation.
    assert [int(line.split("/")[0].removeprefix("step ")) for line in lines] == [100, 500, 900, 1300, 1700, 2000]
    assert all(line.endswith(" h left") for line in lines[:-1])
    assert lines[-1].endswith("val patches 25.0%  lr 0.0003  4000 images/s  3.3 h left")  # 118,000 steps of 0.1 s


def test_rewind_deletes_metrics_but_keeps_events(tmp_path: Path, clock: Clock) -> None:
    progress, _ = make_progress(metrics=MetricsLog(tmp_path / "m.jsonl", 0))
    with progress:
        for step in (10, 20, 30):
            progress.step(step)
            progress.log({**ROW, "step": step})
            clock.now += 5
        progress.log({"step": 30, "event": "a step was skipped"})
        progress.rewind(15)
        assert progress.time_left == ""
        for step in (16, 21):
            progress.step(step)
            clock.now += 5
        progress.log({**ROW, "step": 21})
    assert progress.time_left == "33.3 h left"  # 119,979 steps, 5 in 5 s
    rows = [(row["step"], "event" in row) for row in read_metrics(tmp_path / "m.jsonl")]
    assert rows == [(10, False), (30, True), (21, False)]


@pytest.mark.parametrize(
    ("seconds", "words"), [(5, "5 s"), (99, "99 s"), (720, "12 min"), (7200, "2.0 h"), (1e6, "11.6 days")]
)
def test_durations(seconds: float, words: str) -> None:
    assert module._duration(seconds) == words


def test_the_live_line_fits_the_terminal_and_drops_the_least_important_fields(clock: Clock) -> None:
    everything = ["loss 1.234", "train 71.2%", "val 68.0%", "lr 0.0003", "4000 images/s", "412 TFLOP/s (42 %"]
    expected = {200: [*everything, "% of peak)"], 120: everything, 100: [*everything[:1], everything[2]], 60: []}
    for width, shown in expected.items():
        progress, text = make_progress(width, terminal=True, flops_per_image=FLOPS, peak=989e12)
        with progress:
            progress.step(1000)
            clock.now += 10
            progress.step(1200)
            progress.log(ROW)
            progress.log({"step": 1200, "val_loss": 1.0, "val_top1": 0.68})
            line = live_line(progress, text)
        assert len(line) <= width and "…" not in line
        assert "1200/120000" in line.replace(" ", "") and "loss 1.234" in line and line.endswith("99 min left")
        assert all(part in line for part in shown), line


def test_data_wait_is_kept_and_the_learning_rate_dropped() -> None:
    progress, text = make_progress(120, terminal=True, flops_per_image=FLOPS, peak=989e12)
    with progress:
        progress.log({**ROW, "data_wait": 0.4})
        progress.log({"step": 1200, "val_loss": 1.0, "val_top1": 0.68})
        line = live_line(progress, text)
    assert "data wait 40 %" in line and "lr" not in line and len(line) <= 120


def test_a_quiet_console_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingProgress(Console(quiet=True, force_terminal=True), None, 10, 0) as progress:
        progress.step(1)
        progress.log({**ROW, "step": 1})
        progress.log({"step": 1, "event": "skipped"})
        progress.message("hello")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("device", "teraflops"),  # dense bfloat16, from the data sheets
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 5090", 209),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 3090", 71),
    ],
)
def test_peak_flops_by_device_name(device: str, teraflops: int) -> None:
    assert peak_flops(device) == teraflops * 1e12


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        "",
        "NVIDIA L40",
        "NVIDIA A10G",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "AMD Instinct MI300X",
    ],
)
def test_peak_flops_of_other_devices_is_unknown(device: str) -> None:
    assert peak_flops(device) is None


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns about every rolled-back step
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()["scalars"]
    return {tag: [(event.step, round(event.value, 5)) for event in found.Scalars(tag)] for tag in tags}


def test_tensorboard_reads_the_logged_metrics(tmp_path: Path) -> None:
    options = {"flops_per_image": FLOPS, "peak": 989e12}
    with make_progress(tensorboard=TensorBoardWriter(tmp_path), **options)[0] as progress:
        progress.log({**ROW, "step": 10, "grad_norm": math.inf})
        progress.log({"step": 10, "val_loss": 1.5, "val_top1": 0.25})
        progress.log({"step": 12, "event": "a step was skipped"})
        progress.log({**ROW, "step": 20, "loss": 1.0})
    found = scalars(tmp_path)
    assert found["train/loss"] == [(10, 1.2345), (20, 1.0)]
    assert found["train/accuracy"] == [(10, 0.712), (20, 0.712)]
    assert found["train/learning_rate"] == [(10, 0.0003), (20, 0.0003)]
    assert found["train/gradient_norm"] == [(20, 0.9)]
    assert found["speed/images_per_second"][0] == (10, 4000.0)
    assert found["speed/tflops"][0] == (10, pytest.approx(412.1, abs=0.01))
    assert found["speed/share_of_peak"][0] == (10, pytest.approx(0.4167, abs=1e-4))
    assert found["val/loss"] == [(10, 1.5)] and found["val/top1"] == [(10, 0.25)]


def test_tensorboard_shows_no_step_twice_after_a_resume_or_a_rollback(tmp_path: Path) -> None:
    def write(events: TensorBoardWriter, steps: range, loss: float) -> None:
        for step in steps:
            events.write({"step": step, "loss": loss})

    first = TensorBoardWriter(tmp_path)
    write(first, range(1, 8), 1.0)
    first.close()
    second = TensorBoardWriter(tmp_path, start=5)  # the checkpoint of step 5: 6 and 7 come again
    write(second, range(6, 10), 2.0)
    second.rewind(7)
    write(second, range(8, 11), 3.0)
    second.close()
    expected = [*((step, 1.0) for step in range(1, 6)), (6, 2.0), (7, 2.0), (8, 3.0), (9, 3.0), (10, 3.0)]
    assert scalars(tmp_path)["train/loss"] == expected


def test_a_missing_tensorboard_package_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(UserError, match=r"need the package tensorboard: pip install 'vitrail\[tensorboard\]'"):
        TensorBoardWriter(tmp_path / "events")
    assert not (tmp_path / "events").exists()


def test_an_unwritable_folder_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*file"):
        TensorBoardWriter(tmp_path / "file")


@pytest.mark.slow
def test_event_files_are_written_without_tensorflow_and_without_output(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; sys.modules['tensorflow'] = None\n"
        "from vitrail.training.tensorboard import TensorBoardWriter\n"
        f"writer = TensorBoardWriter(pathlib.Path({str(tmp_path)!r}))\n"
        "writer.write({'step': 1, 'loss': 2.0}); writer.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert scalars(tmp_path) == {"train/loss": [(1, 2.0)]}


def test_the_curves_of_a_long_run_are_means_over_equal_intervals() -> None:
    rows: list[dict[str, object]] = [{"step": step, "loss": float(step), "lr": 0.5} for step in range(1, 601)]
    rows[4]["loss"] = None  # not finite
    rows += [{"step": 300, "event": "back"}, {"step": 300, "val_top1": 0.25}, {"step": 600, "val_top1": 0.75}]
    points = downsample_curves(rows)
    assert points[0] == {"step": 10, "loss": 5.5556, "lr": 0.5}  # 1 to 10 without 5
    assert points[59] == {"step": 600, "loss": 595.5, "lr": 0.5}
    assert points[60:] == [{"step": 300, "val_top1": 0.25}, {"step": 600, "val_top1": 0.75}]
    assert downsample_curves([]) == []
