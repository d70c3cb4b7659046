"""Import and everyday commands work without functions that Windows or macOS lack."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.commands.conftest import draw
from tests.other_systems import REFUSE_OPEN, not_while_open
from tests.small import SMALL
from vitrail.cli import main as command_line
from vitrail.data import scan
from vitrail.data.sources import shards
from vitrail.errors import UserError
from vitrail.interrupt import Interrupted, Interrupts
from vitrail.weights.safetensors_file import replace_metadata
from vitrail.workflows import run_folder

ROOT = Path(__file__).parents[1]


@pytest.fixture
def without(monkeypatch):
    def remove(module, *names):
        for name in names:
            monkeypatch.delattr(module, name, raising=False)

    return remove


@pytest.mark.slow
def test_everyday_commands_run_without_posix(tmp_path):
    draw(tmp_path / "photos" / "red", (200, 60, 60), 12)
    draw(tmp_path / "photos" / "blue", (60, 60, 200), 12)
    small = [word for setting in SMALL for word in ("--set", setting)]
    run = ["train", "photos", "--recipe", "scratch", "--out", "run", "--steps", "4", "--device", "cpu", *small]
    commands = [
        ["--version"],
        ["plan", "S/16"],
        ["recipes"],
        ["check", "photos"],
        [*run, "--workers", "2"],
        [*run, "--overwrite"],
        ["predict", "run", "photos", "--json", "--device", "cpu"],
        ["predict", "run", "photos", "--workers", "2", "--csv", "--device", "cpu"],
        ["evaluate", "run", "photos", "--write", "--device", "cpu"],
        ["explain", "run", "photos", "--measured", "0", "--shown", "1", "--device", "cpu"],
        ["convert", "run", "timm", "--to", "timm", "--adopt-constants"],
        ["convert", "timm", "back.safetensors", "--to", "vitrail"],
        ["pack", "photos", "packed"],
        ["fewshot", "back.safetensors", "packed", "--shots", "1", "--device", "cpu"],
    ]
    words = [sys.executable, "-m", "tests.other_systems", json.dumps(commands)]
    there = {**os.environ, "PYTHONPATH": str(ROOT), "VITRAIL_CACHE": str(tmp_path / "cache")}
    ended = subprocess.run(words, cwd=tmp_path, env=there, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    codes = json.loads(ended.stdout.splitlines()[-1])
    failed = [words for words, code in zip(commands, codes, strict=True) if code]
    assert not failed, ended.stderr
    assert sum(line.startswith("photos") for line in ended.stdout.splitlines()) >= 24  # the rows of --csv
    with safe_open(tmp_path / "run" / "model.safetensors", framework="pt") as file:
        assert any(name.endswith("head.weight") for name in list(file.keys()))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs a list of open files")
def test_a_header_is_replaced_where_open_files_cannot_be(monkeypatch, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"head.weight": torch.arange(6.0)}, path, metadata={"a": "1"})
    for name in REFUSE_OPEN:
        monkeypatch.setattr(os, name, not_while_open(getattr(os, name)))
    with path.open("rb"), pytest.raises(PermissionError):
        path.replace(tmp_path / "other")
    replace_metadata(path, {"a": "2"})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"a": "2"}
        assert torch.equal(file.get_tensor("head.weight"), torch.arange(6.0))


def test_signals_are_caught_without_pthread_sigmask(without):
    without(signal, "pthread_sigmask", "pthread_kill", "SIGHUP")
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            interrupts.check()


def test_a_broken_pipe_is_handled_without_poll(without):
    without(select, "poll")
    assert command_line._output_pipe_closed()


def test_cores_are_counted_without_an_affinity(without):
    without(os, "sched_getaffinity")
    assert scan.cores() == (os.cpu_count() or 1)


def test_a_folder_is_claimed_without_locks_and_flags(without, monkeypatch, tmp_path):
    monkeypatch.setattr(run_folder, "fcntl", None)
    without(os, "O_NOFOLLOW", "O_NONBLOCK")
    with run_folder.lock_run_folder(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / run_folder.LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError), run_folder.lock_run_folder(tmp_path / "run"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_rows_of_shards_are_read_without_pread(without, tmp_path):
    (tmp_path / "shard").write_bytes(bytes(range(100)))
    row = shards.ShardFiles("", {})._bytes
    before = row(str(tmp_path / "shard"), 10, 5)
    without(os, "pread")
    assert row(str(tmp_path / "shard"), 10, 5) == before == bytes(range(10, 15))
    assert np.frombuffer(before, np.uint8).sum() == 60
