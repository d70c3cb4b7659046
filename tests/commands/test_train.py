import io
import json
import re
import shutil
import tomllib

import pytest
import torch
from rich.console import Console

import vitrail
from tests.commands.conftest import draw
from tests.small import SMALL
from vitrail.commands.evaluate import evaluate
from vitrail.data.dataset import open_dataset
from vitrail.distributed import SINGLE_PROCESS
from vitrail.errors import UserError
from vitrail.training.ema import EMA
from vitrail.training.progress import read_metrics
from vitrail.training.state import TrainState
from vitrail.weights.bundle import read_card
from vitrail.workflows.train_run import train

pytestmark = pytest.mark.slow  # whole runs
STEPS = (*SMALL, "train.steps=40", "optimizer.lr=3e-3", "train.log_every=5")


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    log = out.with_suffix(".log")
    console = Console(file=log.open("w"), width=200)
    return train(photos, recipe="scratch", out=out, overrides=STEPS, console=console), log


def test_a_folder_becomes_a_measured_classifier(trained, photos):
    result, log = trained
    assert result.scores.top1 > 0.8  # three plain colours: chance is a third
    assert {p.name for p in result.folder.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "checkpoints",
        "model.safetensors",
        "report.html",
        "model_card.md",
        "predictions.csv",
        "curves.svg",
    }
    text = log.read_text()
    assert "3 classes; images: 36 train, 9 val" in text
    assert "baseline: " in text and "linear probe on 16x16 thumbnails" in text
    assert "Measured on 9 images of the validation split, none of them trained on." in text


def test_the_card_of_the_weights(trained, photos):
    result, _ = trained
    card = read_card(result.weights)
    assert card.classes == ("blue", "green", "red")
    assert card.preprocess.size == (16, 16) == card.model.image_size
    assert card.data["images"] == {"train": 36, "val": 9} and len(card.data["fingerprint"]) == 32
    assert card.metrics["top1"] == result.scores.top1
    assert card.recipe["train"]["steps"] == 40 and card.recipe["recipe"] == "scratch"


def test_metrics_are_rows_with_steps(trained):
    rows = read_metrics(trained[0].folder / "metrics.jsonl")
    training = [row for row in rows if "loss" in row]
    assert [row["step"] for row in training] == list(range(5, 41, 5))
    assert training[-1]["loss"] < training[0]["loss"]
    assert [row["step"] for row in rows if "val_top1" in row] == list(range(4, 41, 4))


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_the_last_validation_equals_the_result(photos, tmp_path, weights):
    console = Console(file=io.StringIO(), width=200)
    settings = [
        "train.steps=20",
        "optimizer.lr=1e-2",
        "train.evaluate_every=10",
        "train.ema=0.5",
        "precision.compute=bf16",
        "objective.label_smoothing=0",
    ]
    overrides = [*SMALL, *settings, f"precision.parameters={weights}"]
    result = train(photos, recipe="scratch", out=tmp_path, overrides=overrides, console=console)
    measured = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "val_top1" in row]
    assert [row["step"] for row in measured] == [10, 20]
    if weights == "fp32":
        assert measured[-1]["val_top1"] == pytest.approx(result.scores.top1, abs=1e-9)
        assert measured[-1]["val_loss"] == pytest.approx(result.scores.nll, rel=1e-5)
    assert ("measured in float32" in console.file.getvalue()) == (weights == "bf16")


def test_the_written_config_repeats_the_run_to_the_bit(trained, quiet, tmp_path):
    result, _ = trained
    config = tomllib.loads((result.folder / "config.toml").read_text())
    assert config["train"]["steps"] == 40 and config["preprocess"]["mean"] == [0.5, 0.5, 0.5]
    again = train(recipe=str(result.folder / "config.toml"), out=tmp_path, console=quiet)
    ours, theirs = vitrail.load(result.weights).net.state_dict(), vitrail.load(again.weights).net.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_evaluate_scores_the_validation_split_of_the_training_folder(trained, photos, quiet, tmp_path):
    result, _ = trained
    scores = evaluate(result.weights, photos, report=tmp_path / "r.html", console=quiet)
    assert scores.n == 9 and scores.top1 == result.scores.top1
    assert (tmp_path / "r.html").is_file()


def test_evaluate_measures_all_images_of_another_folder(trained, quiet, tmp_path):
    for name, colour in {"red": (200, 70, 60), "blue": (60, 70, 200)}.items():
        draw(tmp_path / "more" / name, colour, 4)
    scores = evaluate(trained[0].folder, tmp_path / "more", report=tmp_path / "r.html", console=quiet)
    assert scores.n == 8
    draw(tmp_path / "more" / "gren", (60, 200, 60), 2)
    with pytest.raises(
        UserError, match=r"class folder 'gren' .* is not one of the known classes; did you mean 'green'"
    ):
        evaluate(trained[0].folder, tmp_path / "more", console=quiet)


def test_evaluate_excludes_training_images(trained, photos, quiet, tmp_path):
    """Also in a changed folder, under other names, or mixed with new images."""
    changed = tmp_path / "changed"
    shutil.copytree(photos, changed)
    (changed / "red" / "000.png").rename(changed / "red" / "renamed.png")
    draw(changed / "red" / "new", (210, 50, 50), 2)
    scores = evaluate(trained[0].weights, changed, report=tmp_path / "r.html", console=quiet)
    assert scores.n == 9 + 2  # the held-out ones and the new ones
    assert repr(scores).endswith("of 11 images in 3 classes>")
    assert "36 images that these weights were trained on are excluded" in (tmp_path / "r.html").read_text()
    only = tmp_path / "only"
    for name in read_card(trained[0].weights).classes:
        (only / name).mkdir(parents=True)
    dataset = open_dataset(photos)
    for index in range(len(dataset.splits["train"])):
        name = dataset.splits["train"].name(index)
        shutil.copy(photos / name, only / name)
    with pytest.raises(UserError, match="trained on every image"):
        evaluate(trained[0].weights, only, console=quiet)


def test_given_epochs_win_over_the_steps_of_a_recipe(photos, quiet, tmp_path):
    (tmp_path / "r.toml").write_text('base = "scratch"\n[train]\nsteps = 50\n')
    result = train(
        photos, recipe=str(tmp_path / "r.toml"), out=tmp_path / "o", overrides=[*SMALL, "train.epochs=1"], console=quiet
    )
    assert read_card(result.weights).recipe["train"]["steps"] == round(36 / 8)


def test_a_lost_report_comes_back_with_resume(photos, quiet, tmp_path, monkeypatch):
    """Weights are written last: a run that dies before them can be finished."""
    from vitrail.workflows import finish

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finish, "write_bundle", die)
        with pytest.raises(KeyboardInterrupt):
            train(photos, out=tmp_path / "o", overrides=[*SMALL, "train.steps=2"], console=quiet)
    (tmp_path / "o" / "report.html").unlink()
    result = train(out=tmp_path / "o", resume=True, console=quiet)
    assert result.report.is_file() and result.weights.is_file()


def test_an_unwritable_folder_is_an_error_before_the_scan(photos, tmp_path, quiet, monkeypatch):
    monkeypatch.setattr("vitrail.workflows.train_run.make_plan", lambda *_: pytest.fail("the images were looked at"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*file/run"):
        train(photos, out=tmp_path / "file" / "run", console=quiet)


@pytest.mark.filterwarnings("ignore:Cyclopts application invoked")
def test_the_end_of_a_run_prints_the_next_commands(photos, tmp_path, typed):
    settings = [word for setting in (*SMALL, "train.steps=1") for word in ("--set", setting)]
    code, out, error = typed("train", photos, "--out", tmp_path / "my run", *settings)
    assert code == 0, error
    run = f"'{tmp_path / 'my run'}'"
    assert out.splitlines()[-2:] == [
        f"next:    vitrail predict {run} photo.jpg",
        f"next:    vitrail evaluate {run} more_photos/",
    ]


def test_fine_tuning_starts_from_the_weights_and_beats_the_same_steps_without(trained, photos, quiet, tmp_path):
    few = ("train.steps=10", "train.batch_size=8", "precision.compute=fp32")
    tuned = train(photos, from_=trained[0].folder, recipe="finetune", out=tmp_path / "t", overrides=few, console=quiet)
    card = read_card(tuned.weights)
    assert card.source == "/".join(trained[0].folder.parts[-2:])  # not the whole path of this machine
    assert card.model == read_card(trained[0].weights).model
    fresh = train(
        photos, recipe="finetune", out=tmp_path / "f", overrides=(*SMALL, *few, "model.start=random"), console=quiet
    )
    assert tuned.scores.nll < fresh.scores.nll


def test_fine_tuning_at_a_higher_resolution_resamples_positions(trained, photos, tmp_path):
    from rich.console import Console

    log = tmp_path / "log"
    with log.open("w") as file:
        overrides = ("train.steps=2", "train.batch_size=8", "precision.compute=fp32", "model.image_size=[24, 32]")
        result = train(
            photos,
            from_=trained[0].weights,
            recipe="finetune",
            out=tmp_path / "t",
            overrides=overrides,
            console=Console(file=file, width=200),
        )
    assert read_card(result.weights).preprocess.size == (24, 32)
    assert "2x2 -> 3x4" in log.read_text()


def test_the_probe_recipe_makes_a_complete_classifier(trained, photos, quiet, tmp_path):
    result = train(photos, from_=trained[0].weights, recipe="probe", out=tmp_path / "p", console=quiet)
    assert result.scores.top1 > 0.8
    ours, start = vitrail.load(result.weights).net, vitrail.load(trained[0].weights).net
    assert torch.equal(ours.norm.weight, start.norm.weight)
    assert not torch.equal(ours.head.weight, start.head.weight)
    again = train(recipe=str(result.folder / "config.toml"), out=tmp_path / "again", console=quiet)
    assert torch.equal(vitrail.load(again.weights).net.head.weight, ours.head.weight)


def test_given_splits_are_used_and_the_test_split_is_measured(tmp_path, quiet):
    for split, count in {"train": 10, "val": 3, "test": 4}.items():
        draw(tmp_path / "d" / split / "red", (200, 60, 60), count)
        draw(tmp_path / "d" / split / "blue", (60, 60, 200), count)
    result = train(tmp_path / "d", out=tmp_path / "o", overrides=(*SMALL, "train.steps=2"), console=quiet)
    assert result.scores.n == 8
    assert "8 images of the test split" in read_card(result.weights).metrics["measured_on"]


def test_an_existing_run_is_not_overwritten_by_default(trained, photos, quiet):
    with pytest.raises(UserError, match="already holds a finished run"):
        train(photos, out=trained[0].folder, console=quiet)
    with pytest.raises(UserError, match="is finished"):
        train(out=trained[0].folder, resume=True, console=quiet)


def test_without_an_out_folder_runs_are_numbered(photos, quiet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [train(photos, overrides=(*SMALL, "train.steps=1"), console=quiet).folder for _ in range(2)]
    assert [str(name) for name in names] == ["runs/photos", "runs/photos-2"]


def test_the_public_api_is_lazy_and_complete(photos, tmp_path, quiet):
    assert vitrail.create("Ti/8", num_classes=4, image_size=16)(torch.zeros(1, 3, 16, 16)).shape == (1, 4)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        vitrail.trian  # noqa: B018
    public = {"create", "embed", "evaluate", "explain", "fit", "load", "predict", "train"}
    assert set(vitrail.__all__) == public
    for _ in range(2):  # the module that holds it must not take its name
        vitrail.train(photos, out=tmp_path / "o", overrides=[*SMALL, "train.steps=1"], overwrite=True, console=quiet)


def test_scores_are_json(trained):
    text = json.dumps(trained[0].scores.to_dict())
    assert json.loads(text)["n"] == 9


def test_a_recipe_file_wins_over_automatic_choices(photos, quiet, tmp_path):
    (tmp_path / "r.toml").write_text('base = "scratch"\n[train]\nbatch_size = 24\nsteps = 2\n')
    small = ["model.name=Toy/8", "model.image_size=[16, 16]", "precision.compute=fp32"]
    result = train(photos, recipe=str(tmp_path / "r.toml"), out=tmp_path / "o", overrides=small, console=quiet)
    assert read_card(result.weights).recipe["train"]["batch_size"] == 24
    with pytest.raises(UserError, match="set one of them"):
        train(photos, overrides=["train.steps=2", "train.epochs=3"], console=quiet)


def test_an_unwritable_report_is_an_error_before_the_work(trained, photos, quiet, tmp_path):
    for path in (tmp_path / "none" / "r.html", tmp_path):
        with pytest.raises(UserError, match="cannot write the report"):
            evaluate(trained[0].weights, photos, report=path, console=quiet)


def test_settings_without_effect_are_refused(trained, photos, quiet):
    for setting in ("model.pool=gap", "model.representation=true"):
        with pytest.raises(UserError, match=r"leave out model\.(pool|representation)"):
            train(photos, from_=trained[0].weights, overrides=[setting], console=quiet)
    with pytest.raises(UserError, match="not a S/16: their width is 48, not 384"):
        train(photos, from_=trained[0].weights, model="S/16", console=quiet)
    with pytest.raises(UserError, match="vitrail train DATA"):
        train(recipe="scratch", console=quiet)
    with pytest.raises(UserError, match=r"optimizer\.lr .*probe recipe"):
        train(photos, from_=trained[0].weights, recipe="probe", overrides=["optimizer.lr=1"], console=quiet)
    with pytest.raises(UserError, match=r"set model\.image_size, not preprocess\.size"):
        train(photos, overrides=[*SMALL, "preprocess.size=[8, 8]"], console=quiet)
    with pytest.raises(UserError, match="add --from WEIGHTS"):
        train(photos, recipe="paper-finetune-pets", console=quiet)


@pytest.mark.parametrize(
    "settings",
    [
        ("model.name=R+Toy/16", "model.image_size=[32, 64]"),
        ("model.name=R8x1", "model.image_size=[32, 32]"),
        ("model.name=Axial-Toy/8",),
        ("model.positions=relative", "model.layer_scale=0.1", "model.registers=2", "model.drop_path=0.1"),
        ("model.positions=2d", "model.positions_at=layers", "model.pool=map"),
    ],
    ids=lambda settings: settings[0],
)
def test_every_kind_of_network_trains_and_starts_another_at_a_larger_size(photos, quiet, tmp_path, settings):
    few = ("train.steps=2", "train.keep_checkpoints=1")
    first = train(photos, recipe="scratch", out=tmp_path / "a", overrides=(*SMALL, *settings, *few), console=quiet)
    model = read_card(first.weights).model
    larger = "x".join(str(2 * side) for side in model.image_size)
    log = tmp_path / "log"
    with log.open("w") as file:
        size = f"model.image_size=[{larger.replace('x', ', ')}]"
        again = train(
            photos,
            from_=first.weights,
            recipe="finetune",
            out=tmp_path / "b",
            overrides=(size, *few, "train.batch_size=8", "precision.compute=fp32", "model.resample=bicubic"),
            console=Console(file=file, width=200),
        )
    grown = read_card(again.weights).model
    assert grown.model_copy(update={"image_size": model.image_size, "drop_path": 0.0}) == model.model_copy(
        update={"drop_path": 0.0}
    )
    if model.kind == "vit":
        old, new = ("x".join(map(str, config.grid)) for config in (model, grown))
        how = (
            "relative position embedding resampled"
            if model.positions == "relative"
            else "position embedding resampled, bicubic as in DeiT"
        )
        assert f"grid {old} -> {new}" in log.read_text() and how in log.read_text()


def test_settings_that_a_network_does_not_have(photos, quiet, tmp_path):
    for setting in ("model.dropout=0.1", "model.positions=2d"):
        with pytest.raises(UserError, match=rf"{setting.partition('=')[0]} .*R26x1"):
            train(photos, model="R26x1", out=tmp_path / "run", overrides=(setting,), console=quiet)
    with pytest.raises(UserError, match=r"model\.representation .*ResNet"):
        train(photos, model="R26x1", out=tmp_path / "run", overrides=("model.representation=true",), console=quiet)
    assert not (tmp_path / "run").exists()


def test_a_run_below_the_baseline_prints_a_warning(photos, tmp_path):
    log = io.StringIO()
    steps = (*SMALL, "train.steps=3", "optimizer.lr=100.0")
    train(photos, recipe="scratch", out=tmp_path / "run", overrides=steps, console=Console(file=log, width=200))
    assert re.search(r"below the baseline, .*16x16 thumbnails.*--from WEIGHTS", log.getvalue())


def test_an_average_keeps_float32():
    """Weights trained in bfloat16 have three digits."""
    net = torch.nn.Linear(3, 2).bfloat16()
    average = EMA(net, 0.9)
    average.tensors["weight"].fill_(1 / 3)
    kept = TrainState(net, torch.optim.SGD(net.parameters()), average).final_weights(SINGLE_PROCESS)
    assert torch.equal(kept["weight"], torch.full((2, 3), 1 / 3)) and kept["bias"].dtype == torch.float32
