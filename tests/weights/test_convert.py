"""`vitrail convert` between all layouts, compared with the networks of the other libraries."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weights.configs import PATHS, SMALL, card_of, random_state
from vitrail.commands.convert import describe
from vitrail.config import ModelConfig, StemConfig
from vitrail.models.variants import config_from_name
from vitrail.weights import reference_models as peers
from vitrail.weights.formats.table import Table
from vitrail.weights.read import read_weights

pytest.importorskip("timm")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application invoked")

FIXTURES = Path(__file__).parents[1] / "fixtures"


def differences(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"gives the same outputs, within (\S+) ", output)]


@pytest.mark.parametrize("pair", list(itertools.permutations(PATHS, 2)), ids="-to-".join)
def test_every_pair_of_layouts(tmp_path, convert, vitrail_file, pair):
    """Convert from vitrail to the first and then to the second layout; the outputs of the other library are equal."""
    source, target = (tmp_path / PATHS[layout].format(f"{index}-{layout}") for index, layout in enumerate(pair))
    if pair[0] == "vitrail":
        source = vitrail_file()
    else:
        assert convert(vitrail_file(), source, "--to", pair[0])[0] == 0
    code, output, error = convert(source, target, "--to", pair[1], "--adopt-constants")
    assert (code, error) == (0, ""), error
    errors = differences(output)
    assert len(errors) == sum(layout != "vitrail" for layout in pair) and max(errors) < 1e-5
    state = random_state(ModelConfig(**SMALL))
    back = read_weights(str(target))
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.state.items())
    assert back.card.classes == (() if "google" in pair else tuple("abcde"))
    assert (back.card.licence == "CC0") == ("google" not in pair)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_printed_summary(tmp_path, convert, vitrail_file):
    """One fact per line."""
    code, output, _ = convert(vitrail_file(), tmp_path / "vit.npz", "--to", "google")
    assert code == 0
    assert re.sub(r"within \S+ ", "within X ", output).splitlines() == [
        f"read {tmp_path / 'ours.safetensors'}: weights in vitrail's layout",
        "network: Vision Transformer, width 48, depth 2, 3 heads, MLP 96, patches of 8x8, class token",
        "images: 32x32 pixels, 3 channels",
        "classes: 5",
        "as written: timm (reading Google's file) gives the same outputs, within X (the largest output is 2.3)",
        "read back: every tensor is bit-identical",
        "not written, since Google's layout does not support it: "
        "preprocessing, class names, the licence, the training record "
        "(vitrail evaluate can then no longer exclude the training images)",
        f"wrote {tmp_path / 'vit.npz'}",
    ]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            ModelConfig(**{**SMALL, "positions": "relative"}),
            "8x8, relative position embeddings, class token",
        ),
        (ModelConfig(**{**SMALL, "positions_at": "layers"}), "position embeddings in every layer, class token"),
        (ModelConfig(**{**SMALL, "positions_at": "shared"}), "shared position embeddings in every layer, class token"),
        (ModelConfig(**{**SMALL, "positions": "none"}), "no position embeddings, class token"),
        (ModelConfig(**{**SMALL, "registers": 2, "layer_scale": 0.1}), "class token, 2 registers, LayerScale"),
        (config_from_name("Axial-B/32", 5), "patches of 32x32, axial attention, global average pooling"),
        (config_from_name("R50+B/16", 5), "Vision Transformer with ResNet stem, blocks (3, 4, 9), width 768"),
        (config_from_name("R50x1", 5), "network: BiT ResNet, blocks (3, 4, 6, 3), root width 64"),
        (config_from_name("B/32", 0), "classes: none (features only)"),
        (config_from_name("B/32", 1000), "classes: 1,000 without names"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_descriptions(model, expected):
    assert expected in "\n".join(describe(card_of(model)))


def test_different_constants_need_adopt_constants(tmp_path, convert, vitrail_file):
    source = vitrail_file(gelu="erf", norm_eps=1e-2, stem=StemConfig(weight_eps=1e-2), image_size=(64, 64))
    code, _, error = convert(source, tmp_path / "vit.npz", "--to", "google")
    assert code == 2 and not (tmp_path / "vit.npz").exists()
    assert "model.stem.weight_eps 0.01 -> 1e-05; model.gelu erf -> tanh; model.norm_eps 0.01 -> 1e-06" in error
    assert "--adopt-constants" in error
    code, output, _ = convert(source, tmp_path / "vit.npz", "--to", "google", "--adopt-constants")
    assert code == 0 and re.search(r"Google's code: model\.gelu erf -> tanh$", output, re.MULTILINE)
    assert float(re.search(r"changed constants: .* differ by up to (\S+)\s", output)[1]) > 1e-4
    assert re.search("constants than Google's code", output)


def test_preprocessing_that_the_target_cannot_do(tmp_path, convert):
    source = FIXTURES / "google_vit_token.npz"
    code, _, error = convert(source, tmp_path / "t", "--to", "timm", "--image-size", "16x24")
    assert code == 2 and "preprocess.antialias False -> True" in error
    code, output, _ = convert(source, tmp_path / "t", "--to", "timm", "--image-size", "16x24", "--adopt-constants")
    assert code == 0 and re.search("preprocessing: .*vitrail evaluate", output) and "constants" not in output


def test_a_hybrid_from_google_to_timm(tmp_path, convert):
    """timm has only stems with fixed blocks, and the fixture has a different one."""
    source = FIXTURES / "google_hybrid_stem_only.npz"
    code, _, error = convert(source, tmp_path / "t", "--to", "timm", "--adopt-constants")
    assert code == 2 and re.search(r"timm .*stem of 32 channels with blocks \(\)", error)
    assert not list(tmp_path.iterdir())


def test_a_pickle(tmp_path, convert, vitrail_file):
    assert convert(vitrail_file(), tmp_path / "timm", "--to", "timm")[0] == 0
    (tmp_path / "old").mkdir()
    values = {"state_dict": load_file(tmp_path / "timm" / "model.safetensors")}
    torch.save(values, tmp_path / "old" / "pytorch_model.bin")
    (tmp_path / "timm" / "config.json").rename(tmp_path / "old" / "config.json")
    code, _, error = convert(tmp_path / "old", tmp_path / "new.safetensors", "--to", "vitrail")
    assert code == 2 and "--allow-pickle" in error
    code, output, error = convert(tmp_path / "old", tmp_path / "new.safetensors", "--to", "vitrail", "--allow-pickle")
    assert code == 0 and differences(output)[0] < 1e-5


@pytest.mark.parametrize("to", ["timm", "google"])
def test_overwrite(tmp_path, convert, vitrail_file, to):
    target = tmp_path / PATHS[to].format("target")
    assert convert(vitrail_file(), target, "--to", to)[0] == 0
    other = vitrail_file("other.safetensors", depth=1)
    assert convert(other, target, "--to", to)[0] == 2
    assert read_weights(str(target)).card.model.depth == 2
    assert convert(other, target, "--to", to, "--overwrite")[0] == 0
    assert read_weights(str(target)).card.model.depth == 1
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("to", ["timm", "huggingface", "google"])
def test_network_with_different_outputs_is_not_written(tmp_path, convert, vitrail_file, monkeypatch, to):
    """With two tensors swapped while writing, the comparison of outputs fails and nothing is written."""
    write = Table.write

    def wrong(self, state):
        first, second = "blocks.0.norm1.weight", "blocks.0.norm2.weight"
        return write(self, {**state, first: state[second], second: state[first]})

    monkeypatch.setattr(Table, "write", wrong)
    source = vitrail_file()
    code, _, error = convert(source, tmp_path / PATHS[to].format("target"), "--to", to)
    assert code == 2 and "differ by" in error
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("to", ["timm", "huggingface", "google"])
def test_without_the_other_library(tmp_path, convert, vitrail_file, monkeypatch, to):
    for name in ("timm", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    code, output, _ = convert(vitrail_file(), tmp_path / PATHS[to].format("target"), "--to", to)
    library = "transformers" if to == "huggingface" else "timm"
    assert code == 0 and f": {library} is not installed" in output and not differences(output)


def test_resnets_from_vitrail_to_transformers_and_on_to_google(tmp_path, convert, vitrail_file):
    source = vitrail_file(kind="resnet", blocks=(1, 2), width=32, image_size=(32, 40), num_classes=3)
    code, _, error = convert(source, tmp_path / "bit", "--to", "huggingface")
    assert code == 2 and re.search(r"model\.weight_eps 1e-10 -> 1e-08.*--adopt-constants", error)
    code, output, _ = convert(source, tmp_path / "bit", "--to", "huggingface", "--adopt-constants")
    assert code == 0 and differences(output)[0] < 1e-6
    assert re.search(r"of transformers: model\.weight_eps", output)
    code, output, _ = convert(tmp_path / "bit", tmp_path / "bit.npz", "--to", "google", "--adopt-constants")
    assert code == 0 and re.search("as read: transformers .*same outputs", output)
    back = read_weights(str(tmp_path / "bit.npz"), image_size=(32, 40))
    assert back.card.model == read_weights(str(source)).card.model


@pytest.mark.slow
@pytest.mark.parametrize("to", ["timm", pytest.param("huggingface", marks=pytest.mark.full)])
def test_torch_without_torchvisions_operators(tmp_path, vitrail_file, to):
    """In a separate process, where no other test has declared the operators."""
    command = [sys.executable, "-m", "vitrail", "convert", vitrail_file(), tmp_path / "target", "--to", to]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert differences(done.stdout)[0] < 1e-5


def test_torchvisions_operators_are_declared_once(monkeypatch):
    def stops(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    before = list(peers._operators)
    monkeypatch.setattr(peers, "_operators", before or [torch.library.Library("torchvision", "FRAGMENT")])
    monkeypatch.setattr(peers.importlib, "import_module", stops)
    peers.make_torchvision_importable()
    peers.make_torchvision_importable()
    assert len(peers._operators) == 1


@pytest.mark.parametrize("text", ["", "0x3", "224x", "big", "224x320x3", "999999"])
def test_invalid_image_sizes(tmp_path, convert, vitrail_file, text):
    code, _, error = convert(vitrail_file(), tmp_path / "t", "--to", "timm", f"--image-size={text}")
    assert code == 2 and "--image-size" in error and f"not '{text}'" in error


def test_image_size_of_files_without_one(tmp_path, convert):
    for text, size in (("16x24", (16, 24)), ("24x16", (24, 16))):
        target = tmp_path / f"{text}.safetensors"
        assert convert(FIXTURES / "google_vit_token.npz", target, "--to", "vitrail", "--image-size", text)[0] == 0
        assert read_weights(str(target)).card.model.image_size == size
    code, _, error = convert(FIXTURES / "google_vit_token.npz", tmp_path / "x.safetensors", "--to", "vitrail")
    assert code == 2 and "--image-size HxW" in error


@pytest.mark.slow
def test_timms_network_is_built_at_the_given_size(convert, tmp_path):
    """config.json has no image size here, and 12x16 patches are not a square."""
    import timm

    network = timm.create_model("vit_tiny_patch16_224", img_size=(192, 256), num_classes=3, depth=1)
    (tmp_path / "wide").mkdir()
    save_file(network.state_dict(), tmp_path / "wide" / "model.safetensors")
    about = {"architecture": "vit_tiny_patch16_224", "num_classes": 3, "model_args": {"depth": 1, "num_classes": 3}}
    (tmp_path / "wide" / "config.json").write_text(json.dumps(about | {"pretrained_cfg": {}}))
    target = tmp_path / "wide.safetensors"
    assert convert(tmp_path / "wide", target, "--to", "vitrail")[0] == 2 and not target.exists()
    code, output, error = convert(tmp_path / "wide", target, "--to", "vitrail", "--image-size", "192x256")
    assert code == 0, error
    assert "timm gives the same outputs" in output
    assert read_weights(str(target)).card.model.image_size == (192, 256)
