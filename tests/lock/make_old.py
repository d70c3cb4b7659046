"""The script that wrote `old/` with the old code: `python -m tests.lock.make_old FOLDER`.

It uses only the command line, so it still runs. But do not write `old/` again: the lock checks that files of the old
code can be read.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tests.lock import data
from tests.lock.cases import TINY, settings


def start_weights(path: Path) -> None:
    """Reduce the fixture of the original JAX code to one block of 16 channels: 20 KB in Google's layout."""
    kept = {}
    sizes = {48: 16, 96: 24, 16: 8, 25: 5, 5: 3}
    for name, value in np.load(data.FIXTURES / "google_vit_token.npz").items():
        if not name.startswith("params/") or "block_1" in name:
            continue
        for axis, size in enumerate(value.shape):
            heads = size == 3 and "MultiHead" in name
            value = np.take(value, range(2 if heads else sizes.get(size, size)), axis=axis)
        kept[name] = value
    np.savez(path, **kept)


def vitrail(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "vitrail", *arguments], cwd=folder, check=True)


def stopped(folder: Path) -> None:
    """Start a run and send SIGINT after its first checkpoint, so that it writes another one and stops."""
    overrides = settings(*TINY, "train.steps=400", "train.checkpoint_every=5", "train.keep_checkpoints=1")
    command = [sys.executable, "-m", "vitrail", "train", "photos", "--from", "start.safetensors", "--out", "stopped"]
    process = subprocess.Popen([*command, *overrides], cwd=folder)
    while not list((folder / "stopped" / "checkpoints").glob("*.safetensors")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    data.make(folder)
    start_weights(folder / "small.npz")
    vitrail(folder, "convert", "small.npz", "start.safetensors", "--to", "vitrail", "--image-size", "8x8")
    vitrail(folder, "train", "photos", "--from", "start.safetensors", "--out", "run", *settings(*TINY, "train.steps=8"))
    vitrail(folder, "train", "tags/tags.csv", "--from", "start.safetensors", "--out", "tagger", *settings(*TINY))
    vitrail(folder, "pack", "splits", "packed")
    stopped(folder)
    old = folder / "old"
    old.mkdir()
    for name in ("small.npz", "start.safetensors", "recipe.toml"):
        shutil.copy(folder / name, old / name)
    shutil.copy(folder / "tagger" / "model.safetensors", old / "tagger.safetensors")
    for name in ("run", "stopped", "packed"):
        shutil.copytree(folder / name, old / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
