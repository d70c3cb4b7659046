"""`vitrail explain` and `vitrail paper`, for every kind of network."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from rich.progress import Progress

from tests.commands.conftest import draw, vitrail
from tests.interpret.nets import KINDS, attending_net, brightness_net, dark_and_bright, random_net
from vitrail.commands.explain import explain
from vitrail.commands.paper import paper
from vitrail.config import Preprocess, network_config
from vitrail.errors import UserError
from vitrail.inference.classifier import Classifier, load
from vitrail.models.build import build_model
from vitrail.tasks.result import percent
from vitrail.weights.bundle import Card, Postprocess, write_bundle
from vitrail.workflows.explain_inputs import InputImages, evenly, read_input_images
from vitrail.workflows.explain_options import class_index, default_explain_folder
from vitrail.workflows.faithfulness import measure_faithfulness

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = ("heron", "egret", "stork", "crane", "ibis")


def write(folder, net, **options):
    config = net.config
    half = (0.5,) * config.channels
    card = Card(
        model=config,
        preprocess=Preprocess(size=config.image_size, mean=half, std=half),
        classes=NAMES[: config.num_classes],
        created_with="a test",
        **options,
    )
    folder.mkdir(parents=True)
    write_bundle(folder / "model.safetensors", net.state_dict(), card)
    return folder


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    root = tmp_path_factory.mktemp("birds")
    for number, colour in enumerate([(200, 60, 60), (60, 200, 60), (60, 60, 200)]):
        draw(root / str(number), colour, 4)
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write(tmp_path_factory.mktemp("weights") / "run", random_net(image_size=(16, 24)))


QUERIES = {
    "mean": "the mean of the patch tokens",
    "map": "the learned query of the attention pool",
    "registers": "the class token",
    "hybrid": "the class token",
    "relative": "the class token",
}


@pytest.mark.drawn
@pytest.mark.slow  # draws plots
@pytest.mark.parametrize("kind", QUERIES)
def test_a_page_for_every_kind_of_network(kind, birds, tmp_path, quiet):
    run = write(tmp_path / "run", random_net(**{**KINDS[kind], "image_size": (16, 24)}))
    out = tmp_path / "out"
    numbers = explain(run, [birds], out=out, shown=1, measured=10, console=quiet)
    page = (out / "explain.html").read_text()
    assert f"computed for {QUERIES[kind]}" in page and numbers["query"] == QUERIES[kind]
    assert not re.search(r"(src|href)=\"(?!data:|figures/)", page.replace('href="#', "")), "the page must load nothing"
    assert json.loads((out / "explain.json").read_text()).keys() == numbers.keys()
    distance = numbers["attention_distance"]
    assert np.shape(distance["pixels"]) == np.shape(distance["renormalised"]) == (3, 3) and distance["images"] == 12
    kinds = {"relevance", "rollout", "last attention", "random", "images"} | ({"votes"} if kind == "mean" else set())
    assert numbers["trust"].keys() == kinds
    expected = {"filters", "distance", "faithfulness", "image-00-maps", "image-00-heads"}
    expected |= {"positions"} if kind != "relative" else set()
    files = {file.name for file in (out / "figures").iterdir()}
    assert {f"{name}{suffix}" for name in expected for suffix in (".svg", ".png")} <= files
    for name in files:
        if name.endswith(".svg"):
            assert ElementTree.parse(out / "figures" / name).getroot().tag.endswith("svg")
        else:
            with Image.open(out / "figures" / name) as picture:
                assert np.ptp(np.asarray(picture.convert("L"))) > 50, f"{name} is empty"
    assert ("adds no position embeddings" in page) == (kind == "relative")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["google_vit_token.npz", "bigvision_map.npz"])
def test_foreign_weights(file, birds, tmp_path, quiet):
    size = {"google_vit_token.npz": (16, 24)}.get(file)
    numbers = explain(
        FIXTURES / file, [birds], out=tmp_path, shown=1, measured=0, image_size=size, device="cpu", console=quiet
    )
    assert np.isfinite(numbers["attention_distance"]["pixels"]).all()
    assert "class 0" in (tmp_path / "explain.html").read_text() or "class 1" in (tmp_path / "explain.html").read_text()


@pytest.mark.drawn
@pytest.mark.slow
def test_without_images_and_without_a_classifier(birds, tmp_path, quiet):
    run = write(tmp_path / "run", random_net(num_classes=0))
    explain(run, out=tmp_path / "alone", console=quiet)
    page = (tmp_path / "alone" / "explain.html").read_text()
    assert "Embedding filters" in page and "Attention distance" not in page and "vitrail explain WEIGHTS IMAGES" in page
    numbers = explain(run, [birds], out=tmp_path / "features", shown=1, console=quiet)
    page = (tmp_path / "features" / "explain.html").read_text()
    assert "no classifier" in page and "rollout" in page and "trust" not in numbers


@pytest.mark.slow
@pytest.mark.parametrize("multilabel", [False, True])
def test_probabilities_are_those_of_predict(multilabel, birds, tmp_path, quiet):
    """At the temperature that `vitrail evaluate --write` stores in the weights."""
    task = "multilabel" if multilabel else "classification"
    postprocess = Postprocess(temperature=5.0, threshold=0.0)
    run = write(tmp_path / "run", random_net(image_size=(16, 24)), task=task, postprocess=postprocess)
    image = sorted(birds.rglob("*.*"))[0]
    explain(run, [image], out=tmp_path / "out", shown=1, measured=0, console=quiet)
    label, probability = load(run).predict([image])[0].top[0]
    assert f"{label} {percent(probability)}" in (tmp_path / "out" / "explain.html").read_text()
    hot = load(write(tmp_path / "hot", random_net(image_size=(16, 24)), task=task)).predict([image])[0].top[0]
    assert abs(hot[1] - probability) > 0.02  # else the test could not fail


@pytest.mark.drawn
@pytest.mark.slow
def test_chosen_classes_blocks_and_heads(weights, birds, tmp_path, quiet):
    chosen = {"why": "ibis", "rather_than": "egret", "layers": [-1], "heads": [2, 0]}
    explain(weights, [birds], out=tmp_path, shown=1, measured=0, **chosen, console=quiet)
    page = (tmp_path / "explain.html").read_text()
    assert (
        page.count("why ibis") - page.count("--why ibis")
        == page.count("rather than egret")
        == page.count("why egret")
        == 1
    )
    assert "Faithfulness" not in page
    text = (tmp_path / "figures" / "image-00-heads.svg").read_text()
    assert "block 2" in text and "block 0" not in text and "head 2" in text and "head 1" not in text


@pytest.mark.slow
def test_a_bad_image_is_reported_and_skipped(weights, birds, tmp_path, quiet):
    (tmp_path / "bad.jpg").write_bytes(b"not an image")
    images = [birds / "0", tmp_path / "bad.jpg"]
    numbers = explain(weights, images, out=tmp_path / "out", shown=0, console=quiet)
    assert [one["file"] for one in numbers["failed"]] == [str(tmp_path / "bad.jpg")]
    page = (tmp_path / "out" / "explain.html").read_text()
    assert "1 of the images could not be read" in page and "Faithfulness was not measured: 4 " in page
    with pytest.raises(UserError, match="no image could be read"):
        explain(weights, [tmp_path / "bad.jpg"], out=tmp_path / "out", console=quiet)


@pytest.mark.slow
def test_figures_of_an_earlier_call_are_removed_and_other_files_are_kept(weights, birds, tmp_path, quiet):
    out, figures = tmp_path / "out", tmp_path / "out" / "figures"
    explain(weights, [birds / "0"], out=out, shown=2, measured=0, console=quiet)
    written = {file.name for file in figures.iterdir()}
    assert "image-01-heads.png" in written
    (tmp_path / "beside.png").touch()
    for mine in ("mine.png", "image-07-maps.svg"):
        (figures / mine).touch()
    numbers = json.loads((out / "explain.json").read_text())
    assert {f"figures/{name}" for name in written} == set(numbers["figures"])
    numbers["figures"] += ["../beside.png", "figures/../../beside.png", str(tmp_path / "beside.png")]
    (out / "explain.json").write_text(json.dumps(numbers))
    explain(weights, [birds / "0"], out=out, shown=1, measured=0, console=quiet)
    left = {file.name for file in figures.iterdir()}
    assert left == {name for name in written if "image-01" not in name} | {"mine.png", "image-07-maps.svg"}
    assert (tmp_path / "beside.png").exists()
    for wrong in ("not JSON", "[]", '{"figures": 3}', '{"figures": [7]}'):
        (out / "explain.json").write_text(wrong)
        explain(weights, out=out, console=quiet)
    assert "image-00-maps.svg" in {file.name for file in figures.iterdir()}  # not listed, so not removed


def test_a_folder_that_cannot_be_written_is_an_error_before_any_work(weights, birds, tmp_path, quiet, monkeypatch):
    monkeypatch.setattr("vitrail.commands.explain.measure_attention_distance", None)
    monkeypatch.setattr("vitrail.commands.paper.measure_attention_distance", None)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="it is a file"):
        explain(weights, [birds], out=tmp_path / "file", console=quiet)
    for command in (
        lambda out: explain(weights, [birds], out=out, console=quiet),
        lambda out: paper("figure-11", [weights], [birds], out=out / "a.svg", console=quiet),
    ):
        with pytest.raises(UserError, match=r"cannot write to .*file.*Not a directory"):
            command(tmp_path / "file" / "below")


def test_classes_without_names_are_selected_by_number(tmp_path):
    net = random_net()
    card = Card(model=net.config, preprocess=Preprocess(size=(8, 12)), created_with="a test")
    bare = Classifier(net, card)
    assert class_index(bare, "3") == class_index(bare, "class 3") == 3
    for wrong in ("5", "-1", "heron"):
        with pytest.raises(UserError, match=f"no class '{wrong}': use 0 to 4"):
            class_index(bare, wrong)
    numbered = Classifier(net, card.model_copy(update={"classes": ("4", "3", "2", "1", "0")}))
    assert class_index(numbered, "3") == 1  # a class name that is a number
    with pytest.raises(UserError, match="no class 'class 3'; classes are 4, 3, 2, 1, 0"):
        class_index(numbered, "class 3")


@pytest.mark.parametrize("kind", [attending_net, brightness_net])
def test_faithful_maps_are_those_of_what_the_network_uses(kind):
    net = kind()
    card = Card(model=net.config, preprocess=Preprocess(size=(8, 8), mean=(0.5,), std=(0.5,)), created_with="a test")
    pixels = ((dark_and_bright() + 1) * 127.5).clamp(0, 255).to(torch.uint8)
    found = measure_faithfulness(
        Classifier(net, card), InputImages(["x"] * 32, pixels, [], 32), 32, Progress(disable=True)
    )
    assert len(found.pasted.pixels) >= 10 and found.pasted_examples is not None
    rows = {row.name: row for row in found.rows}
    relevance, rollout = rows["relevance"], rows["rollout"]
    if kind is attending_net:
        assert relevance.pointing.accuracy == rollout.pointing.accuracy == 1
        assert relevance.pointing.over_chance.verdict == "better"
    else:
        assert relevance.pointing.accuracy == pytest.approx(1 / 4) and rows["votes"].pointing.accuracy == 1
        assert found.sentences[0].startswith("Votes are")
        assert found.sentences[1].startswith("Relevance is not faithful")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"why": "heorn"}, "no class 'heorn'; did you mean 'heron'"),
        ({"why": "ibis", "rather_than": "ibis"}, "two different classes"),
        ({"layers": [3]}, "no block 3: the network has blocks 0 to 2"),
        ({"heads": [0, 7]}, "no head 7: the network has heads 0 to 2"),
        ({"shown": -1}, "--shown must be 0 or more, not -1"),
        ({"measured": 5}, "--measured must be 0 or at least 10, not 5"),
        ({"images": ["nowhere"]}, "nowhere does not exist"),
    ],
)
def test_invalid_options_are_errors(weights, birds, tmp_path, quiet, options, sentence):
    images = options.pop("images", [birds])
    with pytest.raises(UserError, match=re.escape(sentence)):
        explain(weights, images, out=tmp_path / "out", console=quiet, **options)
    assert not (tmp_path / "out").exists()


def test_a_resnet_is_refused(tmp_path, quiet):
    config = network_config(
        {"kind": "resnet", "blocks": (1,), "width": 32, "image_size": (32, 32), "num_classes": 2}, "x"
    )
    with pytest.raises(UserError, match="ResNet"):
        explain(write(tmp_path / "run", build_model(config)), console=quiet)


def test_images_are_evenly_spaced():
    assert evenly(3, 128) == [0, 1, 2]
    assert evenly(10, 4) == [0, 3, 6, 9]
    assert len(evenly(1000, 128)) == 128 and evenly(0, 5) == [] and evenly(7, 1) == [0]


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize("name", ["figure-6", "figure-7", "figure-10", "figure-11"])
def test_figures_of_the_paper(name, weights, birds, tmp_path, quiet):
    other = write(tmp_path / "hybrid", random_net(**{**KINDS["hybrid"], "image_size": (16, 24)}))
    several = [weights, other] if name in ("figure-10", "figure-11") else [weights]
    for suffix in (".svg", ".png"):
        path = paper(name, several, [birds], out=tmp_path / f"{name}{suffix}", console=quiet)
        assert path.stat().st_size > 5_000
    text = (tmp_path / f"{name}.svg").read_text()
    words = {
        "figure-6": ["Input", "Attention"],
        "figure-7": ["principal components", "Position embedding similarity", "Attention distance"],
        "figure-10": ["run", "hybrid", "cosine similarity"],
        "figure-11": ["run", "hybrid", "mean attention distance (pixels)"],
    }
    assert all(word in text for word in words[name])


@pytest.mark.parametrize(
    ("name", "count", "out", "sentence"),
    [
        ("figure-6", 2, None, "the weights of one network"),
        ("figure-7", 1, None, "needs images"),
        ("figure-10", 0, None, "figure-10 needs weights"),
        ("figure-10", 1, "a.pdf", "--out must be an .svg or .png file"),
    ],
)
def test_invalid_options_of_figures(name, count, out, sentence, weights, quiet):
    with pytest.raises(UserError, match=re.escape(sentence)):
        paper(name, [weights] * count, out=out, console=quiet)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "images", "folder"),
    [
        ("runs/photos", ["photos/"], "photos-on-photos"),
        ("runs/photos/model.safetensors", [], "photos"),
        ("runs/flowers-transfer/seed-0", ["a.jpg", "b.jpg"], "flowers-transfer-seed-0-on-a.jpg-and-1-more"),
        ("hf-hub:timm/vit@v2", ["birds.zip"], "timm-vit-on-birds"),
        ("bundled", ["../photos"], "bundled-on-photos"),
    ],
)
def test_the_folder_is_named_after_weights_and_images(asked, images, folder):
    assert default_explain_folder(asked, images) == Path("explained") / folder


@pytest.mark.slow
def test_the_command_on_the_page_reproduces_it(weights, birds, tmp_path, quiet):
    out = tmp_path / "out"
    options = {"layers": (0, -1), "heads": (1,), "why": "egret", "rather_than": "heron", "shown": 1, "measured": 0}
    explain(weights, [birds], out=out, **options, console=quiet)
    last = load(weights).net.config.blocks - 1
    options = f"{out} --layers 0,{last} --heads 1 --why egret --rather-than heron --shown 1 --measured 0"
    assert f"vitrail explain {weights} {birds} --out {options}" in (out / "explain.html").read_text()
    explain(weights, [birds], out=out, console=quiet)
    assert f"{birds} --out {out}<" in (out / "explain.html").read_text()  # without defaults


def test_a_broken_image_is_replaced_by_its_neighbour(weights, tmp_path, capsys):
    draw(tmp_path / "odd", (200, 60, 60), 9)
    for broken in (0, 8):
        (tmp_path / "odd" / f"{broken:03}.png").write_bytes(b"no image")
    seen = read_input_images(load(weights), [tmp_path / "odd"], 4)
    assert seen.names == ["odd/001.png", "odd/003.png", "odd/005.png", "odd/007.png"]
    assert [Path(name).name for name, _ in seen.failed] == ["000.png", "008.png"]
    paper("figure-6", [weights], [tmp_path / "odd"], out=tmp_path / "figure.svg")
    assert "2 of the images could not be read, first" in capsys.readouterr().out


@pytest.mark.drawn
@pytest.mark.slow
def test_on_the_command_line(weights, birds, tmp_path):
    done = vitrail("explain", weights, birds, "--shown", "1", "--measured", "0", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["attention_distance"]["images"] == 12
    assert (tmp_path / default_explain_folder(weights, [birds]) / "explain.html").is_file()
    wrong = vitrail("explain", weights, "--layers", "first")
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr and "as 0,5,11" in wrong.stderr
    figure = vitrail("paper", "figure-11", weights, weights, "--images", birds, cwd=tmp_path)
    assert figure.returncode == 0, figure.stderr
    assert (tmp_path / "figure-11.svg").read_text().count("uniform attention") == 2  # two networks of the same name
