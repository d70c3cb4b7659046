"""The one way images go through a network: in order, whatever the number of processes, and past broken ones."""

from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from tests.data.folders import fill, image_bytes, zipped
from tests.data.sources.test_cifar import binary, packed, python
from vitrail.commands.predict import embed, predict
from vitrail.config import DataConfig, Preprocess
from vitrail.data.dataset import open_dataset
from vitrail.data.sources.images import find_images
from vitrail.errors import UserError
from vitrail.inference import classifier as classifier_module
from vitrail.inference.runner import forward_batches, network_outputs, read_pixels, row_errors
from vitrail.interrupt import Interrupts
from vitrail.models.build import create
from vitrail.weights.bundle import Card, write_bundle

CPU = torch.device("cpu")
SPEC = Preprocess(size=(8, 8))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    net = create("Ti/8", 3, (16, 16))
    torch.nn.init.normal_(net.head.weight, std=0.3)
    card = Card(model=net.config, preprocess=Preprocess(size=(16, 16)), classes=("a", "b", "c"), created_with="test")
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    write_bundle(path, net.state_dict(), card)
    return path


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    """100 images, of which three cannot be read."""
    root = fill(tmp_path / "inbox", [f"{number:03}.png" for number in range(97)])
    fill(root, {"010 broken.png": b"nothing", "050 cut.png": image_bytes(5)[:40]})
    (root / "099.png").symlink_to("nowhere.png")
    return root


def mean_of_pixels(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.flatten(1).mean(1, keepdim=True)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_rows_are_in_order_and_unreadable_images_have_a_reason(inbox: Path, workers: int) -> None:
    found = find_images([inbox])
    done: list[int] = []
    rows = [
        (found.name(int(sample)), error, float(value))
        for batch, out in forward_batches(
            mean_of_pixels, found, SPEC, CPU, batch_size=16, data=DataConfig(workers=workers), progress=done.append
        )
        for sample, error, value in zip(batch.sample, row_errors(batch), out[:, 0], strict=True)
    ]
    names = [Path(name).name for name, _, _ in rows]
    assert len(names) == 100 and names == [Path(found.name(row)).name for row in range(100)]
    assert [name for name, error, _ in rows if error] == [
        str(inbox / name) for name in ("010 broken.png", "050 cut.png", "099.png")
    ]
    assert rows[-1][1] is not None and rows[-1][1].startswith("the file cannot be found")
    values = {name: value for name, error, value in rows if not error}
    for number in (0, 33, 96):
        pixels = np.full((4, 6, 3), number, np.float32)
        pixels[0, 0] = 0
        assert values[str(inbox / f"{number:03}.png")] == pytest.approx((pixels.mean() - 127.5) / 127.5, abs=0.01)
    assert done == [16, 32, 48, 64, 80, 96, 100]


def test_outputs_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    fill(tmp_path, [f"{name}/{number}.png" for name in "ab" for number in range(50)])
    samples = open_dataset(tmp_path, None).splits["all"]
    net = create("Ti/8", 3, (8, 8)).eval()
    found = []
    for workers in (0, 2):
        with Interrupts() as interrupts:
            found.append(network_outputs(net, samples, SPEC, DataConfig(workers=workers), CPU, interrupts))
    assert torch.equal(found[0].values, found[1].values) and found[0].values.shape == (100, 3)
    assert found[0].labels.tolist() == samples.labels.tolist() and found[0].sample.tolist() == list(range(100))


def test_an_error_names_the_reason_if_no_image_can_be_read(tmp_path: Path) -> None:
    fill(tmp_path, ["a/1.png", "b/2.png"])
    samples = open_dataset(tmp_path, None).splits["all"]
    for name in ("a/1.png", "b/2.png"):
        (tmp_path / name).unlink()
    with Interrupts() as interrupts, pytest.raises(UserError, match=r"no image could be read, first a/1\.png"):
        network_outputs(mean_of_pixels, samples, SPEC, DataConfig(), CPU, interrupts)


def test_pixels_without_a_network(inbox: Path) -> None:
    found = find_images([inbox])
    read = read_pixels(found, SPEC)
    assert sum(isinstance(one, str) for one in read) == 3
    assert {tuple(one.shape) for one in read if isinstance(one, torch.Tensor)} == {(3, 8, 8)}
    some = found.subset([99, 3])
    assert [some.name(row) for row in range(2)] == [found.name(99), found.name(3)]
    gone, third = read_pixels(some, SPEC)
    assert gone == read[99] and torch.equal(third, read[3])


@pytest.mark.parametrize("version", [binary, python])
@pytest.mark.parametrize("archive", [False, True])
def test_cifar_is_predicted_as_it_is_published(tmp_path: Path, weights: Path, version, archive: bool) -> None:
    folder = version(tmp_path, 10)
    path = packed(folder, tmp_path / "cifar.tar.gz") if archive else folder
    rows = predict(weights, path, device="cpu")
    samples = open_dataset(folder, None).splits
    assert len(rows) == sum(map(len, samples.values())) and all(row.prediction is not None for row in rows)
    by_name = {row.file: row.prediction for row in rows}
    test = samples["test"]
    answers = vitrail.load(weights).predict([test.read(row) for row in range(3)], top=1)
    for row, answer in enumerate(answers):
        found = by_name[str(path / test.name(row))]
        assert found.label == answer.label and found.probability == pytest.approx(answer.probability, abs=1e-5)
    assert vitrail.load(weights).embed([]).shape == embed(weights, path, device="cpu").values[:0].shape


@pytest.mark.parametrize("wrong", [-1, 1.5, "2"])
def test_an_invalid_number_of_workers_is_refused(tmp_path: Path, weights: Path, wrong: object) -> None:
    fill(tmp_path, ["1.png"])
    for call in (predict, embed):
        with pytest.raises(UserError, match=r"workers must be .*at least 0"):
            call(weights, tmp_path, device="cpu", workers=wrong)


def test_damaged_data_next_to_images_is_skipped(tmp_path: Path, weights: Path) -> None:
    damaged = python(tmp_path, 10)
    (damaged / "batches.meta").write_bytes(b"nothing")
    fill(tmp_path / "more", ["1.png"])
    rows = predict(weights, [damaged, tmp_path / "more"], device="cpu")
    assert [row.error is None for row in rows] == [False, True] and rows[0].file == str(damaged)


def test_a_zip_and_its_folder_have_the_same_predictions(inbox: Path, tmp_path: Path, weights: Path) -> None:
    (inbox / "099.png").unlink()
    found = [predict(weights, path, device="cpu") for path in (inbox, zipped(inbox, tmp_path / "inbox.zip"))]
    assert [row.prediction for row in found[0]] == [row.prediction for row in found[1]]
    assert [row.error for row in found[0]] == [row.error for row in found[1]] and len(found[0]) == 99


def test_features_are_the_input_of_the_head(inbox: Path, weights: Path) -> None:
    found = embed(weights, inbox, device="cpu")
    assert found.values.shape == (97, 192) and found.values.dtype == np.float32
    assert len(found.files) == 97 and [Path(name).name for name, _ in found.failures][-1] == "099.png"
    clf = vitrail.load(weights)
    own = clf.embed(found.files)
    np.testing.assert_allclose(own, found.values, atol=1e-5)
    head = clf.net.head
    logits = torch.from_numpy(own) @ head.weight.T + head.bias
    (answer,) = clf.predict([found.files[3]], top=1)
    assert answer.probability == pytest.approx(float(logits[3].softmax(-1).max()), abs=1e-5)
    with pytest.raises(UserError, match=r"010 broken\.png"):
        clf.embed([inbox / "000.png", inbox / "010 broken.png"])


def test_an_iterator_gives_the_same_predictions_as_a_list(inbox: Path, weights: Path, monkeypatch) -> None:
    """The list by worker processes, the iterator a batch at a time."""
    files = [inbox / f"{number:03}.png" for number in range(97)]
    monkeypatch.setattr("vitrail.data.loader.loader.cores", lambda: 3)
    clf = vitrail.load(weights)
    assert clf.predict(files) == clf.predict(iter(files))
    monkeypatch.setattr(classifier_module, "_can_start_processes", lambda: False)
    assert clf.predict(files, top=1)[50].label == clf.predict([files[50]])[0].label
