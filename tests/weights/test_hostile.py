"""Malformed headers and cards: a file loads or raises UserError, in little time and memory."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import vitrail
from tests.weights.configs import SMALL, card_of, random_state
from vitrail.config import ModelConfig
from vitrail.errors import UserError
from vitrail.report.provenance import provenance
from vitrail.weights.bundle import METADATA_KEY, Card, read_bundle, read_card, read_trained_on, write_bundle
from vitrail.weights.formats import timm
from vitrail.weights.read import read_weights
from vitrail.weights.safetensors_file import read_header
from vitrail.workflows.train_test_overlap import TrainingRecord, earlier_training


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    path, model = tmp_path_factory.mktemp("whole") / "model.safetensors", ModelConfig(**SMALL)
    data = {"name": "photos", "fingerprint": "9f", "images": {"train": 3}, "trained_on": ["0f" * 8], "holdout": 0.2}
    recipe = {"recipe": "finetune", "model": {"name": "Ti/8"}, "optimizer": {"lr": 0.1}}
    options = {"classes": tuple("abcde"), "metrics": {"top1": 0.5}, "curves": [{"step": 1, "loss": 2.0}]}
    write_bundle(path, random_state(model), card_of(model, data=data, recipe=recipe, **options))
    return path


def written(path: Path, header: str | bytes, data: bytes) -> Path:
    text = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def parts(whole: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Header, card and data. The card is in the first format, since checksums would reject every change."""
    content = whole.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    document = json.loads(header["__metadata__"][METADATA_KEY])
    del document["checksums"]
    return header, document | {"format": 1}, content[8 + length :]


def use(path: Path) -> None:
    """Read a file as the commands do before they run the network."""
    for read in (read_card, read_bundle, read_trained_on, read_weights):
        read(path)
    weights = read_weights(path)
    provenance(weights.card)
    earlier_training([TrainingRecord.of(weights)])


STRANGE: list[Any] = [
    float("inf"), float("nan"), -1, 0, 1.5, 10**30, -(10**30), True, None, "", "x", "\ud800", "0" * 16, [], [[]], {},
    {"a": 1}, ["a"], [1, 2], [1e308, 1e-320], ["zz" * 8], {"train": "many"}, [None] * 100, "é" * 10_000, 2**63 - 1,
]  # fmt: skip


def mutated(values: Any, rng: random.Random) -> Any:
    """A copy with one random value replaced, deleted or repeated."""
    values = json.loads(json.dumps(values))
    at, path = values, []
    while isinstance(at, dict | list) and at and (not path or rng.random() < 0.75):
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        path.append((at, key))
        at = at[key]
    parent, key = path[-1]
    match rng.randrange(4):
        case 0 if isinstance(parent, dict):
            del parent[key]
        case 1 if isinstance(parent, list):
            parent += parent
        case _:
            parent[key] = rng.choice(STRANGE)
    return values


@pytest.mark.filterwarnings("ignore::vitrail.errors.Note")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_changed_header_or_card_loads_or_is_rejected(whole, tmp_path, seed):
    header, document, data = parts(whole)
    rng, loaded = random.Random(seed), 0
    for _ in range(120):
        card, expected = document, dict(header)
        if rng.random() < 0.7:
            for _ in range(rng.choice([1, 1, 2])):
                card = mutated(card, rng)
        expected["__metadata__"] = {METADATA_KEY: json.dumps(card)}
        if rng.random() < 0.4:
            expected = mutated(expected, rng)
        path = written(tmp_path / "a.safetensors", json.dumps(expected, ensure_ascii=rng.random() < 0.5), data)
        try:
            use(path)
            loaded += 1
        except UserError:
            pass
    assert 0 < loaded < 100


def shape_of(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["head.bias"].update(shape=value)


def offsets_of(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["head.bias"].update(data_offsets=value)


def twice(header: dict[str, Any]) -> None:
    header["head.bias"]["data_offsets"] = header["norm.bias"]["data_offsets"]


@pytest.mark.parametrize(
    "change",
    [
        shape_of([float("inf")]), shape_of([float("nan")]), shape_of([-5, -1]), shape_of([5.0]), shape_of(["5"]),
        shape_of([True] * 5), shape_of([1] * 100_000), shape_of(5), shape_of(None), shape_of([10**30, 0]),
        shape_of([2**62] * 8), offsets_of([0]), offsets_of([20, 0]), offsets_of([-20, 0]), offsets_of("ab"), twice,
        lambda header: header["head.bias"].update(dtype=["F32"]),
        lambda header: header["head.bias"].update(dtype={}),
        lambda header: header.update({"head.bias": None}),
        lambda header: header["__metadata__"].update({METADATA_KEY: {"format": 1}}),
        lambda header: header.update(__metadata__=[METADATA_KEY]),
    ],
)  # fmt: skip
def test_contradictory_header_is_rejected_by_every_reader(whole, tmp_path, change):
    header, _, data = parts(whole)
    change(header)
    path = written(tmp_path / "a.safetensors", json.dumps(header), data)
    for read in (read_header, read_card, read_bundle, read_weights):
        with pytest.raises(UserError):
            read(path)


def nested(key: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        values: Any = 1
        for _ in range(100):
            values = [values]
        document[key] = {"a": values}

    return change


@pytest.mark.parametrize(
    "change",
    [
        {"classes": [1, 2, 3, 4, 5]}, {"classes": "abcde"}, {"classes": [None] * 10**6}, {"classes": ["a"] * 10**6},
        {"preprocess": {"size": [32, 32], "std": [0, 1, 1]}}, {"preprocess": {"size": [32, 32], "mean": [1e400] * 3}},
        {"preprocess": {"size": [32, 32], "std": [float("nan")] * 3}}, {"postprocess": {"temperature": 0}},
        {"postprocess": {"temperature": float("inf")}}, {"data": {"trained_on": ["not hexadecimal!"]}},
        {"data": {"trained_on": [5]}}, {"data": {"trained_before": [["0x" * 8]]}}, {"data": {"trained_before": 5}},
        {"data": {"images": {"train": "many"}}}, {"data": {"images": 5}}, {"data": {"max_pixels": -1}}, {"data": []},
        {"data": {"split_seed": "1"}}, {"recipe": {"model": 5}}, {"recipe": {"objective": []}}, {"recipe": 5},
        {"curves": [{"loss": 1}]}, {"curves": [{"step": float("nan")}]}, {"metrics": {"top1": float("inf")}},
        {"format": True}, {"format": 1.0}, {"format": 10**30}, nested("metrics"), nested("recipe"),
        {"model": {**SMALL, "positions": "none", "image_size": [100_000, 100_000]},
         "preprocess": {"size": [100_000, 100_000]}},
        {"model": {**SMALL, "depth": 10**30}}, {"model": {**SMALL, "kind": ["vit"]}},
    ],
    ids=lambda change: change.__name__ if callable(change) else str(change)[:40],
)  # fmt: skip
def test_invalid_card_is_rejected(whole, tmp_path, change):
    header, document, data = parts(whole)
    change(document) if callable(change) else document.update(change)
    header["__metadata__"] = {METADATA_KEY: json.dumps(document)}
    path = written(tmp_path / "a.safetensors", json.dumps(header), data)
    started = time.process_time()
    with pytest.raises(UserError) as refused:
        read_card(path)
    assert len(str(refused.value)) < 1000 and time.process_time() - started < 10


@pytest.mark.parametrize("name", ["a\0b.safetensors", "\ud800.safetensors", "x" * 300, ".", ""])
def test_invalid_file_name_in_an_index_of_shards(tmp_path, name):
    text = json.dumps({"weight_map": {"head.weight": name}})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError):
        read_weights(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 50_000, '{"num_labels": 1e999}', '{"num_labels": NaN}'])
def test_invalid_json_files_are_rejected(whole, tmp_path, text):
    model = ModelConfig(**{**SMALL, "gelu": "erf"})
    timm.write(tmp_path, timm.adopt_constants(card_of(model)), random_state(model))
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError):
        read_weights(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "header",
    [
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"__metadata__":{"vitrail":"' + b"[" * 100_000 + b"]" * 100_000 + b'"}}',
        b'{"a":[' + b"[]," * 10_000_000 + b"[]]}",
        b'{"a":"' + b"x" * 100_000_000 + b'"}',
        b'{"a":[' + b"1," * 15_000_000 + b"1]}",
        b'{"a":[' + b"123456," * 400_000 + b"1]}",
        b'{"a":' + b"9" * 5_000 + b"}",
        b"{" + b",".join(b'"%d":0' % number for number in range(200_000)) + b"}",
    ],
    ids=["deep", "deep card", "lists", "long", "numbers", "fewer numbers", "a number", "names"],
)
def test_malicious_headers_take_little_memory_and_time(tmp_path, header):
    path = written(tmp_path / "a.safetensors", header, b"")
    del header
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(UserError):
            vitrail.load(path)
        assert tracemalloc.get_traced_memory()[1] < 300e6
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 20


def test_the_unchanged_file_is_read(whole):
    """Shows that the tests above fail because of their changes."""
    use(whole)
    assert isinstance(read_card(whole), Card) and len(load_file(whole)) == len(read_weights(whole).state)
