"""`vitrail evaluate`: postprocessing is written into the weights, and the number of processes does not matter."""

import io
import json
import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import vitrail
from tests import ranks as processes
from tests.commands.conftest import draw
from vitrail.commands.evaluate import evaluate
from vitrail.data.dataset import open_dataset
from vitrail.errors import UserError
from vitrail.metrics.accuracy import score_classification
from vitrail.tasks.table import prediction_task
from vitrail.weights.bundle import METADATA_KEY, TRAINED_ON, Postprocess, read_card, replace_card
from vitrail.workflows.train_run import train
from vitrail.workflows.train_test_overlap import TrainingRecord, unseen_images
from vitrail.workflows.tune import writable_weights_file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """131 images, divisible by neither 2 nor 3, in three batches. Two classes are similar."""
    root = tmp_path_factory.mktemp("evaluate") / "birds"
    for name, colour, count in (("red", (140, 90, 90), 47), ("rose", (136, 94, 92), 41), ("blue", (90, 90, 140), 43)):
        draw(root / name, colour, count)
    return root


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """Weights for the classes of `data`, trained for a few steps on other images."""
    root = tmp_path_factory.mktemp("trained")
    for name, colour in (("red", (150, 90, 90)), ("rose", (141, 95, 95)), ("blue", (90, 95, 150))):
        draw(root / "birds" / name, colour, 10)
    with open(root / "log", "w") as log:
        overrides = ("train.steps=25", "precision.compute=fp32", "optimizer.lr=3e-3", "data.workers=0")
        options = {"from_": tiny, "recipe": "scratch", "overrides": overrides, "console": Console(file=log)}
        return train(root / "birds", out=root / "run", **options).folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run that a test may change."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_written_temperature_and_threshold_are_used_by_predict(run, data, quiet, tmp_path):
    options = {"report": tmp_path / "r.html", "device": "cpu", "console": quiet}
    tensors = load_file(run / "model.safetensors")
    picture = next((data / "red").iterdir())
    before = vitrail.load(run).predict([picture])[0]
    first = evaluate(run, data, target_accuracy=0.6, write=True, **options)
    card = read_card(run / "model.safetensors")
    assert card.postprocess.temperature == pytest.approx(first.tuned.temperature)
    assert card.postprocess.threshold == first.tuned.abstention.threshold
    assert "Measured on 131 images" in card.postprocess.measured_on
    after = load_file(run / "model.safetensors")
    assert after.keys() == tensors.keys() and all(torch.equal(after[name], tensors[name]) for name in after)
    # The logits are divided by the temperature.
    prediction = vitrail.load(run).predict([picture])[0]
    log_odds = [torch.tensor([p for _, p in sorted(result.top)]).log() for result in (before, prediction)]
    scaled = [values - values.mean() for values in log_odds]
    torch.testing.assert_close(scaled[0] / card.postprocess.temperature, scaled[1], atol=1e-4, rtol=1e-4)
    assert vitrail.load(run).predict([picture], threshold=1.0)[0].label == "none of these"
    # A second evaluation has nothing left to tune.
    second = evaluate(run, data, **options)
    assert "on which its temperature and thresholds were fitted" in (tmp_path / "r.html").read_text()
    assert second.tuned.temperature == pytest.approx(first.tuned.temperature, rel=1e-4)
    assert second.top1 == first.top1 and second.nll <= first.nll + 1e-6


def test_a_second_write_keeps_the_threshold_or_prints_why_not(run, data, tmp_path):
    def write(**more: object) -> str:
        log = io.StringIO()
        console = Console(file=log, width=500)
        evaluate(run, data, report=tmp_path / "r.html", device="cpu", write=True, console=console, **more)
        return log.getvalue()

    def stored() -> Postprocess:
        return read_card(run / "model.safetensors").postprocess

    write(target_accuracy=0.6)
    first = stored()
    assert first.threshold > 0
    assert f"threshold {first.threshold:.3f} (unchanged" in write()
    assert (stored().temperature, stored().threshold) == (first.temperature, first.threshold)
    said = write(target_accuracy=0.9999)
    assert f"threshold {first.threshold:.3f} (unchanged" in said and "99.99 %" in said
    assert stored().threshold == first.threshold
    card, other = (
        read_card(run / "model.safetensors"),
        first.model_copy(update={"temperature": 0.25 * first.temperature}),
    )
    for more, facts in (
        ({}, ("threshold {:.3f} removed", "previous temperature", "--target-accuracy")),
        ({"target_accuracy": 0.9999}, ("threshold {:.3f} removed", "previous temperature", "99.99 %")),
    ):
        replace_card(run / "model.safetensors", card.model_copy(update={"postprocess": other}))
        said = write(**more)
        assert all(fact.format(first.threshold) in said for fact in facts) and stored().threshold == 0
        assert f"temperature {first.temperature:.3g} (before: {other.temperature:.3g})" in said
        assert f"at temperature {first.temperature:.3g}." in (tmp_path / "r.html").read_text()


def test_a_written_threshold_is_used_for_abstention(run, data):
    card = read_card(run / "model.safetensors")
    replace_card(run / "model.safetensors", card.model_copy(update={"postprocess": Postprocess(threshold=1.0)}))
    picture = next((data / "red").iterdir())
    assert vitrail.load(run).predict([picture])[0].labels == ()
    assert vitrail.load(run).predict([picture], threshold=0.0)[0].labels != ()


def test_a_card_is_replaced_atomically(run, tmp_path):
    path = run / "model.safetensors"
    card = read_card(path)
    replace_card(path, card.model_copy(update={"licence": "ünï" * 7}))
    assert read_card(path).licence == "ünï" * 7
    replace_card(path, card)
    assert read_card(path) == card
    assert [other.name for other in run.iterdir() if "partial" in other.name] == []
    save_file({"a": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(UserError, match="was not written by vitrail"):
        replace_card(tmp_path / "foreign.safetensors", card)
    half = {name: tensor.half() for name, tensor in load_file(path).items() if name != TRAINED_ON}
    save_file(half, path, metadata={METADATA_KEY: card.model_copy(update={"format": 1}).model_dump_json()})
    replace_card(path, card)
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float16}  # and not converted to float32


def test_invalid_options_are_errors_before_any_work(run, data, quiet, tmp_path):
    for options, facts in [
        ({"target_accuracy": 95}, "--target-accuracy .* 95"),
        ({"report": tmp_path / "no" / "where.html"}, "cannot write the report .*--report"),
    ]:
        with pytest.raises(UserError, match=facts):
            evaluate(run, data, console=quiet, **options)
    save_file({"a": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(UserError, match="was not written by vitrail"):
        writable_weights_file(tmp_path / "foreign.safetensors")
    with pytest.raises(UserError, match="vitrail convert hf-hub:some/thing FILE"):
        writable_weights_file("hf-hub:some/thing")


@pytest.mark.parametrize("tested", [False, True])
def test_the_rest_of_a_folder_was_trained_on_only_without_a_test_split(run, tmp_path, tested):
    root = tmp_path / "birds"
    for number, split in enumerate(("train", "val", *(["test"] if tested else []))):
        for name, colour in (("red", 30), ("rose", 100), ("blue", 170)):
            draw(root / split / name, (colour, 40 * number, 90), 4)
    card = read_card(run / "model.safetensors")
    own = card.data | {"fingerprint": open_dataset(root).fingerprint, "trained_on": ["f" * 16]}
    _, _, words = unseen_images(
        str(root), [TrainingRecord(card.model_copy(update={"data": own}))], "val", "", lambda *_: None
    )
    assert ("trained on the rest of this folder" in words) == (not tested)


@pytest.mark.slow
def test_the_scores_do_not_depend_on_the_number_of_processes(run, data, tmp_path):
    outputs = []
    for world in (1, 2, 3):
        command = ["evaluate", run, data, "--json", "--device", "cpu", "--target-accuracy", "0.6"]
        started = processes.start(world, tmp_path, processes.vitrail, *command, "--report", tmp_path / f"{world}.html")
        assert started.codes() == [0] * world, started.errors()
        outputs.append(json.loads(started.output()))
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0]["n"] == 131 and outputs[0]["balanced_interval"][0] < outputs[0]["balanced_accuracy"]


@pytest.mark.slow
def test_scores_on_the_real_labels_match_timm():
    """All 50,000 validation images of ImageNet, of which 46,837 have labels, with random logits."""
    from timm.data.real_labels import RealLabelsImagenet

    names = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 50_001)]
    peer = RealLabelsImagenet(names, topk=(1, 5))
    rows = [row for row in range(50_000) if peer.real_labels[names[row]]]
    assert len(rows) == 46_837
    generator, right = torch.Generator().manual_seed(0), {1: 0.0, 5: 0.0}
    for start in range(0, len(rows), 5000):  # in parts: all logits are 190 MB
        part = rows[start : start + 5000]
        values = torch.randn(len(part), 1000, generator=generator)
        marks = torch.zeros(len(part), 1000, dtype=torch.uint8)
        for place, row in enumerate(part):
            marks[place, peer.real_labels[names[row]]] = 1
        values += 2 * marks  # better than chance
        labels = prediction_task("classification", 1000).labels_of(values, marks)
        scores = score_classification(
            values.numpy(), labels.numpy(), [str(label) for label in range(1000)], bootstrap=10
        )
        right[1] += scores.top1 * scores.n
        right[5] += (scores.top5 or 0) * scores.n
        for place, row in enumerate(part):
            peer.sample_idx = row
            peer.add_result(values[place : place + 1])
    for k in (1, 5):
        assert 100 * right[k] / len(rows) == pytest.approx(peer.get_accuracy(k))


def test_val_as_test_also_holds_in_evaluate(tiny, tmp_path, quiet):
    for name, count in (("train", 12), ("val", 6)):
        draw(tmp_path / "birds" / name / "red", (200, 60, count), count)
        draw(tmp_path / "birds" / name / "blue", (60, count, 200), count)
    overrides = (
        "train.steps=2",
        "precision.compute=fp32",
        "data.group_similar=false",
        "data.val_as_test=true",
        "data.val_fraction=0.25",
    )
    run = train(
        tmp_path / "birds", from_=tiny, recipe="scratch", out=tmp_path / "run", overrides=overrides, console=quiet
    )
    assert run.scores.n == 12
    for split, count in ((None, 12), ("test", 12), ("val", 6), ("train", 18)):
        report = tmp_path / f"{split}.html"
        found = evaluate(run.folder, tmp_path / "birds", split=split, report=report, device="cpu", console=quiet)
        assert found.n == count, split
