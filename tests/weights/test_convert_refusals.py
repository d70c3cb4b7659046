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

from tests.weights.configs import PLACES, SMALL, card_of, random_state
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
        case "picture":
            Image.new("RGB", (32, 32), "red").save(path, "JPEG")
        case "folder":
            path.mkdir()
            (path / "notes.txt").touch()
        case "missing":
            pass
    return path


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown", "has no known layout"),
        ("text", "is not a safetensors file"),
        ("truncated", "is damaged"),
        ("truncated npz", "truncated zip archive"),
        ("long header", "is not a safetensors file, or it is truncated"),
        ("pickle", "is a pickle, which can run code"),
        ("pickle in an npz", "an array of Python objects, which is a pickle"),
        ("zip bomb", "would unpack to 200,000,128 bytes"),
        ("picture", "is not a safetensors file, or it is truncated"),
        ("folder", "has no weights file"),
        ("missing", "no weights at"),
    ],
)
@pytest.mark.parametrize("to", ["vitrail", "timm"])
def test_files_that_are_no_use(tmp_path, convert, case, words, to):
    source = broken(tmp_path, case)
    before = list(tmp_path.iterdir())
    code, _, error = convert(source, tmp_path / PLACES[to].format("target"), "--to", to)
    assert code == 2 and words in error and error.startswith("error: ") and error.count("error:") == 1
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("target", "to", "words"),
    [
        ("out", "vitrail", "--to vitrail writes a file: pass a name that ends in .safetensors"),
        ("out.npz", "vitrail", "ends in .safetensors"),
        ("out.safetensors", "google", "ends in .npz"),
        ("out.safetensors", "timm", "writes a folder"),
        ("nowhere/out.npz", "google", "nowhere' does not exist; create it first"),
        ("ours.safetensors", "vitrail", "is the input"),
        ("full", "timm", "was not written by vitrail convert"),
        ("there.npz", "google", "exists; pass another name or --overwrite"),
        ("folder.npz", "google", "was not written by vitrail convert"),
        ("circle", "timm", "is a symbolic link"),
    ],
)
def test_places_that_are_refused(tmp_path, convert, ours, target, to, words):
    source = ours()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.doc").touch()
    (tmp_path / "there.npz").write_text("before")
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    flags = ["--overwrite"] if "was not written" in words else []
    code, _, error = convert(source, tmp_path / target, "--to", to, *flags)
    assert code == 2 and words in error and not list(tmp_path.glob(".*"))
    assert (tmp_path / "there.npz").read_text() == "before" and (tmp_path / "full" / "thesis.doc").exists()


@pytest.mark.parametrize(
    ("target", "words"),
    [("", "not a valid output path"), (".", "not a valid output path"), ("x" * 300, "File name too long")],
)
def test_invalid_specs(tmp_path, convert, ours, monkeypatch, target, words):
    source = ours()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for flags in ([], ["--overwrite"]):
        code, _, error = convert(source, target, "--to", "timm", *flags)
        assert code == 2 and words in error and not list((tmp_path / "empty").iterdir())


def test_a_link_is_not_replaced(tmp_path, convert, ours):
    source = ours()
    assert convert(source, tmp_path / "real", "--to", "timm")[0] == 0
    (tmp_path / "link").symlink_to(tmp_path / "real")
    code, _, error = convert(source, tmp_path / "link", "--to", "timm", "--overwrite")
    assert code == 2 and "is a symbolic link" in error and (tmp_path / "link").is_symlink()


def test_pages_of_evaluate_are_replaced_with_the_weights(tmp_path, convert, ours):
    source = ours()
    assert convert(source, tmp_path / "timm", "--to", "timm")[0] == 0
    (tmp_path / "timm" / "evaluation-photos.html").touch()
    assert convert(source, tmp_path / "timm", "--to", "timm", "--overwrite")[0] == 0


def test_a_representation_layer_without_a_place(tmp_path, convert, ours):
    code, _, error = convert(ours(representation=48, num_classes=0), tmp_path / "timm", "--to", "timm")
    assert code == 2 and "fine-tune it with vitrail train --from" in error


def test_an_unknown_layout(tmp_path, convert, ours):
    source = ours()
    code, _, error = convert(source, tmp_path / "target", "--to", "tim")
    assert code == 2 and 'Choose from: "vitrail", "timm", "huggingface"' in error
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("to", ["vitrail", "timm", "huggingface", "google"])
def test_a_target_inside_the_source(tmp_path, convert, ours, to):
    (tmp_path / "run").mkdir()
    source = ours().rename(tmp_path / "run" / "model.safetensors")
    for spec in (tmp_path / "run", tmp_path / "link"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / "run")
        code, _, error = convert(spec, tmp_path / "run" / PLACES[to].format("target"), "--to", to)
        assert code == 2 and "is inside the input folder; pass a path outside it" in error
    assert list((tmp_path / "run").iterdir()) == [source]


@pytest.mark.parametrize("source", ["folder", "folder/model.safetensors", "./folder/../folder"])
def test_a_source_that_would_be_overwritten(tmp_path, convert, ours, source):
    folder = tmp_path / "folder"
    assert convert(ours(), folder, "--to", "timm")[0] == 0
    before = {path: path.read_bytes() for path in folder.iterdir()}
    code, _, error = convert(f"{tmp_path}/{source}", folder, "--to", "huggingface", "--overwrite")
    verb = "contains" if source.endswith("safetensors") else "is"
    assert code == 2 and f"'{folder}' {verb} the input; pass another output path" in error
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("to", ["vitrail", "timm", "huggingface", "google"])
def test_a_place_without_permission(tmp_path, convert, ours, monkeypatch, to):
    """Refused by the system at the first thing that is made there; a superuser may write anywhere, so it is played."""

    def refuse(path: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    source = ours()
    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    code, _, error = convert(source, tmp_path / PLACES[to].format("target"), "--to", to)
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
def test_a_failed_write_leaves_nothing(tmp_path, convert, ours, monkeypatch, to, problem):
    """Not even what was written before the disk was full."""

    def fail(*args: object, **kwargs: object) -> None:
        for place in tmp_path.glob(".*"):
            (place / "half" if place.is_dir() else place).write_bytes(b"half")
        raise problem

    source = ours()
    monkeypatch.setattr(WRITERS[to], fail)
    code, _, error = convert(source, tmp_path / PLACES[to].format("target"), "--to", to)
    assert code == 130 if isinstance(problem, KeyboardInterrupt) else code == 2 and FULL in error
    assert list(tmp_path.iterdir()) == [source]


def test_sigterm_while_a_library_loads_what_was_written(tmp_path, convert, ours, monkeypatch):
    source = ours()
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("timm.create_model", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    for to in ("timm", "google"):
        assert convert(source, tmp_path / PLACES[to].format("target"), "--to", to, "--adopt-constants")[0] == 143
        assert list(tmp_path.iterdir()) == [source] and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle(tmp_path, ours, number):
    """A real process, interrupted while it compares: neither the target nor anything half-written stays."""
    source = ours(width=384, heads=6, depth=12, mlp_dim=1536, image_size=(224, 224))
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
