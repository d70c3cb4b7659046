"""Errors of `vitrail convert`: exit code 2, one sentence, and no output left."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save_file

from tests.weights.configs import PATHS, SMALL, card_of, random_state
from vitrail.config import ModelConfig
from vitrail.weights.bundle import write_bundle

pytest.importorskip("timm")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Cyclopts application invoked")]

FIXTURES = Path(__file__).parents[1] / "fixtures"


def broken(folder: Path, case: str) -> Path:
    path = folder / "source.safetensors"
    match case:
        case "unknown":
            save_file({"layer1.weight": torch.zeros(2)}, path)
        case "text":
            path.write_text("hello, this is no weights file at all")
        case "truncated":
            write_bundle(path, random_state(ModelConfig(**SMALL)), card_of(ModelConfig(**SMALL)))
            path.write_bytes(path.read_bytes()[:-5])
        case "truncated npz":
            path.write_bytes((FIXTURES / "google_vit_gap.npz").read_bytes()[:-50])
        case "long header":
            with open(path, "wb") as file:
                file.write((200_000_000).to_bytes(8, "little"))
                file.truncate(200_000_100)
        case "pickle":
            torch.save({"a": torch.zeros(2)}, path)
        case "pickle in an npz":
            with open(path, "wb") as file:
                np.savez(file, cls=np.array([{"a": 1}], dtype=object))
        case "zip bomb":
            zeros = np.zeros(200_000_000, np.int8)
            with open(path, "wb") as file:
                np.savez_compressed(file, cls=zeros)
        case "image":
            Image.new("RGB", (32, 32), "red").save(path, "JPEG")
        case "folder":
            path.mkdir()
            (path / "notes.txt").touch()
        case "missing":
            pass
    return path


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("unknown", "no known layout"),
        ("text", "not a safetensors file"),
        ("truncated", "damaged"),
        ("truncated npz", "truncated zip"),
        ("long header", "not a safetensors file.* truncated"),
        ("pickle", "pickle.*--allow-pickle"),
        ("pickle in an npz", "Python objects.* pickle"),
        ("zip bomb", "200,000,128 bytes"),
        ("image", "not a safetensors file.* truncated"),
        ("folder", "no weights file"),
        ("missing", "no weights at"),
    ],
)
@pytest.mark.parametrize("to", ["vitrail", "timm"])
def test_files_without_readable_weights(tmp_path, convert, case, expected, to):
    source = broken(tmp_path, case)
    before = list(tmp_path.iterdir())
    code, _, error = convert(source, tmp_path / PATHS[to].format("target"), "--to", to)
    assert code == 2 and re.search(expected, error) and error.startswith("error: ") and error.count("error:") == 1
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("target", "to", "expected"),
    [
        ("out", "vitrail", "--to vitrail .*safetensors"),
        ("out.npz", "vitrail", "safetensors"),
        ("out.safetensors", "google", "npz"),
        ("out.safetensors", "timm", "--to timm .*folder"),
        ("nowhere/out.npz", "google", "nowhere' does not exist"),
        ("ours.safetensors", "vitrail", "is the input"),
        ("full", "timm", "full' .*not written by vitrail convert"),
        ("exists.npz", "google", "exists.* --overwrite"),
        ("folder.npz", "google", "folder.npz' .*not written by vitrail convert"),
        ("circle", "timm", "symbolic link"),
    ],
)
def test_invalid_output_paths(tmp_path, convert, vitrail_file, target, to, expected):
    source = vitrail_file()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.doc").touch()
    (tmp_path / "exists.npz").write_text("before")
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    flags = ["--overwrite"] if "not written" in expected else []
    code, _, error = convert(source, tmp_path / target, "--to", to, *flags)
    assert code == 2 and re.search(expected, error) and not list(tmp_path.glob(".*"))
    assert (tmp_path / "exists.npz").read_text() == "before" and (tmp_path / "full" / "thesis.doc").exists()


@pytest.mark.parametrize(
    ("target", "expected"),
    [("", "not a valid output path"), (".", "not a valid output path"), ("x" * 300, "File name too long")],
)
def test_invalid_specs(tmp_path, convert, vitrail_file, monkeypatch, target, expected):
    source = vitrail_file()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for flags in ([], ["--overwrite"]):
        code, _, error = convert(source, target, "--to", "timm", *flags)
        assert code == 2 and expected in error and not list((tmp_path / "empty").iterdir())


def test_a_link_is_not_replaced(tmp_path, convert, vitrail_file):
    source = vitrail_file()
    assert convert(source, tmp_path / "real", "--to", "timm")[0] == 0
    (tmp_path / "link").symlink_to(tmp_path / "real")
    code, _, error = convert(source, tmp_path / "link", "--to", "timm", "--overwrite")
    assert code == 2 and "symbolic link" in error and (tmp_path / "link").is_symlink()


def test_pages_of_evaluate_are_replaced_with_the_weights(tmp_path, convert, vitrail_file):
    source = vitrail_file()
    assert convert(source, tmp_path / "timm", "--to", "timm")[0] == 0
    (tmp_path / "timm" / "evaluation-photos.html").touch()
    assert convert(source, tmp_path / "timm", "--to", "timm", "--overwrite")[0] == 0


def test_representation_layer_without_equivalent(tmp_path, convert, vitrail_file):
    code, _, error = convert(vitrail_file(representation=48, num_classes=0), tmp_path / "timm", "--to", "timm")
    assert code == 2 and "vitrail train --from" in error


def test_an_unknown_layout(tmp_path, convert, vitrail_file):
    source = vitrail_file()
    code, _, error = convert(source, tmp_path / "target", "--to", "tim")
    assert code == 2 and 'Choose from: "vitrail", "timm", "huggingface"' in error
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("to", ["vitrail", "timm", "huggingface", "google"])
def test_a_target_inside_the_source(tmp_path, convert, vitrail_file, to):
    (tmp_path / "run").mkdir()
    source = vitrail_file().rename(tmp_path / "run" / "model.safetensors")
    for spec in (tmp_path / "run", tmp_path / "link"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / "run")
        code, _, error = convert(spec, tmp_path / "run" / PATHS[to].format("target"), "--to", to)
        assert code == 2 and "inside the input folder" in error
    assert list((tmp_path / "run").iterdir()) == [source]


@pytest.mark.parametrize("source", ["folder", "folder/model.safetensors", "./folder/../folder"])
def test_a_source_that_would_be_overwritten(tmp_path, convert, vitrail_file, source):
    folder = tmp_path / "folder"
    assert convert(vitrail_file(), folder, "--to", "timm")[0] == 0
    before = {path: path.read_bytes() for path in folder.iterdir()}
    code, _, error = convert(f"{tmp_path}/{source}", folder, "--to", "huggingface", "--overwrite")
    verb = "contains" if source.endswith("safetensors") else "is"
    assert code == 2 and f"'{folder}' {verb} the input" in error
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("to", ["vitrail", "timm", "huggingface", "google"])
def test_output_path_without_permission(tmp_path, convert, vitrail_file, monkeypatch, to):
    """The permission error is simulated, since root can write anywhere."""

    def refuse(path: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    source = vitrail_file()
    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    code, _, error = convert(source, tmp_path / PATHS[to].format("target"), "--to", to)
    assert code == 2 and re.fullmatch(r"error: cannot write '\S+': Permission denied", error)
    assert list(tmp_path.iterdir()) == [source]


FULL = "No space left on device"
WRITERS = {
    "vitrail": "safetensors.torch.save_file",
    "timm": "safetensors.torch.save_file",
    "huggingface": "safetensors.torch.save_file",
    "google": "numpy.savez",
}


@pytest.mark.parametrize(
    "problem",
    [OSError(errno.ENOSPC, FULL), SafetensorError(FULL), KeyboardInterrupt()],
    ids=["os", "library", "ctrl-c"],
)
@pytest.mark.parametrize("to", list(WRITERS))
def test_a_failed_write_leaves_nothing(tmp_path, convert, vitrail_file, monkeypatch, to, problem):
    """Partly written files are deleted too."""

    def fail(*args: object, **kwargs: object) -> None:
        for path in tmp_path.glob(".*"):
            (path / "half" if path.is_dir() else path).write_bytes(b"half")
        raise problem

    source = vitrail_file()
    monkeypatch.setattr(WRITERS[to], fail)
    code, _, error = convert(source, tmp_path / PATHS[to].format("target"), "--to", to)
    assert code == 130 if isinstance(problem, KeyboardInterrupt) else code == 2 and FULL in error
    assert list(tmp_path.iterdir()) == [source]


def test_sigterm_while_a_library_loads_what_was_written(tmp_path, convert, vitrail_file, monkeypatch):
    source = vitrail_file()
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("timm.create_model", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    for to in ("timm", "google"):
        assert convert(source, tmp_path / PATHS[to].format("target"), "--to", to, "--adopt-constants")[0] == 143
        assert list(tmp_path.iterdir()) == [source] and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle(tmp_path, vitrail_file, number):
    """A real process, interrupted while it compares outputs, leaves no files behind."""
    source = vitrail_file(width=384, heads=6, depth=12, mlp_dim=1536, image_size=(224, 224))
    target = tmp_path / "target"
    command = [sys.executable, "-m", "vitrail", "convert", str(source), str(target), "--to", "huggingface"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ})
    deadline = time.time() + 60
    while time.time() < deadline and not list(tmp_path.glob(".target.*")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == [source]
