"""`read_weights`: locations, layout detection, and errors for unknown ones."""

from __future__ import annotations

import os
import pickle
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

from vitrail.errors import UserError
from vitrail.weights.bundle import write_bundle
from vitrail.weights.read import read_weights

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture
def run_folder(tmp_path, state, card) -> Path:
    folder = tmp_path / "flowers"
    folder.mkdir()
    (folder / "config.toml").write_text("kind = 'train'\n")
    (folder / "metrics.jsonl").write_text("{}\n")
    write_bundle(folder / "model.safetensors", state, card)
    return folder


def test_a_run_folder_and_its_file_are_the_same(run_folder, state, card, monkeypatch):
    monkeypatch.chdir(run_folder.parent)
    for spec in ("flowers", "flowers/model.safetensors", str(run_folder)):
        weights = read_weights(spec)
        assert weights.card == card
        assert all(torch.equal(weights.state[name], tensor) for name, tensor in state.items())


def test_the_layout_is_detected_from_the_contents(run_folder, tmp_path):
    (run_folder / "model.safetensors").rename(tmp_path / "weights.npz")
    assert read_weights(str(tmp_path / "weights.npz")).card.classes
    (tmp_path / "model.safetensors").write_bytes((FIXTURES / "google_vit_gap.npz").read_bytes())
    assert read_weights(str(tmp_path / "model.safetensors")).card.model.pool == "gap"


def test_a_header_whose_length_looks_like_another_format(run_folder, tmp_path, state, card):
    """The first bytes of a safetensors file are a number, which may well spell an archive's or a pickle's mark."""
    for mark in (b"PK", b"\x80\x02"):
        content = (run_folder / "model.safetensors").read_bytes()
        length = int.from_bytes(content[:8], "little")
        wanted = int.from_bytes(mark, "little")
        while wanted < length:
            wanted += 1 << 16
        padded = content[8 : 8 + length] + b" " * (wanted - length)
        (tmp_path / "marked").write_bytes(wanted.to_bytes(8, "little") + padded + content[8 + length :])
        assert (tmp_path / "marked").read_bytes().startswith(mark)
        assert read_weights(str(tmp_path / "marked")).card == card


def test_our_file_knows_its_size(run_folder):
    assert read_weights(str(run_folder), image_size=(16, 24)).card.model.image_size == (16, 24)
    with pytest.raises(UserError, match="is for 16x24 images, not 32x32"):
        read_weights(str(run_folder), image_size=(32, 32))


def test_a_folder_with_one_file_of_any_name(tmp_path, run_folder):
    (tmp_path / "google").mkdir()
    (tmp_path / "google" / "ViT.npz").write_bytes((FIXTURES / "google_vit_gap.npz").read_bytes())
    assert read_weights(str(tmp_path / "google")).card.source.startswith(f"{tmp_path.name}/google (square 16x16 images")
    (tmp_path / "google" / "more.safetensors").touch()
    with pytest.raises(UserError, match=r"has 2 weights files and no model.safetensors"):
        read_weights(str(tmp_path / "google"))


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        ("flowers/model.safetensor", r"no weights at .*; did you mean 'flowers/model.safetensors'\?"),
        ("flower", r"; did you mean 'flowers'\?"),
        ("bundle", r"no weights at 'bundle'; did you mean 'bundled'\?"),
        ("nowhere/at/all", "no weights at 'nowhere/at/all'$"),
        ("google/vit-base", "write 'hf-hub:google/vit-base'"),
    ],
)
def test_a_path_that_is_not_there(run_folder, monkeypatch, spec, pattern):
    monkeypatch.chdir(run_folder.parent)
    with pytest.raises(UserError, match=pattern):
        read_weights(spec)


def test_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match=r"has no weights file"):
        read_weights(str(tmp_path))


def test_a_network_of_another_kind(tmp_path):
    save_file({"layer1.conv.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no known layout"):
        read_weights(str(tmp_path))


@pytest.mark.parametrize("old", [True, False])
def test_pickles_are_refused_whatever_their_name(tmp_path, old):
    for name in ("pytorch_model.bin", "weights.safetensors"):
        torch.save({"a": torch.zeros(2)}, tmp_path / name, _use_new_zipfile_serialization=not old)
        with pytest.raises(UserError, match=r"is a pickle, which can run code.*vitrail convert .*--allow-pickle"):
            read_weights(str(tmp_path / name))
    (tmp_path / "weights.safetensors").unlink()
    with pytest.raises(UserError, match="is a pickle"):
        read_weights(str(tmp_path))


def test_a_pickle_is_opened_when_asked_to(tmp_path, randomise):
    timm = pytest.importorskip("timm")
    model = randomise(timm.create_model("vit_small_patch16_224", depth=1, num_classes=4))
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "pytorch_model.bin")
    for spec in (tmp_path / "pytorch_model.bin", tmp_path):
        weights = read_weights(str(spec), pickle=True)
        assert torch.equal(weights.state["head.weight"], model.head.weight)
        assert weights.layout == "timm"


def test_no_pickle_is_ever_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    (tmp_path / "model.pt").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UserError, match="is a pickle"):
        read_weights(str(tmp_path / "model.pt"))
    assert not (tmp_path / "sprung").exists()


def test_a_config_that_is_not_json(tmp_path):
    save_file({"patch_embed.proj.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json' is not valid JSON"):
        read_weights(str(tmp_path))


def test_json_files_that_are_too_large_or_no_files(tmp_path):
    save_file({"patch_embed.proj.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(3_000_000_000)
    with pytest.raises(UserError, match="has 3,000,000,000 bytes; JSON files are read up to"):
        read_weights(str(tmp_path))
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"config.json' is a pipe"):
        read_weights(str(tmp_path))


def test_files_without_weights(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "empty.safetensors").touch()
    with zipfile.ZipFile(tmp_path / "papers.zip", "w") as archive:
        archive.writestr("thesis.txt", "pattern")
    for name, pattern in {
        "pipe.safetensors": "is a pipe, a socket or a device",
        "empty.safetensors": "is empty",
        "papers.zip": "is a zip archive without weights",
    }.items():
        with pytest.raises(UserError, match=pattern):
            read_weights(str(tmp_path / name))


@pytest.mark.parametrize(("spec", "expected"), [("", "no weights at ''"), ("x" * 300, "300 characters")])
def test_invalid_specs(spec, expected):
    with pytest.raises(UserError, match=expected):
        read_weights(spec)


@pytest.fixture
def hub(monkeypatch):
    """A Hub that answers with a folder, or with an error; what it was asked is kept."""

    def answer(result: Path | Exception) -> list[tuple[str, str | None]]:
        asked: list[tuple[str, str | None]] = []

        def snapshot_download(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
            asked.append((repo_id, revision))
            assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in allow_patterns)
            if isinstance(result, Exception):
                raise result
            return str(result)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        return asked

    return answer


def test_the_hub(run_folder, hub, card):
    asked = hub(run_folder)
    assert read_weights("hf-hub:owner/name").card == card
    assert read_weights("hf-hub:owner/name@v2").card == card
    assert asked == [("owner/name", None), ("owner/name", "v2")]


def test_the_source_of_foreign_weights_names_the_commit(tmp_path, hub):
    commit = "0123456789abcdef0123456789abcdef01234567"
    (tmp_path / commit).mkdir()
    (tmp_path / commit / "model.safetensors").write_bytes((FIXTURES / "google_vit_gap.npz").read_bytes())
    hub(tmp_path / commit)
    assert read_weights("hf-hub:owner/name@main").card.source.startswith(f"hf-hub:owner/name@{commit} (")


RESPONSE = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "pattern"),
    [
        (errors.RepositoryNotFoundError("404", response=RESPONSE), "the Hub has no model 'owner/name'"),
        (errors.RevisionNotFoundError("404", response=RESPONSE), "'owner/name' has no revision 'v2'"),
        (errors.GatedRepoError("403", response=RESPONSE), "'owner/name' is a gated model"),
        (errors.LocalEntryNotFoundError("no"), "the Hub cannot be reached.*--from bundled"),
        (errors.OfflineModeIsEnabled("no"), "not in the local cache, and the Hub cannot be reached"),
        (errors.HfHubHTTPError("500 from the server", response=RESPONSE), "'owner/name' could not be downloaded.*500"),
        (ConnectionError("no route to host"), "could not be downloaded.*no route to host.*--from bundled"),
        (errors.HTTPError("The read operation\ntimed out"), "could not be downloaded.*timed out.*--from bundled"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_of_the_hub_are_one_sentence(hub, error, pattern):
    hub(error)
    with pytest.raises(UserError, match=pattern) as caught:
        read_weights("hf-hub:owner/name@v2")
    assert "\n" not in str(caught.value)


def test_a_hub_that_answers_and_refuses_is_not_called_out_of_reach(hub):
    error = errors.LocalEntryNotFoundError("cannot find the file in the cache")
    error.__cause__ = errors.HfHubHTTPError("403 Forbidden", response=RESPONSE)
    hub(error)
    with pytest.raises(UserError, match=r"could not be downloaded from the Hub: 403 Forbidden.*--from bundled"):
        read_weights("hf-hub:owner/name")


def test_the_real_client_offline(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="not in the local cache, and the Hub cannot be reached"):
        read_weights("hf-hub:owner/name")
    with pytest.raises(UserError, match="write hf-hub:owner/name or hf-hub:owner/name@revision"):
        read_weights("hf-hub:not a name")


def test_the_hub_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'vitrail\[hub\]'"):
        read_weights("hf-hub:owner/name")
