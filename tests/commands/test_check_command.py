"""`vitrail check` and `--quarantine`, from the command line and from Python."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import tomllib
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bench.planted import encode, generated
from tests.commands.conftest import vitrail
from tests.data.folders import fill
from tests.small import SMALL
from vitrail.commands.check import check
from vitrail.commands.evaluate import evaluate
from vitrail.data import scan
from vitrail.data.decode import decode
from vitrail.data.quarantine import Quarantine
from vitrail.errors import UserError
from vitrail.interrupt import Interrupted
from vitrail.workflows.train_run import train

DATA = [encode(photo, "PNG") for photo in generated(40, (40, 50))]


@pytest.fixture
def leaky(tmp_path: Path) -> Path:
    files = [f"{split}/{label}/{i}.png" for split in ("train", "test") for label in "ab" for i in range(8)]
    contents = dict(zip(files, DATA, strict=False))
    contents |= {"train/a/leak.png": contents["test/a/0.png"], "train/b/cut.png": DATA[39][:150]}
    return fill(tmp_path / "data", contents)


def output(call: object, *arguments: object, **options: object) -> str:
    file = io.StringIO()
    call(*arguments, **options, console=Console(file=file, width=300, highlight=False))  # type: ignore[operator]
    return file.getvalue()


def test_files_and_console_output(leaky: Path, tmp_path: Path) -> None:
    out = tmp_path / "checked"
    text = output(check, leaky, out=out)
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0].endswith("34 images in 2 classes (18 train, 16 test)")
    assert lines[1].startswith("leak     1 image in more than one split")
    assert lines[-1] == f"next: vitrail train {leaky} --quarantine {out}/quarantine.csv"
    assert {path.name for path in out.iterdir()} == {"report.html", "report.json", "quarantine.csv"}
    assert Quarantine.read(out / "quarantine.csv").digests.keys() == {"train/a/leak.png", "train/b/cut.png"}
    assert json.loads((out / "report.json").read_text())["severe"] is True
    (leaky / "train/b/cut.png").unlink()
    (leaky / "train/a/leak.png").unlink()
    text = output(check, leaky, out=out)
    assert text.splitlines()[-1] == f"next: vitrail train {leaky}"
    assert Quarantine.read(out / "quarantine.csv").digests == {}
    assert {path.name for path in out.iterdir()} == {"report.html", "report.json", "quarantine.csv"}


def test_an_out_folder_that_cannot_be_written(leaky: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="cannot write to"):
        check(leaky, out=tmp_path / "file" / "x", console=Console(file=io.StringIO()))


@pytest.mark.slow
def test_training_and_resuming_exclude_the_listed_images(
    leaky: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output(check, leaky, out=tmp_path / "checked")
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    text = output(train, leaky, out=run, quarantine="checked/quarantine.csv", overrides=(*SMALL, "train.steps=2"))
    assert "Skipped 1 image listed in 'checked/quarantine.csv'." in text
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["data"]["quarantine"] == str(tmp_path / "checked" / "quarantine.csv")
    monkeypatch.chdir("/")
    (run / "model.safetensors").unlink()  # as if the run had been stopped
    text = output(train, out=run, resume=True)
    assert re.search(r"resuming .* from step", text)
    (run / "model.safetensors").unlink()
    quarantine = tmp_path / "checked" / "quarantine.csv"
    quarantine.write_text("\n".join(line for line in quarantine.read_text().splitlines() if "leak" not in line) + "\n")
    with pytest.raises(UserError, match=r"images .* have changed since"):
        output(train, out=run, resume=True)
    other = tmp_path / "other.csv"
    other.write_text(quarantine.read_text())
    with pytest.raises(UserError, match=r"was started with data.quarantine=.*quarantine.csv, not .*other.csv"):
        output(train, out=run, resume=True, quarantine=other)


@pytest.mark.slow
def test_evaluating_excludes_the_listed_images(leaky: Path, tmp_path: Path) -> None:
    shutil.copy(leaky / "test/a/0.png", leaky / "test/b/again.png")  # a conflict, in the test split too
    output(check, leaky, out=tmp_path / "checked")
    quarantine = tmp_path / "checked" / "quarantine.csv"
    output(train, leaky, out=tmp_path / "run", quarantine=quarantine, overrides=(*SMALL, "train.steps=2"))
    with open(os.devnull, "w") as devnull:
        console = Console(file=devnull)
        options = {"report": tmp_path / "page.html", "console": console}
        assert evaluate(tmp_path / "run", leaky, quarantine=quarantine, **options).n == 15
        assert f"--quarantine {quarantine}" in (tmp_path / "page.html").read_text()
        assert evaluate(tmp_path / "run", leaky, **options).n == 17


@pytest.mark.slow
def test_the_command_line(leaky: Path, tmp_path: Path) -> None:
    done = vitrail("check", leaky, "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "checks/data/report.json").read_text())
    assert done.stderr.splitlines()[-1].startswith("next: vitrail train ")
    (leaky / "train/b/cut.png").unlink()
    (leaky / "train/a/leak.png").unlink()
    done = vitrail("check", leaky, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "No leaks" in done.stdout
    done = vitrail("check", tmp_path / "dta")
    assert done.returncode == 2
    assert "/data'?" in " ".join(done.stderr.split())
    done = vitrail("train", leaky, "--quarantine", tmp_path / "nowhere.csv")
    assert done.returncode == 2
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_stopped_check_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the scan writes only the scan cache."""
    fill(tmp_path / "data", {f"{label}/{i}.png": DATA[i % 40] + bytes([i]) for label in "ab" for i in range(100)})
    opened = 0

    def counted(data: bytes, **options: int) -> np.ndarray:
        nonlocal opened
        opened += 1
        if opened == 100:
            signal.raise_signal(signal.SIGINT)
        return decode(data, **options)

    monkeypatch.setattr(scan, "decode", counted)
    monkeypatch.setattr(scan, "cores", lambda: 1)
    with pytest.raises(Interrupted, match=r"^stopped; .*resume"):
        output(check, tmp_path / "data", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    before, opened = opened, 1000
    output(check, tmp_path / "data", out=tmp_path / "out")
    assert opened - 1000 <= 200 - 64  # progress is reported every 32 images
    assert before <= 200
