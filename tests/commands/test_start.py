"""What a run starts from when nobody says: a network of the Hub where one can be had, else the bundled one."""

from __future__ import annotations

import tomllib
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import errors
from rich.console import Console
from safetensors.torch import load_file

from vitrail.config import ModelConfig, Preprocess, RunConfig, merge, parse_overrides, read_recipe
from vitrail.errors import UserError
from vitrail.models.build import build_model
from vitrail.models.flops import count_parameters
from vitrail.models.variants import config_from_name
from vitrail.weights.backbones import BACKBONES, BASE, SMALL, TINY
from vitrail.weights.bundle import Card, read_card
from vitrail.weights.formats import timm as timm_format
from vitrail.workflows.choose import ChoiceInputs, choose_backbone
from vitrail.workflows.starting_weights import choose_start, random_start_decision, starts_automatically
from vitrail.workflows.train_run import train

timm = pytest.importorskip("timm")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("backbone", BACKBONES, ids=lambda backbone: backbone.network)
def test_the_table_says_what_timm_and_arithmetic_say(backbone):
    known = timm.models.get_pretrained_cfg(backbone.repository.removeprefix("timm/"))
    assert known.hf_hub_id == backbone.repository and known.license == backbone.licence
    assert known.input_size == (3, 224, 224)
    assert count_parameters(config_from_name(backbone.network, 0)) / 1e6 == pytest.approx(backbone.parameters, abs=0.05)
    whole = 4e-6 * count_parameters(config_from_name(backbone.network, known.num_classes))
    assert whole == pytest.approx(backbone.megabytes, abs=0.5)


def test_the_machine_and_the_data_choose():
    def facts(images: int, device: str) -> ChoiceInputs:
        return ChoiceInputs(images, 3, (500, 400), device, None)

    assert choose_backbone(facts(100_000, "cpu"))[0] == TINY
    assert choose_backbone(facts(500, "cuda"))[0] == SMALL
    assert choose_backbone(facts(5_000, "cuda"))[0] == BASE


def opened(recipe: str | None = None, *settings: str) -> bool:
    values = merge(read_recipe(recipe) if recipe else {}, parse_overrides(settings))
    return starts_automatically(RunConfig.model_validate(values), recipe)


def test_whoever_names_a_network_or_weights_or_asks_for_random_ones_gets_that():
    assert opened(None, "train.steps=3", "model.image_size=[64, 64]", "model.head_init=probe")
    assert not opened("scratch") and not opened("cifar") and not opened("paper-pretrain")
    assert not opened(None, "model.name=S/16")
    assert not opened(None, "model.channels=1")
    assert not opened(None, "model.weights=runs/a")
    assert not opened(None, "kind=masked")


@pytest.mark.parametrize("recipe", ["finetune", "lora", "probe"])
def test_a_recipe_for_fine_tuning_finds_weights_as_a_run_without_recipe_does(recipe):
    assert opened(recipe)
    assert not opened(recipe, "model.weights=bundled")
    with pytest.raises(UserError, match=r"--model S/16 .*--from WEIGHTS"):
        opened(recipe, "model.name=S/16")


@pytest.mark.parametrize("recipe", ["paper-finetune", "paper-finetune-pets", "bit-large"])
def test_a_recipe_of_a_paper_wants_its_weights_named(recipe):
    with pytest.raises(UserError, match=f"recipe {recipe} .*--from WEIGHTS"):
        opened(recipe)
    assert not opened(recipe, "model.weights=bundled")


@pytest.mark.parametrize(
    ("recipe", "setting", "why"),
    [
        ("scratch", "train.steps=1", "recipe scratch"),
        (None, "model.name=S/16", "model.name=S/16"),
        (None, "model.channels=1", "model.channels=1"),
        (None, "kind=masked", "kind=masked"),
        (None, "model.start=random", "model.start=random"),
    ],
)
def test_random_weights_come_with_the_setting_that_causes_them(recipe, setting, why):
    values = merge(read_recipe(recipe) if recipe else {}, parse_overrides([setting]))
    decision = random_start_decision(RunConfig.model_validate(values), recipe)
    assert (decision.what, decision.value) == ("start", "random weights")
    assert why in decision.why and "--from WEIGHTS" in decision.why


@pytest.mark.slow
def test_an_own_recipe_on_top_of_one_for_fine_tuning_finds_weights_too(bundled, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "mine.toml").write_text('base = "finetune"\n[optimizer]\nlr = 2e-4\n')
    log = StringIO()
    steps = ("train.steps=1", "train.batch_size=8", "precision.compute=fp32")
    result = train(photos, recipe=str(tmp_path / "mine.toml"), out=tmp_path / "run", overrides=steps,
                   console=Console(file=log, width=400))  # fmt: skip
    assert "start: bundled Ti/8" in log.getvalue()
    assert read_card(result.weights).source == "bundled ti8-stand-in"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A Hub with one small network in timm's layout; asked for what lies in the cache, it has nothing."""
    folder = tmp_path / "hub" / COMMIT
    folder.mkdir(parents=True)
    model = ModelConfig(width=48, depth=1, mlp_dim=96, heads=3, patch=(8, 8), image_size=(16, 16), num_classes=7)
    torch.manual_seed(0)
    card = Card(model=model, preprocess=Preprocess(size=(16, 16)), created_with="a test")
    timm_format.write(folder, card, build_model(model).state_dict())
    asked: list[str] = []

    def snapshot_download(repo_id: str, *, local_files_only: bool = False, **_: object) -> str:
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not there")
        asked.append(repo_id)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, name, timeout: SimpleNamespace(id=name))
    return SimpleNamespace(folder=folder, asked=asked)


@pytest.mark.slow
def test_a_run_starts_from_the_hub_and_says_so(hub, photos, tmp_path):
    log = StringIO()
    console = Console(file=log, width=200)
    steps = ("train.steps=2", "train.batch_size=8", "precision.compute=fp32")
    result = train(photos, out=tmp_path / "run", overrides=steps, console=console)
    assert hub.asked == [TINY.repository]
    text = " ".join(log.getvalue().split())
    assert f"downloading {TINY.repository} (39 MB, apache-2.0) from the Hub" in text
    assert "no GPU" in text and "--recipe scratch" in text
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert written["model"]["weights"] == f"hf-hub:{TINY.repository}@{COMMIT}"
    assert written["recipe"] in ("finetune", "probe")
    theirs = load_file(hub.folder / "model.safetensors")["blocks.0.mlp.fc1.weight"]
    ours = load_file(result.weights)["blocks.0.mlp.fc1.weight"]
    assert (ours - theirs).abs().max() < 0.02  # two steps away, and not another random draw


def test_if_the_hub_cannot_be_reached_the_bundled_network_is_used_with_the_reason(hub, bundled, monkeypatch):
    def silent(self: object, name: str, timeout: float) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", silent)
    weights, spec, decision = choose_start(ChoiceInputs(45, 3, (20, 24), "cpu", None), lambda _: None)
    assert weights.file == bundled and spec == "bundled"
    assert decision.value == "bundled Ti/8 at 64 px (0 MB, for research)"
    for fact in (TINY.repository, "Hub", "1,234 images of other-pictures", "--from WEIGHTS", "--recipe scratch"):
        assert fact in decision.why
    assert hub.asked == []


def test_offline_the_network_is_not_used(hub, bundled, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_: pytest.fail("the network was used"))
    _, _, decision = choose_start(ChoiceInputs(45, 3, (20, 24), "cpu", None), lambda _: None)
    assert f"{TINY.repository} is not in the local cache, and HF_HUB_OFFLINE is set" in decision.why


@pytest.mark.parametrize("error", [errors.HTTPError, OSError, TimeoutError], ids=lambda kind: kind.__name__)
def test_if_the_download_fails_the_bundled_network_is_used(hub, bundled, monkeypatch, error):
    messages: list[str] = []

    def broken(repo_id: str, *, local_files_only: bool = False, **_: object) -> str:
        raise error("403") if not local_files_only else errors.LocalEntryNotFoundError("not there")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    weights, spec, decision = choose_start(ChoiceInputs(45, 3, (20, 24), "cpu", None), messages.append)
    assert weights.file == bundled and spec == "bundled" and messages
    assert decision.why.startswith(f"because '{TINY.repository}'") and ": 403; " in decision.why


def test_a_cached_network_is_used_without_the_hub(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(hub.folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    weights, spec, _ = choose_start(ChoiceInputs(45, 3, (20, 24), "cpu", None), lambda _: None)
    assert weights is not None and spec.endswith(COMMIT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Cyclopts application invoked")
def test_offline_a_folder_is_trained_from_the_bundled_network(bundled, photos, tmp_path, typed):
    """In one line: what, why, and how to have it otherwise. And nothing but --recipe scratch is random."""
    quick = [part for setting in ("train.steps=2", "train.batch_size=8", "precision.compute=fp32")
             for part in ("--set", setting)]  # fmt: skip
    code, text, _ = typed("train", photos, "--out", tmp_path / "run", *quick)
    assert code == 0
    (line,) = (line for line in text.splitlines() if line.startswith("start: "))
    assert "bundled Ti/8 at 64 px" in line and "HF_HUB_OFFLINE is set" in line and "--recipe scratch" in line
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert written["model"]["weights"] == "bundled" and written["recipe"] == "finetune"
    card = read_card(tmp_path / "run" / "model.safetensors")
    assert card.source == "bundled ti8-stand-in" and card.licence == "for research"

    code, text, _ = typed("train", photos, "--recipe", "scratch", "--out", tmp_path / "scratch", *quick)
    assert code == 0 and "start: random weights because of the recipe scratch; " in text
    assert read_card(tmp_path / "scratch" / "model.safetensors").source == ""


def test_without_the_bundled_file_a_run_does_not_quietly_begin_at_random(photos, tmp_path, monkeypatch, quiet):
    monkeypatch.setattr("vitrail.weights.names.BUNDLED_FILE", tmp_path / "gone.safetensors")
    with pytest.raises(UserError, match=r"bundled weights .*missing"):
        train(photos, out=tmp_path / "run", console=quiet)


@pytest.mark.slow
def test_fine_tuning_begins_where_the_probe_ends(photos, tiny, tmp_path):
    """So that few steps are enough to be no worse than it."""

    def run(name: str, *settings: str) -> tuple[float, str]:
        log = StringIO()
        overrides = ("train.steps=1", "optimizer.lr=1e-12", "train.batch_size=8", "precision.compute=fp32", *settings)
        console = Console(file=log, width=200)
        result = train(photos, recipe="finetune", from_=tiny, out=tmp_path / name, overrides=overrides, console=console)
        return result.scores.top1, log.getvalue()

    accuracy, text = run("probe")
    assert f"baseline: {accuracy:.1%} (linear probe on the starting weights" in text
    assert "head: initialized with this linear probe" in text and "starts at zero" not in text and accuracy > 0.5
    assert "head: initialized with this linear probe" not in run("zero", "model.head_init=zero")[1]
