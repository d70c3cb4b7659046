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
    """A safetensors file starts with a number, whose bytes can equal the signature of an archive or a pickle."""
    for signature in (b"PK", b"\x80\x02"):
        content = (run_folder / "model.safetensors").read_bytes()
        length = int.from_bytes(content[:8], "little")
        padded_length = int.from_bytes(signature, "little")
        while padded_length < length:
            padded_length += 1 << 16
        padded = content[8 : 8 + length] + b" " * (padded_length - length)
        (tmp_path / "file").write_bytes(padded_length.to_bytes(8, "little") + padded + content[8 + length :])
        assert (tmp_path / "file").read_bytes().startswith(signature)
        assert read_weights(str(tmp_path / "file")).card == card


def test_image_size_of_a_vitrail_file(run_folder):
    assert read_weights(str(run_folder), image_size=(16, 24)).card.model.image_size == (16, 24)
    with pytest.raises(UserError, match=r"16x24 images.* 32x32"):
        read_weights(str(run_folder), image_size=(32, 32))


def test_a_folder_with_one_file_of_any_name(tmp_path, run_folder):
    (tmp_path / "google").mkdir()
    (tmp_path / "google" / "ViT.npz").write_bytes((FIXTURES / "google_vit_gap.npz").read_bytes())
    assert read_weights(str(tmp_path / "google")).card.source.startswith(f"{tmp_path.name}/google (square 16x16 images")
    (tmp_path / "google" / "more.safetensors").touch()
    with pytest.raises(UserError, match=r"2 weights files .*model\.safetensors"):
        read_weights(str(tmp_path / "google"))


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        ("flowers/model.safetensor", r"did you mean 'flowers/model\.safetensors'"),
        ("flower", r"did you mean 'flowers'"),
        ("bundle", r"'bundle'; did you mean 'bundled'"),
        ("nowhere/at/all", "'nowhere/at/all'$"),
        ("google/vit-base", "'hf-hub:google/vit-base'"),
    ],
)
def test_path_that_does_not_exist(run_folder, monkeypatch, spec, pattern):
    monkeypatch.chdir(run_folder.parent)
    with pytest.raises(UserError, match=pattern):
        read_weights(spec)


def test_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match=r"no weights file"):
        read_weights(str(tmp_path))


def test_a_network_of_another_kind(tmp_path):
    save_file({"layer1.conv.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no known layout"):
        read_weights(str(tmp_path))


@pytest.mark.parametrize("old", [True, False])
def test_pickles_are_refused_whatever_their_name(tmp_path, old):
    for name in ("pytorch_model.bin", "weights.safetensors"):
        torch.save({"a": torch.zeros(2)}, tmp_path / name, _use_new_zipfile_serialization=not old)
        with pytest.raises(UserError, match=r"is a pickle.*vitrail convert .*--allow-pickle"):
            read_weights(str(tmp_path / name))
    (tmp_path / "weights.safetensors").unlink()
    with pytest.raises(UserError, match="is a pickle"):
        read_weights(str(tmp_path))


def test_pickle_is_read_with_pickle_true(tmp_path, randomise):
    timm = pytest.importorskip("timm")
    model = randomise(timm.create_model("vit_small_patch16_224", depth=1, num_classes=4))
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "pytorch_model.bin")
    for spec in (tmp_path / "pytorch_model.bin", tmp_path):
        weights = read_weights(str(spec), pickle=True)
        assert torch.equal(weights.state["head.weight"], model.head.weight)
        assert weights.layout == "timm"


def test_pickle_is_not_opened_by_default(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    (tmp_path / "model.pt").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UserError, match="is a pickle"):
        read_weights(str(tmp_path / "model.pt"))
    assert not (tmp_path / "executed").exists()


def test_a_config_that_is_not_json(tmp_path):
    save_file({"patch_embed.proj.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json' is not valid JSON"):
        read_weights(str(tmp_path))


def test_json_files_that_are_too_large_or_no_files(tmp_path):
    save_file({"patch_embed.proj.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(3_000_000_000)
    with pytest.raises(UserError, match=r"3,000,000,000 bytes.* JSON"):
        read_weights(str(tmp_path))
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"config.json' is a pipe"):
        read_weights(str(tmp_path))


def test_files_without_weights(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "empty.safetensors").touch()
    with zipfile.ZipFile(tmp_path / "papers.zip", "w") as archive:
        archive.writestr("thesis.txt", "text")
    for name, pattern in {
        "pipe.safetensors": "pipe",
        "empty.safetensors": "empty",
        "papers.zip": "zip archive without weights",
    }.items():
        with pytest.raises(UserError, match=pattern):
            read_weights(str(tmp_path / name))


@pytest.mark.parametrize(("spec", "expected"), [("", "no weights at ''"), ("x" * 300, "300 characters")])
def test_invalid_specs(spec, expected):
    with pytest.raises(UserError, match=expected):
        read_weights(spec)


@pytest.fixture
def hub(monkeypatch):
    """A simulated Hub that returns a folder or raises an error, and records the requests."""

    def respond_with(result: Path | Exception) -> list[tuple[str, str | None]]:
        requests: list[tuple[str, str | None]] = []

        def snapshot_download(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
            requests.append((repo_id, revision))
            assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in allow_patterns)
            if isinstance(result, Exception):
                raise result
            return str(result)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        return requests

    return respond_with


def test_the_hub(run_folder, hub, card):
    requests = hub(run_folder)
    assert read_weights("hf-hub:owner/name").card == card
    assert read_weights("hf-hub:owner/name@v2").card == card
    assert requests == [("owner/name", None), ("owner/name", "v2")]


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
        (errors.RepositoryNotFoundError("404", response=RESPONSE), "no model 'owner/name'"),
        (errors.RevisionNotFoundError("404", response=RESPONSE), "'owner/name' has no revision 'v2'"),
        (errors.GatedRepoError("403", response=RESPONSE), "'owner/name' .*gated"),
        (errors.LocalEntryNotFoundError("no"), "cannot be reached.*--from bundled"),
        (errors.OfflineModeIsEnabled("no"), "local cache.* cannot be reached"),
        (errors.HfHubHTTPError("500 from the server", response=RESPONSE), "'owner/name' .*downloaded.*500"),
        (ConnectionError("no route to host"), "downloaded.*no route to host.*--from bundled"),
        (errors.HTTPError("The read operation\ntimed out"), "downloaded.*timed out.*--from bundled"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_of_the_hub_are_one_sentence(hub, error, pattern):
    hub(error)
    with pytest.raises(UserError, match=pattern) as caught:
        read_weights("hf-hub:owner/name@v2")
    assert "\n" not in str(caught.value)


def test_http_error_behind_a_cache_miss_is_reported(hub):
    error = errors.LocalEntryNotFoundError("cannot find the file in the cache")
    error.__cause__ = errors.HfHubHTTPError("403 Forbidden", response=RESPONSE)
    hub(error)
    with pytest.raises(UserError, match=r"downloaded.*403 Forbidden.*--from bundled"):
        read_weights("hf-hub:owner/name")


def test_the_real_client_offline(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"local cache.* cannot be reached"):
        read_weights("hf-hub:owner/name")
    with pytest.raises(UserError, match="hf-hub:owner/name@revision"):
        read_weights("hf-hub:not a name")


def test_the_hub_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'vitrail\[hub\]'"):
        read_weights("hf-hub:owner/name")
