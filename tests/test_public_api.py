"""The public API: eight functions, all documented, and the only ones that the documentation uses."""

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from tests.commands.conftest import draw
from tests.commands.conftest import vitrail as command
from vitrail.config import Preprocess
from vitrail.errors import UserError
from vitrail.inference.classifier import Classifier
from vitrail.models.build import create
from vitrail.models.vit import VisionTransformer
from vitrail.terminal import make_console
from vitrail.weights.bundle import Card, write_bundle

ROOT = Path(__file__).parents[1]
QUIET = make_console(quiet=True)
PUBLIC = ("create", "embed", "evaluate", "explain", "fit", "load", "predict", "train")
METHODS = (
    *(getattr(Classifier, name) for name in ("predict", "embed", "pixels", "inputs", "probabilities")),
    *(getattr(VisionTransformer, name) for name in ("forward_features", "trace")),
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    net = create("Ti/8", 2, 16, depth=2)
    torch.nn.init.normal_(net.head.weight, std=0.3)
    spec = Preprocess(size=(16, 16))
    card = Card(model=net.config, preprocess=spec, classes=("egret", "heron"), created_with="a test")
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    write_bundle(path, net.state_dict(), card)
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "photos"
    draw(root / "heron", (200, 60, 60), 6)
    draw(root / "egret", (60, 60, 200), 6)
    return root


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    """Five images, one of them unreadable."""
    draw(tmp_path / "inbox", (200, 60, 60), 5)
    (tmp_path / "inbox" / "002.png").write_bytes(b"nothing")
    return tmp_path / "inbox"


def test_import_vitrail_imports_neither_torch_nor_numpy():
    code = "import sys, vitrail; dir(vitrail); print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_public_names():
    assert tuple(vitrail.__all__) == PUBLIC
    assert set(dir(vitrail)) == {*PUBLIC, "__version__"}
    assert all(callable(getattr(vitrail, name)) for name in PUBLIC)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        vitrail.trian  # noqa: B018


def test_package_is_typed():
    assert (ROOT / "vitrail" / "py.typed").is_file()
    assert '"py.typed"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "function", [*(getattr(vitrail, name) for name in PUBLIC), *METHODS], ids=lambda function: function.__qualname__
)
def test_every_parameter_is_documented(function):
    sections = re.split(r"^(\w+)\n-+\n", inspect.getdoc(function) or "", flags=re.M)
    sections = dict(zip(sections[1::2], sections[2::2], strict=True))
    named = re.findall(r"^(\w+)$", sections["Parameters"], re.M)
    assert named == [name for name in inspect.signature(function).parameters if name != "self"]
    assert sections["Returns"].strip()
    if function not in (vitrail.train, vitrail.fit):  # their examples are in docs/python.md
        assert ">>> " in sections["Examples"]


def test_the_properties_of_a_classifier_are_documented():
    named = re.findall(r"^(\w+)$", inspect.getdoc(Classifier), re.M)
    assert {"net", "card", "preprocess", "classes"} <= set(named)
    assert all(inspect.getdoc(getattr(Classifier, name)) for name in ("preprocess", "classes"))


@pytest.mark.slow
def test_predict_returns_the_rows_of_the_command(weights, inbox, capfd):
    rows = vitrail.predict(weights, inbox, top=2, device="cpu")
    assert capfd.readouterr() == ("", "")
    printed = [
        json.loads(line) for line in command("predict", weights, inbox, "--top", 2, "--json").stdout.splitlines()
    ]
    assert [row.file for row in rows] == [line["file"] for line in printed]
    assert [row.error for row in rows] == [line.get("error") for line in printed]
    assert [row.error is None for row in rows] == [row.prediction is not None for row in rows]
    assert sum(row.prediction is None for row in rows) == 1
    for row, line in zip(rows, printed, strict=True):
        if row.prediction is not None:
            assert (row.prediction.label, row.prediction.probability) == (line["label"], line["probability"])
            assert [name for name, _ in row.prediction.top] == [entry["label"] for entry in line["top"]]


def test_functions_accept_a_classifier_instead_of_a_path(weights, inbox, tmp_path):
    clf = vitrail.load(weights)
    assert vitrail.predict(clf, inbox) == vitrail.predict(weights, inbox, device="cpu")
    from_classifier, from_path = vitrail.embed(clf, inbox), vitrail.embed(weights, inbox, device="cpu")
    assert np.array_equal(from_classifier.values, from_path.values) and from_classifier[1:] == from_path[1:]
    assert from_path.values.dtype == np.float32 and from_path.values.shape == (4, 192)
    assert len(from_path.failures) == 1
    for options in ({"device": "cpu"}, {"image_size": 16}):
        with pytest.raises(UserError, match=r"vitrail\.load"):
            vitrail.predict(clf, inbox, **options)
    with pytest.raises(UserError, match="path"):
        vitrail.evaluate(clf, inbox, write=True, console=QUIET)


def test_images_are_paths_one_or_many(weights, inbox):
    clf = vitrail.load(weights)
    files = sorted(inbox.glob("*.png"))
    assert vitrail.predict(clf, (file for file in files)) == vitrail.predict(clf, inbox)
    assert vitrail.predict(clf, str(files[0])) == vitrail.predict(clf, files[:1])
    for empty in ([], ()):
        with pytest.raises(UserError, match="at least one"):
            vitrail.predict(clf, empty)
    for images in (np.zeros((16, 16, 3), np.uint8), b"bytes", [b"bytes"], 3):
        with pytest.raises(UserError, match="paths"):
            vitrail.predict(clf, images)


def test_inputs_are_the_pixels_that_predict_uses(weights, inbox):
    clf = vitrail.load(weights)
    files = [inbox / "000.png", inbox / "001.png"]
    inputs = clf.inputs(files)
    assert inputs.shape == (2, 3, 16, 16) and torch.equal(inputs[:1], clf.inputs(files[0]))
    assert clf.inputs([]).shape == (0, 3, 16, 16)
    likeliest = clf.probabilities(clf.net(inputs)).max(-1).values.tolist()
    assert likeliest == pytest.approx([prediction.probability for prediction in clf.predict(files)], abs=1e-6)
    with pytest.raises(UserError, match=r"002\.png"):
        clf.inputs([inbox / "002.png"])


@pytest.mark.slow
def test_evaluate_returns_the_numbers_of_the_command(weights, photos, tmp_path):
    printed = command("evaluate", weights, photos, "--report", tmp_path / "command.html", "--json", "--device", "cpu")
    for source in (weights, vitrail.load(weights)):
        options = {} if isinstance(source, Classifier) else {"device": "cpu"}
        scores = vitrail.evaluate(source, photos, report=tmp_path / "python.html", console=QUIET, **options)
        assert json.loads(json.dumps(scores.to_dict())) == json.loads(printed.stdout)
        pages = [(tmp_path / f"{name}-card.md").read_text() for name in ("command", "python")]
        assert pages[0] == pages[1]


@pytest.mark.slow
def test_explain_returns_the_numbers_it_writes(weights, photos, tmp_path):
    numbers = vitrail.explain(vitrail.load(weights), str(photos), out=tmp_path / "python", measured=10, console=QUIET)
    options = ("--out", tmp_path / "command", "--measured", 10, "--device", "cpu")
    assert command("explain", weights, photos, *options).returncode == 0
    written = [json.loads((tmp_path / name / "explain.json").read_text()) for name in ("python", "command")]
    assert written[0] == written[1] == json.loads(json.dumps(numbers))
    assert (tmp_path / "python" / "explain.html").is_file() and len(numbers["attention_distance"]["pixels"]) == 2


def private_names(code: str) -> list[str]:
    """Return the private names of vitrail that a program uses."""
    nodes = list(ast.walk(ast.parse(code)))
    aliases = {"vitrail"}
    private = []
    for node in nodes:
        if isinstance(node, ast.Import):
            private += [alias.name for alias in node.names if alias.name.startswith("vitrail.")]
            aliases |= {alias.asname for alias in node.names if alias.name == "vitrail" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vitrail":
            private += [alias.name for alias in node.names if node.module != "vitrail" or alias.name not in PUBLIC]
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            private += [node.attr] if node.attr not in (*PUBLIC, "__version__") else []
    return private


def test_private_names():
    assert private_names("import vitrail as v\nv.load('x').net.trace(0)\nfrom vitrail import load, create") == []
    for code, name in (
        ("import vitrail.data", "vitrail.data"),
        ("from vitrail.data.transforms import normalise", "normalise"),
        ("from vitrail import data", "data"),
        ("import vitrail\nvitrail.errors.UserError", "errors"),
        ("import vitrail as v\nv.data", "data"),
    ):
        assert private_names(code) == [name]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.stem
)
def test_documentation_uses_public_names_only(page):
    for code in re.findall(r"```(?:python|py)\n(.*?)```", page.read_text(), re.S):
        assert private_names(code) == []
