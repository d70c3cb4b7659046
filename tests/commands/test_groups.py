"""Splits within a measurement keep groups together, so that the accuracy that chose a setting is not too high."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from bench.planted import CHANGES, generated
from vitrail.data.dataset import open_dataset
from vitrail.data.decode import decode
from vitrail.data.samples import Samples
from vitrail.data.splits import SplitRule, group_ids
from vitrail.metrics.accuracy import ClassificationScores
from vitrail.metrics.group_split import stratified_group_mask
from vitrail.metrics.multilabel import f1_scores, sigmoid
from vitrail.metrics.probe import fit_probe
from vitrail.metrics.temperature import split_halves
from vitrail.metrics.tuning import tune_multilabel
from vitrail.workflows.train_run import train as vitrail_train

pytestmark = pytest.mark.slow

CLASSES, SCENES, NEW, PENALTIES = 4, 20, 60, (1e-3, 1e-1)
COPIES = ("PNG", "JPEG quality 50", "WebP", "brighter", "mirrored", "3 % cropped")


def _write(root: Path, table: bool) -> Path:
    """Scenes of each class, hard to classify by colour, with near-copies of each; and new scenes for the test split."""
    scenes = generated(CLASSES * (SCENES + NEW), (48, 64))
    rows = ["path,label,split,group"]
    for number, scene in enumerate(scenes):
        label, split = f"c{number % CLASSES}", "train" if number < CLASSES * SCENES else "test"
        pixels = np.asarray(scene, np.int16) + np.array([0, 14 * (number % CLASSES), 0])
        picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        for copy, change in enumerate(COPIES if split == "train" else COPIES[:1]):
            data, ending = CHANGES[change](picture)
            place = root / split / label / f"{number}-{copy}{ending}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
            rows.append(f"{place.relative_to(root)},{label},{split},scene-{number}")
    if not table:
        return root
    (root / "table.csv").write_text("\n".join(rows) + "\n")
    return root / "table.csv"


@pytest.fixture(scope="module", params=["groups", "near-copies"])
def splits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Samples]:
    return open_dataset(_write(tmp_path_factory.mktemp("scenes"), request.param == "groups"), None).splits


def _scene(samples: Samples) -> np.ndarray:
    return np.array([int(Path(samples.name(row)).name.partition("-")[0]) for row in range(len(samples))])


def _pixels(samples: Samples) -> torch.Tensor:
    read = (Image.fromarray(decode(samples.read(row))).resize((8, 6)) for row in range(len(samples)))
    return torch.from_numpy(np.stack([np.asarray(image, np.float32).ravel() for image in read]))


def test_copies_of_a_scene_are_one_group(splits: dict[str, Samples]) -> None:
    train = splits["train"]
    assert len(train) == CLASSES * SCENES * len(COPIES)
    scene, groups = _scene(train), group_ids(train)
    together = groups[:, None] == groups
    alike = scene[:, None] == scene
    assert not (together & ~alike).any() and together[alike].mean() > 0.98
    some = np.flatnonzero(scene < 2 * CLASSES)
    assert len(np.unique(group_ids(train, some))) in (2 * CLASSES, 2 * CLASSES + 1)
    assert group_ids(train.subset(some)).tolist() == group_ids(train, some).tolist()


def test_the_accuracy_that_chose_a_penalty_holds_on_new_scenes(splits: dict[str, Samples]) -> None:
    """The accuracy of a split that separates copies is far too high."""
    train, test = splits["train"], splits["test"]
    x, y = _pixels(train), torch.from_numpy(train.labels)
    new, labels = _pixels(test), torch.from_numpy(test.labels)
    shown, true = {}, []
    for how, groups in (("whole", group_ids(train)), ("torn", None)):
        accuracies = []
        for seed in range(4):
            probe = fit_probe(x, y, CLASSES, penalties=PENALTIES, iterations=100, seed=seed, groups=groups)
            assert probe.unmeasured == 0
            accuracies.append(dict(probe.tried)[probe.penalty])
            true.append(((new @ probe.weight.T + probe.bias).argmax(1) == labels).double().mean().item())
        shown[how] = np.mean(accuracies)
    assert abs(shown["whole"] - np.mean(true)) < 0.1
    assert shown["torn"] > np.mean(true) + 0.3


def test_the_halves_that_fit_and_check_thresholds_share_no_scene(splits: dict[str, Samples]) -> None:
    groups = group_ids(splits["train"])
    for seed in range(5):
        (first, second), (again, _) = split_halves(len(groups), seed, groups)
        assert not np.isin(groups[first], groups[second]).any() and (again == second).all()
        assert abs(len(first) - len(second)) <= len(COPIES)


def test_thresholds_are_checked_on_new_scenes() -> None:
    """Random labels: thresholds are better on scenes that share a group with the fit than on new ones."""
    scores = []
    for seed in range(8):
        chance = np.random.default_rng(seed)
        own = [(chance.normal(0, 2, (24, 3)), chance.random((24, 3)) < 0.3) for _ in range(2)]
        (logits, truth), (new, labels) = own
        logits, truth, groups = logits.repeat(6, axis=0), truth.repeat(6, axis=0), np.arange(24).repeat(6)
        whole, torn = (tune_multilabel(logits, truth, np.full(3, 0.5), groups=which) for which in (groups, None))
        found = sigmoid(new / whole.temperature) >= np.array(whole.thresholds)
        scores.append((f1_scores(found, labels)[1], whole.macro_f1, torn.macro_f1))
    true, whole_f1, torn_f1 = np.mean(scores, axis=0)
    assert abs(whole_f1 - true) < 0.06
    assert torn_f1 > true + 0.08


def test_a_class_of_one_group_is_not_measured_and_reported() -> None:
    chance = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], 20)
    groups = np.where(y == 2, 1000, np.arange(60) // 4)  # class 2 is one scene
    x = torch.from_numpy(chance.normal(y[:, None], 1.0, (60, 8))).float()
    labels = torch.from_numpy(y)
    mask = stratified_group_mask(groups, y, 0.2, 0)
    assert mask[y < 2].sum() == 8 and not mask[y == 2].any()
    assert all(len(set(mask[groups == group])) == 1 for group in set(groups.tolist()))
    probe = fit_probe(x, labels, 3, penalties=PENALTIES, iterations=50, groups=groups)
    assert len(probe.tried) == 2 and probe.unmeasured == 1
    probe = fit_probe(x, labels, 3, penalties=PENALTIES, iterations=50, groups=y)  # each class is one: no choice
    assert probe.tried == [] and probe.penalty == max(PENALTIES)
    assert split_halves(60, 0, np.zeros(60)) == []


def test_similar_images_are_grouped_unless_switched_off(tmp_path: Path) -> None:
    root = _write(tmp_path, False)
    loose = open_dataset(root, SplitRule(group_similar=False)).splits["train"]
    assert len(np.unique(group_ids(loose))) == len(loose)
    strict = open_dataset(root, SplitRule()).splits["train"]
    assert len(np.unique(group_ids(strict))) < len(strict) / 4
    sent = pickle.loads(pickle.dumps(strict))
    assert sent.descriptors is None and (sent.digests == strict.digests).all()


def test_the_accuracy_of_a_probe_holds_on_new_scenes(tmp_path: Path) -> None:
    """Labels unrelated to the images: a third is correct by chance, and with copies nearly all would be."""
    for number, scene in enumerate(generated(50, (48, 64))):
        for copy in COPIES[: 6 if number < 30 else 1]:
            data, ending = CHANGES[copy](scene)
            place = tmp_path / "data" / ("train" if number < 30 else "test") / f"c{number % 3}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number}-{COPIES.index(copy)}{ending}").write_bytes(data)
    out = io.StringIO()
    console, settings = Console(file=out, width=400), ["data.workers=0"]
    run = vitrail_train(
        tmp_path / "data", from_="bundled", recipe="probe", out=tmp_path / "run", overrides=settings, console=console
    )
    (line,) = [line for line in out.getvalue().splitlines() if "penalty" in line]
    shown = [float(found) / 100 for found in re.findall(r"([\d.]+)%", line)]
    assert len(shown) > 2 and max(shown) < 0.7
    assert isinstance(run.scores, ClassificationScores) and run.scores.top1 < 0.7
