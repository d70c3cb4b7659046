"""Checks of file headers: damaged, oversized or unsupported files are rejected before tensors are read."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.errors import UserError
from vitrail.weights import tensors
from vitrail.weights.pickles import pickle_source
from vitrail.weights.read import read_weights
from vitrail.weights.safetensors_file import read_header
from vitrail.weights.tensors import npz_source

FIXTURE = Path(__file__).parents[1] / "fixtures" / "google_vit_gap.npz"


def test_an_archive_is_checked_by_its_headers(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", matrix=np.zeros((2, 3), "f"), half=np.zeros(4, "f2"), step=np.array(7))
    monkeypatch.setattr("numpy.load", lambda *args, **kwargs: pytest.fail("contents were read"))
    source = npz_source(tmp_path / "a.npz", "it")
    assert source.shapes == {"matrix": (2, 3), "half": (4,), "step": ()}
    assert source.dtypes == {"matrix": "F32", "half": "F16", "step": "int64"}
    assert all(tensor.is_meta for tensor in source.meta_tensors().values())


def test_contents_are_read_only_when_the_network_fits(tmp_path, monkeypatch):
    arrays = dict(np.load(FIXTURE))
    arrays["params/head/bias"] = np.zeros(6, "f")
    np.savez(tmp_path / "a.npz", **arrays)
    monkeypatch.setattr("numpy.load", lambda *args, **kwargs: pytest.fail("contents were read"))
    with pytest.raises(UserError, match=r"'head.bias' has shape \(6,\)"):
        read_weights(str(tmp_path / "a.npz"))


def with_member(path: Path, content: bytes, name: str = "a.npy", how: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", how) as archive:
        archive.writestr(name, content)
    return path


def array_bytes(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.slow
def test_zip_bomb_is_not_unpacked(tmp_path):
    content = array_bytes(np.zeros(30_000_000, "f"))
    path = with_member(tmp_path / "bomb.npz", content, how=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1_000_000
    with pytest.raises(UserError, match="120,000,128 bytes"):
        npz_source(path, "it")


def test_array_whose_length_contradicts_its_header(tmp_path):
    content = array_bytes(np.zeros((2, 3), "f")).replace(b"(2, 3)", b"(9, 9)")
    with pytest.raises(UserError, match="length of an array"):
        npz_source(with_member(tmp_path / "a.npz", content), "it")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"\x93NUMPY\x09\x00", b"hello world, no array"])
def test_members_that_are_no_arrays(tmp_path, content):
    with pytest.raises(UserError, match="cannot read it"):
        npz_source(with_member(tmp_path / "a.npz", content), "it")


def test_too_many_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "MAX_TENSORS", 3)
    np.savez(tmp_path / "a.npz", **{f"t{index}": np.zeros(1, "f") for index in range(4)})
    with pytest.raises(UserError, match="has 4 arrays; at most 3"):
        npz_source(tmp_path / "a.npz", "it")


def safetensors_file(path: Path, header: dict, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.slow
def test_a_header_of_too_many_tensors(tmp_path):
    nothing = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    path = safetensors_file(tmp_path / "a.safetensors", {f"t{index}": nothing for index in range(100_001)}, b"")
    with pytest.raises(UserError, match="has 100,001 tensors"):
        read_header(path)


@pytest.mark.parametrize("shape", [[10**6, 10**6], [1], [3], [-2]])
def test_a_header_whose_shapes_do_not_fit_its_data(tmp_path, shape):
    header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}}
    with pytest.raises(UserError, match=r"'a' .*shape"):
        read_header(safetensors_file(tmp_path / "a.safetensors", header, bytes(8)))


def test_a_tensor_of_absurd_shape_and_no_length(tmp_path):
    header = {"patch_embed.proj.weight": {"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]}}
    safetensors_file(tmp_path / "model.safetensors", header, b"")
    with pytest.raises(UserError):
        read_weights(str(tmp_path))


@pytest.mark.parametrize("old", [True, False], ids=["old format", "archive"])
@pytest.mark.parametrize(
    "nest", [(), ("model",), ("state_dict",), ("checkpoint", "model_ema"), ("model_ema",)], ids=str
)
def test_nested_state_dicts(tmp_path, nest, old):
    values = {"module.a.weight": torch.ones(2, 3), "module.b": torch.zeros(2).bfloat16()}
    supported = nest[:1] != ("checkpoint",)
    for key in reversed(nest):
        values = {key: values, "epoch": 3}
    torch.save(values, tmp_path / "a.pth", _use_new_zipfile_serialization=not old)
    if not supported:
        with pytest.raises(UserError, match="has no state dict"):
            pickle_source(tmp_path / "a.pth", "it")
        return
    source = pickle_source(tmp_path / "a.pth", "it")
    assert source.shapes == {"a.weight": (2, 3), "b": (2,)}
    loaded = source.load()
    assert torch.equal(loaded["a.weight"], torch.ones(2, 3)) and loaded["b"].dtype == torch.float32


@pytest.mark.parametrize(
    "values",
    [
        {"net": {"_orig_mod.module.a": torch.ones(2)}},
        {"teacher": {"backbone.a": torch.ones(2)}},
        {"model.a": torch.ones(2), "step": 3, "name": "x", "best": None},
        {"model_state_dict": {"a": torch.ones(2).double()}, "optimizer": {"lr": 1}},
    ],
    ids=["wrapped", "teacher", "scalars", "double"],
)
def test_state_dicts_nested_in_training_checkpoints(tmp_path, values):
    torch.save(values, tmp_path / "a.safetensors")  # any file name
    source = pickle_source(tmp_path / "a.safetensors", "it")
    source.check_floats()
    assert torch.equal(source.load()["a"], torch.ones(2)) and source.note == ""


def test_ema_weights_are_preferred(tmp_path):
    torch.save({"model": {"a": torch.ones(1)}, "model_ema": {"a": torch.zeros(1)}}, tmp_path / "a.pth")
    source = pickle_source(tmp_path / "a.pth", "it")
    assert source.load() == {"a": torch.zeros(1)}
    assert source.note == "the weights under 'model_ema', not those under 'model'"


def test_dict_that_contains_itself(tmp_path):
    values: dict[str, object] = {}
    values["model"] = values
    torch.save(values, tmp_path / "a.pth")
    with pytest.raises(UserError, match="has no state dict"):
        pickle_source(tmp_path / "a.pth", "it")


@pytest.mark.parametrize(
    ("tensor", "pattern"),
    [
        (torch.zeros(1).expand(10**9, 192), "'a' .* 192,000,000,000 numbers"),
        (torch.eye(3).to_sparse(), "'a' is sparse, quantized or empty"),
        (torch.empty(3, device="meta"), "'a' is sparse, quantized or empty"),
        ([torch.ones(1)], "'a' is not a tensor"),
    ],
    ids=["expanded", "sparse", "meta", "list"],
)
def test_tensors_that_are_not_in_the_file(tmp_path, tensor, pattern):
    torch.save({"a": tensor, "b": torch.ones(2)}, tmp_path / "a.pth")
    with pytest.raises(UserError, match=pattern):
        pickle_source(tmp_path / "a.pth", "it")


def test_arrays_of_other_floats(tmp_path):
    values = np.arange(3.0)
    np.savez(tmp_path / "a.npz", big=values.astype(">f4"), double=values, half=values.astype(">f2"))
    source = npz_source(tmp_path / "a.npz", "it")
    source.check_floats()
    assert all(tensor.dtype == torch.float32 and tensor.tolist() == [0, 1, 2] for tensor in source.load().values())


def test_pickle_with_code_is_not_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"a": torch.ones(1), "trap": Trap()}, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"would run '.*'") as caught:
        pickle_source(tmp_path / "a.pth", "it")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"\x80\x02garbage", b"\x80"])
def test_pickles_that_are_damaged(tmp_path, content):
    (tmp_path / "a.pth").write_bytes(content)
    with pytest.raises(UserError, match=r"not opened: .*damaged"):
        read_weights(str(tmp_path / "a.pth"), pickle=True)
