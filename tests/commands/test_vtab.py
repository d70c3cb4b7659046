"""`vitrail vtab`: the protocol on tasks with file lists, with class folders, and with their own splits."""

import json

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from bench.planted import CHANGES, generated
from tests import ranks as processes
from tests.commands.conftest import draw, vitrail
from vitrail.commands.vtab import vtab, vtab_splits
from vitrail.config import RunConfig, check_no_unused, leaves, merge, parse_overrides, read_recipe
from vitrail.data.dataset import open_dataset
from vitrail.errors import UserError
from vitrail.metrics.vtab import VTAB_TASKS
from vitrail.weights.bundle import read_card, write_bundle
from vitrail.workflows import vtab as vtab_workflow
from vitrail.workflows.vtab import RECIPE, task_overrides

pytestmark = pytest.mark.slow


@pytest.fixture
def few(monkeypatch):
    """The protocol with 16 training and 8 validation images."""
    monkeypatch.setattr(vtab_workflow, "TRAIN", 16)
    monkeypatch.setattr(vtab_workflow, "VAL", 8)


def lists(root, counts=(16, 8, 7), classes=2):
    """A task with file lists: bright and dark images."""
    rng = np.random.default_rng(0)
    for name, folder, count in zip(("train800", "val200", "test"), ("train800", "val200", "test"), counts, strict=True):
        (root / "images" / folder).mkdir(parents=True)
        lines = []
        for number in range(count):
            label = number % classes
            pixels = rng.integers(60 * label, 60 * label + 90, (16, 16, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(root / "images" / folder / f"{number:06d}.png")
            lines.append(f"images/{folder}/{number:06d}.png {label}\n")
        (root / f"{name}.txt").write_text("".join(lines))
    return root


def task(key):
    return next(one for one in VTAB_TASKS if one.key == key)


def test_published_lists_are_used(tiny, tmp_path, quiet, few):
    lists(tmp_path / "patch_camelyon")
    found = vtab(tiny, tmp_path, device="cpu", console=quiet)
    (score,) = found.scores
    assert score.key == "patch_camelyon" and score.published and score.tested == 7
    assert score.accuracy > 0.8  # bright and dark
    assert found.summary.groups["specialized"] == score.accuracy and not found.summary.complete
    assert len(found.missing) == 18 and "HDF5" not in json.dumps(found.missing)
    assert "TFRecord" in found.missing["dmlab"]
    assert "7 test images, but the task has 32,768" in score.notes


def test_no_test_image_is_trained_on(tmp_path, few):
    for name, colour in (("a", (200, 60, 60)), ("b", (60, 60, 200))):
        draw(tmp_path / "eurosat" / name, colour, 50)
    data = open_dataset(tmp_path / "eurosat", None)
    train, val, test = vtab_splits(data, task("eurosat"))
    assert (len(train), len(val), len(test)) == (16, 8, 20)  # of 60, 20 and 20
    digests = [set(one.digests.tolist()) for one in (train, val, test)]
    assert not digests[0] & digests[1] and not digests[0] & digests[2] and not digests[1] & digests[2]
    again = vtab_splits(open_dataset(tmp_path / "eurosat", None), task("eurosat"))
    assert [set(one.digests.tolist()) for one in again] == digests
    with pytest.raises(UserError, match=r"eurosat.* DTD"):
        vtab_splits(data, task("dtd"))


def test_near_duplicates_stay_in_one_split(tmp_path, few):
    """Four near-duplicates of each scene: a split by content alone would separate most of them."""
    root = tmp_path / "eurosat"
    for number, scene in enumerate(generated(40, (48, 64))):
        for copy, change in enumerate(("PNG", "JPEG quality 50", "WebP", "brighter")):
            data, ending = CHANGES[change](scene)
            place = root / "ab"[number % 2] / f"{number}-{copy}{ending}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
    train, val, _ = vtab_splits(open_dataset(root, None), task("eurosat"))
    assert (len(train), len(val)) == (16, 8)
    scenes = [{one.name(row).split("/")[-1].partition("-")[0] for row in range(len(one))} for one in (train, val)]
    assert not scenes[0] & scenes[1]


def test_a_fifth_of_pets_is_for_validation_and_a_tenth_of_others(tmp_path, few):
    for name, colour in (("a", (200, 60, 60)), ("b", (60, 60, 200))):
        draw(tmp_path / "pets" / "train" / name, colour, 20)
        draw(tmp_path / "pets" / "test" / name, tuple(value + 1 for value in colour), 5)
    data = open_dataset(tmp_path / "pets", None)
    train, val, test = vtab_splits(data, task("oxford_iiit_pet"))
    assert (len(train), len(val), len(test)) == (16, 8, 10)  # of 32, 8 and 10
    drawn = data.splits["train"].digests[np.argsort(data.splits["train"].original_digests, kind="stable")]
    assert set(val.digests.tolist()) == set(drawn[32:].tolist())
    with pytest.raises(UserError, match=r"36 training and 4 validation"):
        vtab_splits(data, task("cifar"))


def test_thirty_of_each_class_train_caltech(tmp_path, few, monkeypatch):
    for name, colour in (("a", (200, 60, 60)), ("b", (60, 60, 200))):
        draw(tmp_path / name, colour, 54)
    monkeypatch.setattr(vtab_workflow, "VAL", 6)
    test = vtab_splits(open_dataset(tmp_path, None), task("caltech101"))[2]
    assert np.bincount(test.labels).tolist() == [24, 24]
    monkeypatch.setattr(vtab_workflow, "TRAIN", 800)
    with pytest.raises(UserError, match=r"54 training and 6 validation images, .* 800 and 6"):
        vtab_splits(open_dataset(tmp_path, None), task("caltech101"))


def test_folders_and_tasks_that_do_not_exist(tiny, tmp_path, quiet):
    for arguments, facts in [
        ((tiny, tmp_path / "nowhere"), "is not a folder"),
        ((tiny, tmp_path), "no task of VTAB-1k"),
    ]:
        with pytest.raises(UserError, match=facts):
            vtab(*arguments, console=quiet)
    with pytest.raises(UserError, match="no task 'dtdd'; did you mean 'dtd'"):
        vtab(tiny, tmp_path, tasks=("dtdd",), console=quiet)


def test_the_penalty_is_chosen_on_the_validation_images(tiny, tmp_path, quiet, few, monkeypatch):
    lists(tmp_path / "patch_camelyon")
    sizes, fit = [], vtab_workflow.fit_probe
    monkeypatch.setattr(
        vtab_workflow, "fit_probe", lambda x, *rest, **named: sizes.append(len(x)) or fit(x, *rest, **named)
    )
    vtab(tiny, tmp_path, device="cpu", console=quiet)
    assert sizes == [16] * 5 + [24]


def test_seen_test_images_and_options_without_effect_are_reported(tiny, tmp_path, quiet, few):
    root = lists(tmp_path / "patch_camelyon")
    card = read_card(tiny)
    test = open_dataset(root, None).splits["test"]
    card = card.model_copy(
        update={
            "data": {
                **card.data,
                "trained_before": [[f"{digest:016x}" for digest in test.original_digests[:3].tolist()]],
            }
        }
    )
    weights = tmp_path / "weights.safetensors"
    write_bundle(weights, load_file(tiny), card)
    (score,) = vtab(weights, tmp_path, device="cpu", console=quiet).scores
    assert "the weights were trained on 3 of the test images: the score is too high" in score.notes
    with pytest.raises(UserError, match=r"--seeds .* --by finetune"):
        vtab(tiny, tmp_path, seeds=3, console=quiet)
    with pytest.raises(UserError, match=r"--set model.image_size=\[96,96\]"):
        vtab(tiny, tmp_path, by="finetune", image_size=(96, 96), console=quiet)


@pytest.mark.slow
def test_fine_tuning_uses_all_1000_images_and_no_label_changing_augmentation(tiny, tmp_path, quiet):
    lists(tmp_path / "dsprites_loc")
    quick = ("train.steps=2", "train.batch_size=8", "precision.compute=fp32", "model.image_size=[16, 16]")
    options = {"by": "finetune", "out": tmp_path / "runs", "overrides": quick, "console": quiet}
    (score,) = vtab(tiny, tmp_path, **options).scores
    card = read_card(tmp_path / "runs" / "dsprites_loc" / "seed-0" / "model.safetensors")
    assert card.data["images"]["train"] == 16 + 8 and score.tested == 7 and score.accuracy == card.metrics["top1"]
    assert card.recipe["augment"]["flip"] is False and card.recipe["augment"]["crop"] == "none"
    assert vtab(tiny, tmp_path, **options).scores == [score]  # finished runs are used as they are
    draw(tmp_path / "eurosat" / "a", (1, 2, 3), 2)
    with pytest.raises(UserError, match=r"train800.txt.* eurosat .*--tasks"):
        vtab(tiny, tmp_path, **options)


@pytest.mark.slow
def test_all_tasks_are_listed_without_weights():
    done = vitrail("vtab", "--json")
    assert done.returncode == 0 and len(json.loads(done.stdout)) == 19
    assert "Clevr-Count" in vitrail("vtab").stdout
    assert "vitrail vtab WEIGHTS FOLDER" in vitrail("vtab", "weights").stderr


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_number_of_processes(tiny, tmp_path, monkeypatch):
    lists(tmp_path / "tasks" / "patch_camelyon", (800, 200, 131))
    outputs = []
    for world in (1, 2, 3):
        monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / f"cache_{world}"))
        command = ["vtab", tiny, tmp_path / "tasks", "--json", "--device", "cpu"]
        started = processes.start(world, tmp_path, processes.vitrail, *command)
        assert started.codes() == [0] * world, started.errors()
        outputs.append(json.loads(started.output()))
    assert outputs[0] == outputs[1] == outputs[2] and outputs[0]["scores"][0]["tested"] == 131


def test_clevr_is_read_with_the_rule_of_each_task(tiny, tmp_path, quiet, few):
    rng = np.random.default_rng(0)
    root = tmp_path / "clevr_count"
    for split, count in (("train", 80), ("val", 9)):
        (root / "images" / split).mkdir(parents=True)
        (root / "scenes").mkdir(exist_ok=True)
        written = []
        for number in range(count):
            name, objects = f"CLEVR_{split}_{number:06d}.png", 3 + number % 8
            pixels = rng.integers(0, 9 + 30 * (number % 8), (16, 16, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(root / "images" / split / name)
            written.append({"image_filename": name, "objects": [{"pixel_coords": [0, 0, 7 + number % 5]}] * objects})
        (root / "scenes" / f"CLEVR_{split}_scenes.json").write_text(json.dumps({"scenes": written}))
    (tmp_path / "clevr_dist").symlink_to(root)
    found = vtab(tiny, tmp_path, device="cpu", console=quiet)
    assert [(one.key, one.tested, one.published) for one in found.scores] == [
        ("clevr_count", 9, False),
        ("clevr_dist", 9, False),
    ]
    assert not any("classes, but the task has" in note for one in found.scores for note in one.notes)


@pytest.mark.parametrize("task", VTAB_TASKS, ids=lambda task: task.key)
def test_a_setting_is_applied_to_the_tasks_that_use_it(task):
    """A task without crops must not fail on a crop setting after hours of other tasks."""
    given = parse_overrides(task_overrides(task, ["augment.scale=[0.5, 1.0]", "augment.ratio=[1.0, 1.0]"]))
    assert ("scale" in given["augment"]) == task.crop
    check_no_unused(leaves(given), RunConfig.model_validate(merge(read_recipe(RECIPE), given)))
