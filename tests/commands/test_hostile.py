"""Damaged, edited and malicious files, invalid paths and full disks: one error message, no traceback, and nothing
unescaped on the terminal."""

import csv
import errno
import io
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file

from tests import hostile
from tests.commands.conftest import draw, stopped_at
from tests.hostile import NASTY, RAW
from tests.small import SMALL
from vitrail.cli import main as cli
from vitrail.commands.check import check
from vitrail.commands.pack import pack
from vitrail.config import Preprocess
from vitrail.models.build import build_model
from vitrail.models.variants import config_from_name
from vitrail.training.checkpoint import HEADER, CheckpointManager, digest
from vitrail.training.progress import downsample_curves, read_metrics
from vitrail.weights.bundle import Card, write_bundle
from vitrail.workflows.train_run import train

SETTINGS = (
    *SMALL,
    "train.steps=2",
    "train.checkpoint_every=1",
    "train.log_every=1",
    "train.device=cpu",
    "data.workers=0",
)
OPTIONS = [word for setting in SETTINGS for word in ("--set", setting)]
RECIPE = """base = "scratch"
[model]
name = "Toy/8"
image_size = [16, 16]
[train]
steps = 2
batch_size = 8
[data]
workers = 0
[optimizer]
lr = 1e-3
betas = [0.9, 0.99]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A stopped run, a finished run, a packed folder, a table, a list and a recipe, with few images."""
    root, quiet = tmp_path_factory.mktemp("hostile"), Console(quiet=True)
    for colour in ((200, 60, 60), (60, 60, 200)):
        draw(root / "photos" / f"{colour[0]}", colour, 6)
    with pytest.MonkeyPatch.context() as patch:
        options = {"recipe": "scratch", "overrides": SETTINGS, "console": quiet}
        with stopped_at(1, patch):
            train(root / "photos", out=root / "half", **options)
        train(root / "photos", out=root / "run", **options)
        shutil.copytree(root / "run", root / "other")
        pack(root / "photos", root / "packed", console=quiet)
        check(root / "photos", out=root / "checks", console=quiet)
    names = sorted(str(path.relative_to(root)) for path in (root / "photos").rglob("*.png"))
    rows = [
        f"{name},{name.split('/')[1]},{'val' if i % 3 == 0 else 'train'},g{i // 3},1" for i, name in enumerate(names)
    ]
    (root / "list.csv").write_text("\n".join(["path,label,split,group,weight", *rows, ""]))
    (root / "leave.csv").write_text(f"name,digest,reason\n200/000.png,,x\n60/001.png,{'0' * 32},y\n")
    (root / "own.toml").write_text(RECIPE)
    return root


@pytest.fixture
def told(place, typed, monkeypatch):
    """Run a command in the folder of `place`; an unexpected exception fails the test."""

    def run(*words, cwd=place):
        monkeypatch.chdir(cwd)

        def unforeseen(error):
            raise AssertionError(f"vitrail {' '.join(map(str, words))[:200]}: {error!r}"[:500]) from error

        monkeypatch.setattr(cli, "_unexpected", unforeseen, raising=False)
        code, out, err = typed(*words)
        assert code in (0, 1, 2), (words, code)
        assert not RAW.search(out + err), (words, RAW.findall(out + err))
        assert "Traceback" not in err and (code != 2 or "error:" in err or "Error" in err)
        return code, out, err

    return run


def with_facts(data, draw_, path, key):
    """A checkpoint file with changed facts and a valid checksum."""
    path.write_bytes(data)
    with safe_open(path, framework="pt") as file:
        facts = hostile.mutated_values(json.loads(file.metadata()[key]), draw_)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    facts["digest"] = digest(tensors, facts)
    save_file(tensors, path, metadata={key: json.dumps(facts, sort_keys=True)})
    return path.read_bytes()


RESUME = ["train", "--resume", "--out", "half"]
AGAIN = ["train", "photos", "--resume", "--out", "half", "--set", "train.steps=2"]
SCRATCH = ["--recipe", "scratch", "--out", "new", "--overwrite", *OPTIONS]


def reading(data):
    return [
        ["check", data, "--out", "found"],
        ["predict", "run", data],
        ["predict", "run", data, "--csv"],
        ["predict", "run", data, "--json"],
    ]


# file -> how it is changed, the commands that read it, how often in the quick test
FILES = {
    "half/config.toml": (hostile.mutated_bytes, [RESUME, AGAIN], 10),
    "half/metrics.jsonl": (hostile.mutated_rows, [RESUME], 2),
    "half/checkpoints/step_000000001.safetensors": (None, [RESUME, AGAIN], 5),
    "run/config.toml": (hostile.mutated_bytes, [["compare", "run", "other"]], 5),
    "leave.csv": (hostile.mutated_bytes, [["train", "photos", "--quarantine", "leave.csv", *SCRATCH]], 3),
    "list.csv": (hostile.mutated_bytes, [*reading("list.csv"), ["train", "list.csv", *SCRATCH]], 10),
    "own.toml": (hostile.mutated_bytes, [["recipes", "own.toml"], ["train", "nowhere", "--recipe", "own.toml"]], 30),
    "packed/manifest.json": (hostile.mutated_json, reading("packed"), 15),
    "packed/index.npz": (hostile.mutated_bytes, reading("packed"), 8),
}


@pytest.fixture
def mistreat(place, told, tmp_path):
    def run(file, seeds):
        change, commands, _ = FILES[file]
        folder, before = place / file.split("/")[0], tmp_path / "before"
        shutil.copytree(folder, before) if folder.is_dir() else shutil.copy(folder, before)
        data = (place / file).read_bytes()
        for seed in seeds:
            draw_ = random.Random(f"{file} {seed}")
            change_ = change or (lambda data, draw_: with_facts(data, draw_, tmp_path / "one.safetensors", HEADER))
            (place / file).write_bytes(change_(data, draw_))
            try:
                told(*draw_.choice(commands))
            finally:
                shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
                shutil.copytree(before, folder) if before.is_dir() else shutil.copy(before, folder)

    return run


@pytest.mark.parametrize("file", FILES)
def test_a_changed_file_is_read_or_refused(mistreat, file):
    mistreat(file, range(FILES[file][2]))


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_a_file_changed_in_many_ways_is_read_or_refused(mistreat, file):
    mistreat(file, range(1000, 1000 + 6 * FILES[file][2]))


ROWS = [
    '{"step": null, "loss": 1}', '{"step": NaN}', '{"step": -1, "loss": 1.0}', '{"step": 1e300}', '{"step": true}',
    '{"step": 10000000000000000000000000, "loss": 1.0}', '{"step": 1, "event": {"a": 1}}', "[1, 2]", "null", "5",
    '{"loss":',
    "[" * 100_000, '{"step": 1, "loss": ' + "9" * 5000 + "}", "\x00\xff\x1b[2J",
]  # fmt: skip


def test_lines_that_are_not_rows_of_a_run_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = [
        {"step": 1, "loss": 0.5, "val_loss": None},
        {"step": 2, "loss": None, "lr": 0.1},
        {"step": 2, "event": "a\u2028b"},
    ]
    lines = [
        json.dumps(kept[0]),
        *ROWS,
        '{"step": 2, "loss": 1e308, "lr": 0.1}',
        json.dumps(kept[2], ensure_ascii=False),
    ]
    path.write_text("\n".join(lines) + '\n{"step": 3, "lo', encoding="utf-8")
    assert read_metrics(path) == kept
    assert downsample_curves(read_metrics(path)) == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "lr": 0.1},
    ] or downsample_curves(read_metrics(path))[-1] == {"step": 2, "loss": 0.5, "lr": 0.1}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", None),
        ("step", 7),
        ("passed", "1"),
        ("unfit", []),
        ("rows", {"a": 1}),
        ("seconds", None),
        ("evaluated", 1e9),
    ],
)
def test_a_checkpoint_with_invalid_facts_is_skipped(place, tmp_path, key, value):
    shutil.copytree(place / "half" / "checkpoints", tmp_path / "checkpoints")
    newest = tmp_path / "checkpoints" / "step_000000001.safetensors"
    with safe_open(newest, framework="pt") as file:
        facts = {**json.loads(file.metadata()[HEADER]), key: value}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    facts["digest"] = digest(tensors, facts)
    save_file(tensors, newest, metadata={HEADER: json.dumps(facts, sort_keys=True)})
    saved, damaged = CheckpointManager(tmp_path / "checkpoints", 2).latest()
    assert saved.facts["step"] == 0 and len(damaged) == 1 and newest.name in damaged[0] and "\n" not in damaged[0]


LONG = "a" * 5000
PATHS = [
    ["train", "@"], ["train", "photos", "--out", "@", *OPTIONS], ["train", "--resume", "--out", "@"],
    ["train", "@", "--resume"], ["train", "photos", "--from", "@"], ["train", "photos", "--recipe", "@.toml"],
    ["train", "photos", "--quarantine", "@", *OPTIONS], ["train", "photos", "--set", "objective.teacher=@", *OPTIONS],
    ["evaluate", "@", "photos"], ["evaluate", "run", "@"], ["evaluate", "run", "photos", "--report", "@"],
    ["predict", "@", "photos"], ["predict", "run", "@"], ["predict", "run", "photos/60/000.png", "@"],
    ["explain", "run", "@"], ["compare", "run", "@"], ["compare", "run", "other", "--data", "@"], ["check", "@"],
    ["check", "photos", "--out", "@"], ["pack", "@", "out"], ["pack", "photos", "@"], ["fewshot", "run", "@"],
    ["knn", "run", "@"], ["vtab", "run", "@"], ["transfer", "@", "--from", "run"],
    ["paper", "figure-6", "run", "--images", "@"],
    ["convert", "@", "x.safetensors", "--to", "vitrail"], ["convert", "run", "@.safetensors", "--to", "vitrail"],
    ["recipes", "@.toml"], ["demo", "--out", "@"],
]  # fmt: skip


@pytest.mark.parametrize("bad", [LONG, "a\0b", "~nobody-of-this-name/x"], ids=["long", "null", "no-home"])
def test_an_invalid_path_is_one_error_message(told, bad):
    for words in PATHS:
        if bad[0] == "~" and ("--out" in words or words[:2] == ["pack", "photos"]):
            continue  # a name like others to write to
        code, _, err = told(*(word.replace("@", bad) for word in words))
        assert code == 2, words
        assert bad != LONG or len(err) < 20_000


@pytest.mark.parametrize(
    "setting",
    ["model.image_size=[100000,100000]", "model.image_size=1000000000", "model.registers=1000000000",
     "train.batch_size=1000000000", "train.steps=99999999999999999999", "train.epochs=1e308"],
)  # fmt: skip
@pytest.mark.parametrize("model", ["Toy/8", "8x1"])
def test_a_run_that_does_not_fit_in_memory_is_refused_before_it_is_built(told, monkeypatch, setting, model):
    monkeypatch.setattr("vitrail.workflows.run_model.build_model", lambda *_: pytest.fail("a network was built"))
    settings = [word for word in OPTIONS if word not in ("--set", "model.name=Toy/8", "model.image_size=[16, 16]")]
    settings = [
        word for word in settings if not setting.startswith("train.epochs") or not word.startswith("train.steps")
    ]
    settings += [f"model.name={model if model == 'Toy/8' else 'R8x1'}", setting]
    given = [word for value in settings for word in ("--set", value)]
    assert told("train", "photos", "--recipe", "scratch", "--out", "large", *given)[0] == 2
    assert not Path("large").exists()


def test_a_plan_of_a_large_network_allocates_nothing(told):
    for words in (["--image-size", "9984"], ["--batch", "1" + "0" * 30], ["--set", "model.registers=1000000000"]):
        assert told("plan", "B/16", "--json", *words)[0] == 0


@pytest.fixture
def odd(place, tmp_path):
    """Weights with class names and texts, and images with names, that contain terminal, spreadsheet and HTML code."""
    classes = (NASTY, "=1+1", "[/red]", "-1")
    model = config_from_name("Toy/8", 4, 16)
    card = Card(
        model=model,
        preprocess=Preprocess(size=(16, 16)),
        classes=classes,
        source=NASTY,
        licence=NASTY,
        created_with=NASTY,
    )
    write_bundle(tmp_path / "w.safetensors", build_model(model).state_dict(), card)
    folder = tmp_path / "x["
    folder.mkdir()
    names = [
        "=a.png",
        "-1.png",
        "@b.png",
        "red].png",
        "a\x1b[2J.png",
        "b\n\r.png",
        "c\x9b\u202egnp.png",
        "文件.png",
        "x;=d.png",
    ]
    for name in names:
        shutil.copy(next((place / "photos").rglob("*.png")), folder / name)
    (folder / "broken\x1b.png").write_bytes(b"\x1b]0;x\x07")
    return SimpleNamespace(weights=tmp_path / "w.safetensors", folder=folder, names=names, classes=classes)


def test_names_are_escaped_in_terminal_and_spreadsheet(odd, told, tmp_path):
    """Names of images and classes, and the texts of a card."""
    weights, folder, names, classes = odd.weights, odd.folder, odd.names, odd.classes
    files = [folder / name for name in names]
    code, out, _ = told("predict", weights, folder)
    assert code == 2 and len(out.splitlines()) == len(names) + 1 and f"{folder}/red].png" in out and "文件.png" in out
    _, out, _ = told("predict", weights, *files, "--json", "--top", "4")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["file"] for row in rows] == list(map(str, files))
    assert {row["label"] for row in rows[0]["top"]} == set(classes)
    _, out, _ = told("predict", weights, ".", "--csv", "--top", "4", cwd=folder)
    for delimiter in ",;":
        cells = [cell for row in csv.reader(io.StringIO(out, newline=""), delimiter=delimiter) for cell in row]
        assert not [cell for cell in cells if cell.startswith(("=", "+", "@", "\t", "\r", "-1."))]
    assert len(list(csv.reader(io.StringIO(out, newline="")))) == 2 + len(names)
    assert told("convert", weights, tmp_path / "c.safetensors", "--to", "vitrail")[0] == 0


@pytest.mark.slow
def test_names_are_escaped_in_pages_and_figures(odd, told, tmp_path):
    told("explain", odd.weights, odd.folder, "--out", tmp_path / "explained", "--measured", "0", "--shown", "1")
    for page in (tmp_path / "explained").rglob("*.*"):
        assert page.suffix == ".png" or not RAW.search(page.read_text(encoding="utf-8"))


def test_an_unexpected_error_is_one_message_and_a_traceback_in_a_file(place, typed, monkeypatch, tmp_path):
    def fails(*_, **__):
        raise KeyError(f"x{NASTY}")

    monkeypatch.setattr("vitrail.commands.predict.predict_rows", fails)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, err = typed("predict", place / "run", place / "photos")
    assert code == 70 and not out and "Traceback" not in err and not RAW.search(err)
    (kept,) = tmp_path.iterdir()
    assert str(kept) in err and "KeyError" in err
    assert "Traceback" in kept.read_text() and "in fails" in kept.read_text()
    monkeypatch.setenv("VITRAIL_TRACEBACK", "1")
    code, _, err = typed("predict", place / "run", place / "photos")
    assert code == 70 and "Traceback" in err and not RAW.search(err) and len(list(tmp_path.iterdir())) == 1
    monkeypatch.delenv("VITRAIL_TRACEBACK")
    for error in (
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        OSError(errno.ENOSPC, "full"),
    ):
        monkeypatch.setattr(
            "vitrail.commands.predict.predict_rows", lambda *_, error=error, **__: (_ for _ in ()).throw(error)
        )
        assert typed("predict", place / "run", place / "photos")[0] == 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_for_the_output_is_one_message(place):
    for words in (
        ["models"],
        ["recipes"],
        ["--help"],
        ["plan", "B/16", "--json"],
        ["predict", "run", "photos", "--csv"],
        ["predict", "run", "photos"],
    ):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-c", "import tests.small; from vitrail.cli.main import main; main()", *words]
            home = Path(__file__).parents[2]
            env = {**os.environ, "PYTHONPATH": str(home)}
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=place, env=env)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, (words, done.stderr)
