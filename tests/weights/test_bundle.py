"""vitrail's weights file: round trips, atomic writes, and one UserError for every damaged file."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, safe_open, save_file

from vitrail.errors import UserError
from vitrail.weights.bundle import Card, created_with, read_bundle, read_card, write_bundle


@pytest.fixture
def bundle(tmp_path, state, card) -> Path:
    path = tmp_path / "model.safetensors"
    write_bundle(path, state, card)
    return path


def rewrite(path: Path, state: dict[str, torch.Tensor], **changes: object) -> None:
    """Write the file with changed values in its card, using safetensors directly and without checksums."""
    with safe_open(path, "pt") as file:
        document = json.loads(file.metadata()["vitrail"])
    del document["checksums"]
    document.update({"format": 1, **changes})
    document = {key: value for key, value in document.items() if value is not None}
    save_file(state, path, metadata={"vitrail": json.dumps(document)})


def test_round_trip(bundle, state, card):
    read, weights = read_bundle(bundle)
    assert read == card == read_card(bundle)
    assert list(weights) == sorted(state)
    assert all(torch.equal(weights[name], state[name]) for name in state)


@pytest.mark.parametrize(("before", "task"), [(False, "classification"), (True, "multilabel"), ("depth", "depth")])
def test_the_task_is_read_under_both_names(bundle, state, card, before, task):
    """Files of earlier versions have a boolean `several` instead of `task`."""
    write_bundle(bundle, state, card.model_copy(update={"task": task}))
    with safe_open(bundle, "pt") as file:
        document = json.loads(file.metadata()["vitrail"])
    assert document["task"] == task and "several" not in document
    assert read_card(bundle).task == task
    write_bundle(bundle, state, card)
    rewrite(bundle, state, task=None, several=before)
    assert read_card(bundle).task == task
    write_bundle(bundle, state, card)
    rewrite(bundle, state, task=3)
    with pytest.raises(UserError, match="task"):
        read_card(bundle)


def test_it_is_a_plain_safetensors_file_with_one_document(bundle, state):
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_file(bundle).items())
    with safe_open(bundle, "pt") as file:
        assert list(file.metadata()) == ["vitrail"]
        assert json.loads(file.metadata()["vitrail"])["classes"] == ["chat", "chien", "zèbre"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_disk_is_float32_in_memory(tmp_path, state, card, dtype):
    halves = {name: tensor.to(dtype) for name, tensor in state.items()}
    write_bundle(tmp_path / "half.safetensors", halves, card)
    _, weights = read_bundle(tmp_path / "half.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert all(torch.equal(weights[name], halves[name].float()) for name in state)
    assert (tmp_path / "half.safetensors").stat().st_size < 0.7 * 4 * sum(t.numel() for t in state.values())


def test_the_same_input_gives_the_same_bytes(tmp_path, bundle, state, card):
    backwards = dict(reversed(state.items()))
    backwards["head.weight"] = state["head.weight"].T.contiguous().T  # equal, laid out otherwise
    write_bundle(tmp_path / "again.safetensors", backwards, Card(**card.model_dump()))
    assert (tmp_path / "again.safetensors").read_bytes() == bundle.read_bytes()


def test_a_card_is_read_without_torch(bundle):
    code = (
        "import sys; from vitrail.weights.bundle import read_card; card = read_card(sys.argv[1]); "
        "assert card.classes[2] == 'zèbre'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, bundle], check=True, cwd=Path(__file__).parents[2])


def test_nan_is_written_as_null(tmp_path, state, card):
    write_bundle(tmp_path / "a.safetensors", state, card.model_copy(update={"metrics": {"loss": float("nan")}}))
    assert read_card(tmp_path / "a.safetensors").metrics == {"loss": None}


def test_created_with():
    assert created_with().startswith("vitrail 0.")
    assert created_with().endswith(torch.__version__.partition("+")[0])


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"classes": ("a", "b")}, "2 class names .*3"),
        ({"preprocess": {"size": (16, 16)}}, "16x16 .*16x24"),
        ({"preprocess": {"size": (16, 24), "mean": (0.5,), "std": (0.5,)}}, "1 channels.* 3"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_contradictory_card_is_rejected(card, change, pattern):
    with pytest.raises(ValidationError, match=pattern):
        Card(**{**card.model_dump(), **change})


@pytest.mark.parametrize("share", [0, 0.001, 0.01, 0.2, 0.6, 0.999])
def test_truncated_file(bundle, share):
    content = bundle.read_bytes()
    bundle.write_bytes(content[: int(len(content) * share)])
    for read in (read_card, read_bundle):
        with pytest.raises(UserError, match=r"truncated|damaged|is empty"):
            read(bundle)


def test_bytes_flipped_anywhere_in_the_header_never_crash(bundle):
    content = bundle.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
        bundle.write_bytes(damaged)
        try:
            read_bundle(bundle)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 150


def test_a_header_of_absurd_length_is_not_read(tmp_path):
    path = tmp_path / "huge.safetensors"
    with open(path, "wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(200_000_100)  # sparse: takes no room on disk
    with pytest.raises(UserError, match="not a safetensors file"):
        read_card(path)


def test_files_not_written_by_vitrail(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="not written by vitrail"):
        read_card(tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("hello, this is a text file and no more than that")
    with pytest.raises(UserError, match="not a safetensors file"):
        read_card(tmp_path / "text.safetensors")
    with pytest.raises(UserError, match="cannot read"):
        read_card(tmp_path / "none.safetensors")
    with pytest.raises(UserError, match="cannot read"):
        read_card(tmp_path)


def test_a_newer_format_says_to_upgrade(bundle, state):
    rewrite(bundle, state, format=4, something_new=True)
    with pytest.raises(UserError, match=r"format 4.*format 3.*pip install --upgrade"):
        read_bundle(bundle)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"format": "x"}, "version .*'x'"),
        ({"sauce": 1}, "unknown key 'sauce'; did you mean 'source'"),
        ({"model": {"width": 24}}, "'model.depth'"),
    ],
)
def test_invalid_card(bundle, state, change, pattern):
    rewrite(bundle, state, **change)
    with pytest.raises(UserError, match=pattern):
        read_bundle(bundle)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"depth": 3}, r"'blocks\.2\.norm1\.weight' is missing"),
        ({"depth": 1}, r"'blocks\.1\.[\w.]+' does not belong"),
        ({"mlp_dim": 96}, r"mlp\.fc1\.weight' .*\(48, 24\).* \(96, 24\)"),
        ({"depth": 10**9}, "1000000000 blocks"),
        ({"width": 3 * 10**18}, "14,691 parameters.* 72,000"),
    ],
)
def test_weights_that_do_not_fit_the_card(bundle, state, card, change, pattern):
    rewrite(bundle, state, model={**card.model.model_dump(), **change})
    with pytest.raises(UserError, match=pattern):
        read_bundle(bundle)


def test_integer_tensors_are_rejected(bundle, state):
    rewrite(bundle, {name: tensor.to(torch.int8) for name, tensor in state.items()})
    with pytest.raises(UserError, match="I8 tensors"):
        read_bundle(bundle)


def test_incomplete_weights_are_not_written(tmp_path, state, card):
    del state["head.bias"]
    with pytest.raises(UserError, match=r"'head.bias' is missing"):
        write_bundle(tmp_path / "model.safetensors", state, card)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("function", ["os.fsync", "pathlib.Path.replace", "safetensors.torch.save_file"])
@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(bundle, state, card, monkeypatch, function, problem):
    before = bundle.read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        if function.endswith("save_file"):
            Path(str(args[1])).write_bytes(b"half a file")
        raise problem

    monkeypatch.setattr(function, fail)
    expected = UserError if isinstance(problem, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write_bundle(bundle, {name: tensor + 1 for name, tensor in state.items()}, card)
    assert bundle.read_bytes() == before
    assert list(bundle.parent.iterdir()) == [bundle]


def test_output_folder_does_not_exist(tmp_path, state, card):
    with pytest.raises(UserError, match="cannot write"):
        write_bundle(tmp_path / "none" / "model.safetensors", state, card)


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_file_mode_follows_the_umask(tmp_path, state, card):
    (tmp_path / "plain").touch()
    write_bundle(tmp_path / "model.safetensors", state, card)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"positions": "sincos", "image_size": (4_000_000, 4_000_000)}, "65,536 tokens"),
        ({"positions": "relative", "image_size": (4_000, 4_000)}, "4,096 tokens"),
        ({"image_size": (4_000_000, 4_000_000)}, "4000000x4000000 .* 100,000,000 pixels"),
        ({"image_size": (8_000, 12_000)}, "14,691 parameters"),
        ({"image_size": (100_000, 100_000), "positions": "none"}, "100,000,000 pixels"),
        ({"registers": 10**12}, "14,691 parameters"),
        ({"stem": {"blocks": (10**12,)}, "patch": (1, 1)}, "too few"),
        ({"stem": {"blocks": (1,) * 200}}, "at most 8 items"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_card_of_a_huge_network_takes_no_memory(bundle, state, card, changes, pattern):
    """No memory is allocated for the network before the tensors are known to fit."""
    model = {**card.model.model_dump(), **changes}
    preprocess = {**card.preprocess.model_dump(), "size": model["image_size"]}
    rewrite(bundle, state, model=model, preprocess=preprocess)
    with pytest.raises(UserError, match=pattern):
        read_bundle(bundle)
