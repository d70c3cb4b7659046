import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import vitrail
from vitrail import errors
from vitrail.cli.prediction_rows import print_rows
from vitrail.commands.evaluate import evaluate
from vitrail.commands.predict import predict_rows
from vitrail.config import Preprocess
from vitrail.errors import Note, UserError
from vitrail.models.build import create
from vitrail.weights.bundle import Card, Postprocess, read_bundle, write_bundle

FIXTURES = Path(__file__).parents[1] / "fixtures"


def predict(weights, images, form="text", threshold=None, console=None):
    """Print a label for each image; returns how many have none."""
    return print_rows(predict_rows(vitrail.load(weights), images, threshold=threshold), form, 1, console)[0]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    torch.manual_seed(0)
    net = create("Ti/8", 4, (16, 24))
    torch.nn.init.normal_(net.head.weight, std=0.3)
    spec = Preprocess(size=(16, 24), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    card = Card(model=net.config, preprocess=spec, classes=("a", "b", "c", "d"), created_with="test")
    file = tmp_path_factory.mktemp("weights") / "model.safetensors"
    write_bundle(file, net.state_dict(), card)
    return file


@pytest.fixture(scope="module")
def image():
    return np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)


def test_the_contract_of_a_loaded_file(path):
    clf = vitrail.load(path)
    assert clf.classes == ("a", "b", "c", "d")
    assert clf.preprocess.size == (16, 24) and clf.card.model.patch == (8, 8)
    assert not clf.net.training and isinstance(clf.net, torch.nn.Module)


def test_the_old_name_of_probabilities_works_and_warns_once(path, monkeypatch):
    monkeypatch.setattr(errors, "_warned", set())
    clf, logits = vitrail.load(path), torch.randn(2, 4)
    with pytest.warns(Note, match=r"Classifier\.chances .*Classifier\.probabilities") as warned:
        old = [clf.chances(logits) for _ in range(2)]
    assert len(warned) == 1 and all(torch.equal(values, clf.probabilities(logits)) for values in old)


def test_probabilities_are_those_of_a_hand_made_pass(path, image):
    """Resize by Pillow, normalise by hand: within the few hundredths that one grey level can move."""
    clf = vitrail.load(path)
    resized = np.asarray(Image.fromarray(image).resize((24, 16), Image.Resampling.BILINEAR), np.float32) / 255
    normal = (resized - np.float32([0.4, 0.5, 0.6])) / np.float32([0.2, 0.3, 0.4])
    logits = clf.net(torch.from_numpy(normal).permute(2, 0, 1)[None])
    expected = logits.softmax(-1)[0].numpy()
    (found,) = clf.predict([image])
    assert found.label == clf.classes[expected.argmax()]
    for name, probability in found.top:
        assert probability == pytest.approx(expected[clf.classes.index(name)], abs=0.01)
    assert [p for _, p in found.top] == sorted((p for _, p in found.top), reverse=True)
    assert sum(p for _, p in found.top) == pytest.approx(1)


def test_files_bytes_and_arrays_give_the_same_predictions_in_any_batch(path, image, tmp_path):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    (tmp_path / "x.png").write_bytes(file.getvalue())
    answers = vitrail.load(path).predict([tmp_path / "x.png", str(tmp_path / "x.png"), file.getvalue(), image])
    assert len({a.label for a in answers}) == 1
    assert [a.probability for a in answers] == pytest.approx([answers[0].probability] * 4, abs=1e-6)
    many = vitrail.load(path).predict([image] * 5, batch_size=2, top=2)
    assert len(many) == 5 and all(len(a.top) == 2 for a in many)


def test_the_threshold_gives_none_of_these(path, image):
    clf = vitrail.load(path)
    (sure,) = clf.predict([image], threshold=0.0)
    (unsure,) = clf.predict([image], threshold=1.0)
    assert unsure.label == "none of these" and unsure.top == sure.top


def test_multilabel_predictions_have_a_probability_per_label(path, image, tmp_path):
    """Also where a likelier class does not reach its threshold, and so is not given."""
    ranked = vitrail.load(path).predict([image])[0].top
    card, state = read_bundle(path)
    refused = card.classes.index(ranked[0][0])
    thresholds = tuple(1.0 if index == refused else 0.0 for index in range(4))
    several = card.model_copy(update={"task": "multilabel", "postprocess": Postprocess(thresholds=thresholds)})
    write_bundle(tmp_path / "several.safetensors", state, several)
    (found,) = vitrail.load(tmp_path / "several.safetensors").predict([image])
    chances = dict(found.top)
    assert found.labels == tuple(name for name, _ in ranked[1:])
    assert found.probabilities == tuple(chances[name] for name in found.labels)
    assert found.probability == found.probabilities[0] < chances[ranked[0][0]]
    Image.fromarray(image).save(tmp_path / "x.png")
    log = io.StringIO()
    predict(tmp_path / "several.safetensors", [tmp_path / "x.png"], console=Console(file=log, width=300))
    said = ", ".join(f"{name} {p:.1%}" for name, p in zip(found.labels, found.probabilities, strict=True))
    assert f"x.png  {said}  {ranked[0][0]} {chances[ranked[0][0]]:.1%}" in log.getvalue()


def test_invalid_input_is_a_user_error(path, tmp_path):
    clf = vitrail.load(path)
    (tmp_path / "bad.jpg").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"bad\.jpg: "):
        clf.predict([tmp_path / "bad.jpg"])
    with pytest.raises(UserError, match="No such file"):
        clf.predict([tmp_path / "none.jpg"])
    with pytest.raises(UserError, match=r"uint8.* height x width x 3, not float64 4x4x3"):
        clf.predict([np.zeros((4, 4, 3))])


def test_top_must_be_positive(path, image):
    with pytest.raises(UserError, match="at least 1, not 0"):
        vitrail.load(path).predict([image], top=0)
    assert len(vitrail.load(path).predict([image], top=99)[0].top) == 4


def test_a_single_image_is_accepted_and_other_types_are_refused(path, image):
    clf = vitrail.load(path)
    assert len(clf.predict(image)) == 1
    with pytest.raises(UserError, match="not NoneType"):
        clf.predict([None])
    with pytest.raises(UserError, match="from 0 to 1, not 2"):
        clf.predict([image], threshold=2)
    with pytest.raises(UserError, match="unknown device 'gpu'"):
        vitrail.load(path, device="gpu")


def test_weights_without_class_names_use_numbers(image):
    clf = vitrail.load(FIXTURES / "google_vit_token.npz", image_size=(16, 24))
    assert clf.card.classes == () and clf.classes == ("class 0", "class 1", "class 2", "class 3", "class 4")
    (found,) = clf.predict([image])
    assert sorted(name for name, _ in found.top) == list(clf.classes)
    assert found.label == found.top[0][0]


def test_weights_without_a_classifier_are_refused(tmp_path, image):
    net = create("Ti/8", 0, (16, 24))
    card = Card(model=net.config, preprocess=Preprocess(size=(16, 24)), created_with="test")
    write_bundle(tmp_path / "model.safetensors", net.state_dict(), card)
    clf = vitrail.load(tmp_path / "model.safetensors")
    assert clf.classes == ()
    with pytest.raises(UserError, match=r"no classification head .*vitrail train"):
        clf.predict([image])


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    """Finite weights whose logits are not, for a bright image alone; and a dark and a bright image."""
    folder = tmp_path_factory.mktemp("overflowing")
    net = create("Ti/8", 2, (16, 16), pool="gap")
    state = {name: torch.zeros_like(tensor) for name, tensor in net.state_dict().items()}
    state["patch_embed.proj.weight"][0] = 1.0
    state["norm.weight"][:] = 1.0
    state["head.weight"][:, 0] = 3e38  # the norm makes 13 of the first feature, where there is any
    card = Card(
        model=net.config,
        preprocess=Preprocess(size=(16, 16), mean=(0.0,) * 3, std=(1.0,) * 3),
        classes=("a", "b"),
        created_with="test",
    )
    write_bundle(folder / "model.safetensors", state, card)
    for name, value in (("dark", 0), ("bright", 255)):
        Image.new("RGB", (20, 20), (value,) * 3).save(folder / f"{name}.png")
    return folder


def test_non_finite_output_is_an_error_of_the_image(overflowing, capsys):
    clf = vitrail.load(overflowing)
    images = [overflowing / "dark.png", overflowing / "bright.png"]
    assert clf.predict(images[:1])[0].label == "a"
    with pytest.raises(UserError, match=r"bright\.png"):
        clf.predict(images)
    with pytest.raises(UserError, match="image 1"):
        clf.predict(image.read_bytes() for image in images)
    assert predict(overflowing, images, form="json", threshold=0.9) == 1
    rows = [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["label"] is None and rows[0]["top"][0]["probability"] == 0.5  # none of these, and that is true
    assert set(rows[1]) == {"file", "error"} and rows[1]["file"].endswith("bright.png")
    assert predict(overflowing, images, form="csv") == 1


def test_non_finite_output_is_null_in_json(overflowing, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for shade in (0, 200, 250):
            Image.new("RGB", (20, 20), (shade + (name == "b"),) * 3).save(tmp_path / "data" / name / f"{shade}.png")
    with pytest.raises(UserError, match=r"a/200\.png"):
        evaluate(
            overflowing, tmp_path / "data", report=tmp_path / "page.html", device="cpu", console=Console(quiet=True)
        )
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"images": None}, {"images": 5}, {"images": [5]}, {"images": [[]]}, {"images": b""}, {"images": "a\0b.jpg"},
        {"images": np.zeros((0, 0, 3), np.uint8)}, {"images": [np.zeros((0, 4, 3), np.uint8)]},
        {"images": np.zeros((4, 4, 3), np.float32)}, {"images": np.zeros((4, 4), np.uint8)},
        {"batch_size": 0}, {"batch_size": -1}, {"batch_size": "4"}, {"batch_size": None}, {"batch_size": 1.5},
        {"top": "3"}, {"top": None}, {"top": -1}, {"threshold": "0.5"}, {"threshold": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_arguments_are_user_errors(path, image, wrong):
    with pytest.raises(UserError):
        vitrail.load(path).predict(**{"images": [image], **wrong})


@pytest.mark.parametrize(
    "call",
    [
        lambda path: vitrail.load(None), lambda path: vitrail.load(5), lambda path: vitrail.load(""),
        lambda path: vitrail.load(path, image_size="224"), lambda path: vitrail.load(path, image_size=0),
        lambda path: vitrail.load(path, image_size=(16,)), lambda path: vitrail.load(path, device=None),
        lambda path: vitrail.create(None), lambda path: vitrail.create("Ti/8", "10"),
        lambda path: vitrail.create("Ti/8", -1), lambda path: vitrail.create("Ti/8", 2, None),
        lambda path: vitrail.create("Ti/8", 2, "32"), lambda path: vitrail.create("Ti/8", 2, -8),
        lambda path: vitrail.create("Ti/8", 2, 100_000), lambda path: vitrail.train(5),
        lambda path: vitrail.train(path),
        lambda path: vitrail.train(np.zeros(3)), lambda path: vitrail.train("x", recipe=5),
        lambda path: vitrail.train("x", out=5), lambda path: vitrail.train("x", overrides=None),
        lambda path: vitrail.train("x", overrides=[5]), lambda path: vitrail.train("x", model=5),
        lambda path: vitrail.train("x", overrides="model.image_size=[100000,100000]"),
    ],
)  # fmt: skip
def test_invalid_calls_are_user_errors(path, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x" / "a").mkdir(parents=True)
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(UserError):
        call(path)
    with pytest.raises(UserError):
        vitrail.load(tmp_path / "empty.safetensors")
    assert not (tmp_path / "runs").exists()


def test_no_images_have_no_predictions(path):
    assert vitrail.load(path).predict([]) == []


def test_threads_share_a_classifier(path, tmp_path):
    """Files, bytes and arrays of many sizes, from eight threads at once: the answers are those of one thread."""
    clf, random = vitrail.load(path), np.random.default_rng(1)
    images = [random.integers(0, 255, (20 + 3 * i, 50 - i, 3), dtype=np.uint8) for i in range(24)]
    for index, kind in zip(range(0, 24, 3), ("PNG", "JPEG", "WEBP", "BMP") * 2, strict=True):
        file = tmp_path / f"{index}.{kind.lower()}"
        Image.fromarray(images[index]).save(file)
        images[index] = file if index % 2 else file.read_bytes()
    expected = [clf.predict([image, image], batch_size=2)[1] for image in images]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            found = list(pool.map(lambda image: clf.predict([image, image], batch_size=2)[1], images))
            assert [one.label for one in found] == [one.label for one in expected]
            for one, other in zip(found, expected, strict=True):
                assert dict(one.top) == pytest.approx(dict(other.top), abs=1e-6)
