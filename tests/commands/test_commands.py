"""The command line for a new user: first run, typos, wrong paths, unusual folders."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ranks as processes
from tests.commands.conftest import draw, vitrail
from tests.small import SMALL
from vitrail.commands import evaluate as evaluating
from vitrail.config import Preprocess, network_config
from vitrail.models.build import build_model
from vitrail.terminal import make_console
from vitrail.weights.bundle import Card
from vitrail.weights.formats import huggingface
from vitrail.workflows.train_run import train

pytestmark = pytest.mark.slow  # every test starts processes
FIXTURES = Path(__file__).parents[1] / "fixtures"
FEW = [part for setting in (*SMALL, "train.steps=3") for part in ("--set", setting)]


@pytest.fixture(scope="module")
def weights(photos, tmp_path_factory):
    from rich.console import Console

    out = tmp_path_factory.mktemp("weights") / "run"
    with open(os.devnull, "w") as nowhere:
        overrides = (*SMALL, "train.steps=40", "optimizer.lr=3e-3")
        train(photos, out=out, overrides=overrides, console=Console(file=nowhere))
    return out


def error_message(done, code=2):
    """Return the message of a failed command on one line."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def imported_by(*arguments):
    """Return the packages that a command imports, and torch._dynamo if it is among the modules."""
    code = f"""
import sys
from vitrail.cli.main import main
sys.argv = {["vitrail", *map(str, arguments)]!r}
try:
    main()
finally:
    print(*{{m.split(".")[0] for m in sys.modules}}, *{{"torch._dynamo"}} & sys.modules.keys(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return set(done.stderr.splitlines()[-1].split())


def test_help_lists_commands_and_imports_nothing_slow():
    done = vitrail("--help")
    assert all(name in done.stdout for name in ("demo", "train", "evaluate", "predict", "models", "recipes"))
    assert not {"torch", "numpy", "matplotlib", "jinja2", "PIL", "safetensors"} & imported_by("--help")


COMMANDS = ["demo", "train", "evaluate", "fewshot", "compare", "vtab", "predict", "explain", "recipes", "paper"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name):
    done = vitrail(name, "--help")
    assert done.returncode == 0 and "Usage: vitrail" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["trian", "x"], 'Did you mean "train"?'),
        (["train", "x", "--modle", "S/16"], "Did you mean --model?"),
        (["evaluate", "w"], "data"),
    ],
)
def test_typo_in_a_command_or_option(arguments, hint):
    done = vitrail(*arguments)
    assert done.returncode != 0 and hint.lower() in (done.stdout + done.stderr).lower()


def test_typo_in_a_path_recipe_model_or_setting(photos):
    for arguments, hint in [
        ([photos.parent / "photso"], f"did you mean '{photos}'?"),
        ([photos, "--recipe", "finetun"], "did you mean 'finetune'?"),
        ([photos, "--model", "s/16"], "did you mean 'S/16'?"),
        ([photos, "--set", "train.stesp=3"], "did you mean 'train.steps'?"),
        ([photos, "--set", "optimizer.name=sdg"], "should be 'adamw', 'sgd' or 'muon'"),
        ([photos, "--from", photos.parent / "nowhere"], "no weights at"),
        ([photos, "--from", photos.parent / "photso"], f"did you mean '{photos}'?"),
    ]:
        assert hint in error_message(vitrail("train", *arguments))


def test_predict_labels_files_and_folders(weights, photos):
    done = vitrail("predict", weights, photos / "red", "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 15 and {"file", "label", "probability", "top", "labels", "probabilities"} == set(rows[0])
    assert sum(row["label"] == "red" for row in rows) >= 12
    top = vitrail("predict", weights, photos / "red" / "000.png", "--top", "3")
    assert "red" in top.stdout and "blue" in top.stdout and "%" in top.stdout
    table = vitrail("predict", weights, photos / "red" / "000.png", "--top", "2", "--csv").stdout
    (row,) = csv.DictReader(io.StringIO(table))
    assert (row["label"], row["probability"]) == (row["top_1"], row["probability_1"])
    assert row["top_2"] in ("blue", "green") and 0 < float(row["probability_2"]) <= float(row["probability_1"])


def test_predict_reports_a_bad_file_and_continues(weights, photos, tmp_path):
    shutil.copy(photos / "red" / "000.png", tmp_path / "a b.png")
    (tmp_path / "bad.jpg").write_bytes(b"not an image")
    done = vitrail("predict", weights, tmp_path, "--csv")
    assert "1 of the images could not be read" in error_message(done)
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [bool(row["error"]) for row in rows] == [False, True]
    done = vitrail("predict", weights, tmp_path / "a b.png", tmp_path / "a c.png", photos / "blue" / "000.png")
    assert "1 of the images could not be read" in error_message(done)
    first, missing, last = done.stdout.splitlines()
    assert missing == f"{tmp_path / 'a c.png'}  does not exist; did you mean '{tmp_path / 'a b.png'}'?"
    assert "%" in first and "%" in last


def test_predict_none_of_these(weights, photos):
    done = vitrail("predict", weights, photos / "red" / "000.png", "--threshold", "1", "--json")
    answer = json.loads(done.stdout)
    assert answer["label"] is None and answer["probability"] is None and answer["labels"] == []
    shown = vitrail("predict", weights, photos / "red" / "000.png", "--threshold", "1").stdout
    assert re.search(r"none of these  \w+ \d", shown)  # the probability of the most probable class


def test_predict_missing_images(weights, photos, tmp_path):
    close = f"does not exist; did you mean '{photos / 'red' / '0'}"
    assert close in error_message(vitrail("predict", weights, photos / "red" / "00.png"))
    swapped = error_message(vitrail("predict", photos / "red" / "000.png", weights))
    assert "000.png' is an image, not weights" in swapped
    assert "no images in" in error_message(vitrail("predict", weights, tmp_path))
    assert "vitrail predict WEIGHTS IMAGES" in error_message(vitrail("predict", weights))


def test_predict_imports(weights, photos):
    imported = imported_by("predict", weights, photos / "red" / "000.png")
    assert "torch" in imported
    assert (
        not {"torch._dynamo", "matplotlib", "jinja2", "timm", "transformers", "huggingface_hub", "sklearn", "scipy"}
        & imported
    )


def test_weights_without_image_size_or_class_names(photos, tmp_path):
    shutil.copy(FIXTURES / "google_vit_token.npz", tmp_path / "vit.npz")
    picture, size = photos / "red" / "000.png", ["--image-size", "16x24"]
    assert "pass --image-size" in error_message(vitrail("predict", tmp_path / "vit.npz", picture))
    done = vitrail("predict", tmp_path / "vit.npz", picture, *size, "--json")
    assert json.loads(done.stdout)["label"].startswith("class ")
    assert "pixels, as 224 or 224x320" in error_message(vitrail("predict", "x", picture, "--image-size", "big"))
    assert "pass --image-size" in error_message(vitrail("evaluate", tmp_path / "vit.npz", photos))
    refused = error_message(vitrail("evaluate", tmp_path / "vit.npz", photos, *size))
    assert "vit.npz has 5 classes without names" in refused and "--from" in refused
    assert list(tmp_path.iterdir()) == [tmp_path / "vit.npz"]


def test_evaluate_image_size(photos, tmp_path):
    """The weights of a ResNet work at any image size."""
    model = network_config({"kind": "resnet", "blocks": [1], "width": 32, "image_size": [16, 16], "num_classes": 3}, "")
    names = ("blue", "green", "red")
    card = Card(model=model, preprocess=Preprocess(size=(16, 16)), classes=names, created_with="test")
    huggingface.write(tmp_path, huggingface.adopt_constants(card), build_model(model).state_dict())
    done = vitrail("evaluate", tmp_path, photos, "--image-size", "24x16", "--json", "--report", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n"] == 45


def test_evaluate_prints_json_only(weights, photos, tmp_path):
    done = vitrail("evaluate", weights, photos, "--json", "--report", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n"] == 9
    assert "no split 'test'" in error_message(vitrail("evaluate", weights, photos, "--split", "test"))


def test_models_and_recipes():
    assert "86,567,656" in vitrail("models").stdout
    listed = vitrail("recipes").stdout
    assert all(name in listed for name in ("scratch", "finetune", "probe", "demo"))
    assert "weight_decay = 0.05" in vitrail("recipes", "finetune").stdout
    assert "no recipe 'foo'. `vitrail recipes` lists them." in error_message(vitrail("recipes", "foo"))


def test_recipes_prints_a_file(weights):
    assert "[optimizer]" in vitrail("recipes", weights / "config.toml").stdout


# Image folders


def test_train_on_nested_folders_with_unusual_names(tmp_path):
    root = tmp_path / "my photos (2026)"
    draw(root / "Käse & Brot" / "day 1" / "raw", (200, 60, 60), 6)
    draw(root / "[b]old[/b]" / "x", (60, 60, 200), 6)
    (root / ".ipynb_checkpoints").mkdir()
    (root / "notes.txt").write_text("hello")
    done = vitrail("train", root, "--out", tmp_path / "out run", *FEW)
    assert done.returncode == 0, done.stderr
    assert "2 classes; images: 10 train, 2 val" in done.stdout
    assert "Ignored 1 hidden" in done.stdout and re.search(r"Ignored 1 .*file: \.txt 1", done.stdout)
    report = (tmp_path / "out run" / "report.html").read_text()
    assert "Käse &amp; Brot" in report


def test_corrupt_file_is_skipped_and_named(photos, tmp_path):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    whole = (root / "red" / "003.png").read_bytes()
    (root / "red" / "003.png").write_bytes(whole[: len(whole) // 2])
    done = vitrail("train", root, "--out", tmp_path / "out", *FEW)
    assert done.returncode == 0, done.stderr
    assert "Skipped 1 unusable file (.png 1). First: 'red/003.png'" in done.stdout
    assert done.stderr == ""
    assert "red/003.png" in (tmp_path / "out" / "report.html").read_text()


def test_class_with_two_images_has_one_in_each_split(photos, tmp_path):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    draw(root / "rare", (90, 200, 200), 2)
    done = vitrail("train", root, "--out", tmp_path / "out", *FEW)
    assert done.returncode == 0, done.stderr
    assert "4 classes; images: 37 train, 10 val" in done.stdout


def test_unusable_folders_are_rejected(photos, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no images" in error_message(vitrail("train", tmp_path / "empty"))
    assert "only one class" in error_message(vitrail("train", photos.parent))
    assert "no class folders" in error_message(vitrail("train", photos / "red"))
    draw(tmp_path / "singles" / "a", (1, 2, 3), 1)
    draw(tmp_path / "singles" / "b", (200, 2, 3), 1)
    assert "two images" in error_message(vitrail("train", tmp_path / "singles"))
    assert "single image" in error_message(vitrail("train", photos / "red" / "000.png"))


def test_out_that_is_a_file_is_rejected(photos, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file" in error_message(vitrail("train", photos, "--out", file, *FEW))


@pytest.mark.parametrize("command", [("models",), ("plan", "B/16"), ("recipes",)])
def test_closed_output_pipe_is_no_error(command):
    process = subprocess.Popen(
        [sys.executable, "-m", "vitrail", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()  # before the first write
    assert process.wait(timeout=60) == 0
    assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_closed_by_the_shell(tmp_path, closed):
    done = subprocess.run(f"{sys.executable} -m vitrail plan B/16 --json {closed}", shell=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout) == (closed == "2>&-")


def test_exit_code_with_closed_stderr(tmp_path):
    command = [sys.executable, "-m", "vitrail", "evaluate", str(tmp_path), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    process.stderr.close()
    assert process.wait(timeout=60) == 2


def test_full_disk_for_the_output_is_an_error(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "vitrail", "models"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode != 0


class _FailingStream:
    """A stand-in for sys.stdout whose writes fail."""

    def __init__(self, error):
        self.error, self.calls = error, 0

    def write(self, text):
        self.calls += 1
        raise self.error

    def flush(self):
        raise self.error


@pytest.mark.parametrize("error", [OSError("full"), ValueError("closed"), BlockingIOError()])
def test_console_ignores_errors_of_a_replaced_stdout(monkeypatch, error):
    monkeypatch.setattr(sys, "stdout", tee := _FailingStream(error))
    console, before = make_console(ignore_write_errors=True), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        console.print("words")
    assert tee.calls == 20 and len(list(Path("/proc/self/fd").iterdir())) == before


def _broken_pipe(*_, **__):
    raise BrokenPipeError


def _control_c(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)


def _evaluate_by(function, *arguments):
    evaluating.evaluate = function
    processes.vitrail("evaluate", *arguments)


def test_other_broken_pipe_is_an_internal_error(weights, photos, tmp_path):
    started = processes.start(1, tmp_path, _evaluate_by, _broken_pipe, weights, photos)
    assert started.codes() == [70] and "BrokenPipeError" in started.errors()


def test_control_c_prints_stopped(weights, photos, tmp_path):
    """Runs in a process of its own, which can receive SIGINT."""
    started = processes.start(1, tmp_path, _evaluate_by, _control_c, weights, photos)
    assert started.codes() == [130]
    assert "stopped" in started.errors() and "Traceback" not in started.errors()


def test_segfault_prints_a_stack_trace(tmp_path):
    """A segmentation fault prints a stack trace."""
    code = "import faulthandler, vitrail.cli.main as c\n"
    code += "def crash(): faulthandler._sigsegv()\n"
    code += "c.app = crash; c.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == -signal.SIGSEGV and "in crash" in done.stderr
