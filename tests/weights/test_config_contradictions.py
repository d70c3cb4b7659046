"""A config.json that contradicts the tensors is a UserError before any library builds the network."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from vitrail.errors import UserError
from vitrail.weights.read import read_weights

pytest.importorskip("timm")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Cyclopts application invoked")]


def edit(path, change, section=None):
    values = json.loads(path.read_text())
    (values[section] if section else values).update(change)
    path.write_text(json.dumps(values))


@pytest.fixture
def folder(tmp_path, convert, vitrail_file):
    def write(to, **options):
        assert convert(vitrail_file(**options), tmp_path / to, "--to", to)[0] == 0
        return tmp_path / to

    return write


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"num_hidden_layers": 100_000}, r"num_hidden_layers 100000, .* 2\b"),
        ({"hidden_size": 96}, r"hidden_size 96, .* 48\b"),
        ({"intermediate_size": 10**9}, r"intermediate_size 1000000000, .* 96\b"),
        ({"patch_size": 4}, "patch_size 4, .* 8x8"),
        ({"num_channels": 1}, r"num_channels 1, .* 3\b"),
        ({"image_size": 64}, "image_size 64, .* 32x32"),
        ({"num_labels": 10**9}, r"num_labels 1000000000, .* 5\b"),
        ({"id2label": {"0": "a"}}, "1 classes.* 5"),
        ({"id2label": ["a"]}, "id2label in its config.json"),
        ({"num_attention_heads": "3"}, "num_attention_heads '3'.* positive integer"),
        ({"num_attention_heads": True}, "num_attention_heads True.* positive integer"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps 'small'.* finite number"),
        ({"qkv_bias": False}, "qkv_bias False, .* True"),
    ],
    ids=str,
)
def test_transformers_configs_that_contradict_the_tensors(tmp_path, convert, folder, change, pattern):
    edit(folder("huggingface") / "config.json", change)
    start = time.time()
    code, _, error = convert(tmp_path / "huggingface", tmp_path / "new.safetensors", "--to", "vitrail")
    assert code == 2 and re.search(pattern, error) and time.time() - start < 10
    assert not (tmp_path / "new.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"depth": 100_000}, r"model_args.depth 100000, .* 2\b"),
        ({"embed_dim": 96}, r"model_args.embed_dim 96, .* 48\b"),
        ({"mlp_ratio": 10**6}, "model_args.mlp_ratio 1000000, .* 2.0"),
        ({"qk_norm": True}, "model_args.qk_norm True, .* False"),
        ({"pos_embed": "none"}, "model_args.pos_embed 'none', .* 'learn'"),
        ({"num_classes": "5"}, r"model_args.num_classes '5', .* 5\b"),
        ({"img_size": 64}, "model_args.img_size 64, .* 32x32"),
        ({"window_size": 7}, "model_args.window_size.* not support"),
        ({"num_heads": True}, "num_heads True.* positive integer"),
        ({"num_heads": 0}, "num_heads 0.* positive integer"),
        ({"global_pool": "avg", "fc_norm": None}, "tensor 'fc_norm"),
    ],
    ids=str,
)
def test_timm_configs_that_contradict_the_tensors(tmp_path, convert, folder, change, pattern):
    edit(folder("timm") / "config.json", change, "model_args")
    code, _, error = convert(tmp_path / "timm", tmp_path / "new.safetensors", "--to", "vitrail")
    assert code == 2 and re.search(pattern, error) and not (tmp_path / "new.safetensors").exists()


def test_an_architecture_of_another_family(tmp_path, convert, folder):
    """timm's network of that name is built without storage, since it can be large."""
    edit(folder("timm") / "config.json", {"architecture": "vit_giant_patch14_224"})
    values = json.loads((tmp_path / "timm" / "config.json").read_text())
    values["model_args"] = {"num_heads": 3, "act_layer": "gelu"}
    (tmp_path / "timm" / "config.json").write_text(json.dumps(values))
    code, _, error = convert(tmp_path / "timm", tmp_path / "new.safetensors", "--to", "vitrail")
    assert code == 2 and "timm's vit_giant_patch14_224" in error and not (tmp_path / "new.safetensors").exists()


def test_resnets(tmp_path, convert, folder):
    folder("huggingface", kind="resnet", blocks=(1, 1), width=32, image_size=(32, 32), num_classes=3,
           pool_padding="zeros", norm_eps=1e-5, weight_eps=1e-8, weight_eps_in="variance")  # fmt: skip
    edit(tmp_path / "huggingface" / "config.json", {"depths": [1, 10**6]})
    with pytest.raises(UserError, match=r"depths \[1, 1000000\], .* \[1, 1\]"):
        read_weights(str(tmp_path / "huggingface"))


def test_image_size_that_contradicts_the_option(folder):
    for to in ("timm", "huggingface"):
        with pytest.raises(UserError, match=r"32x32 images .* 16x64"):
            read_weights(str(folder(to)), image_size=(16, 64))


def test_weights_whose_file_has_another_name(tmp_path, convert, folder):
    """transformers reads only one file name. The outputs are compared nevertheless."""
    (folder("huggingface") / "model.safetensors").rename(tmp_path / "huggingface" / "mine.safetensors")
    edit(tmp_path / "huggingface" / "config.json", {"dtype": "float16"})
    code, output, _ = convert(tmp_path / "huggingface", tmp_path / "new.safetensors", "--to", "vitrail")
    assert code == 0 and re.search("as read: transformers .*same outputs", output)


@pytest.mark.parametrize("what", ["nan", "inf"])
def test_non_finite_weights(tmp_path, convert, folder, what):
    file = folder("timm") / "model.safetensors"
    tensors = load_file(file)
    tensors["norm.bias"][3] = float(what)
    save_file(tensors, file)
    code, _, error = convert(tmp_path / "timm", tmp_path / "new.safetensors", "--to", "vitrail")
    kind = "NaN" if what == "nan" else "infinite"
    assert code == 2 and re.search(f"'norm.bias'.*{kind}", error)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "patch"), [((2048, 2048), 1024), ((520, 520), 8)])
def test_images_too_large_to_compare_on(tmp_path, convert, vitrail_file, size, patch):
    source = vitrail_file(image_size=size, patch=(patch, patch), width=12, heads=1, depth=1)
    code, output, _ = convert(source, tmp_path / "timm", "--to", "timm", "--adopt-constants")
    assert code == 0 and "as written: not compared with timm" in output


def test_the_kind_of_a_foreign_network(tmp_path):
    save_file({"convnext.layers.0.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "convnext"}))
    with pytest.raises(UserError, match=r"'convnext'.* vit, dinov2"):
        read_weights(str(tmp_path))


def test_unsupported_networks_are_recognised_by_their_tensors(tmp_path):
    timm = pytest.importorskip("timm")
    from timm.models import save_for_hf

    for name, pattern in {
        "vit_base_patch16_clip_224": "norm before the encoder",
        "deit_tiny_distilled_patch16_224": "distillation token",
        "beit_base_patch16_224": "relative position embedding",
        "swin_tiny_patch4_window7_224": "relative position embedding",
    }.items():
        small = {} if "swin" in name else {"depth": 1}
        save_for_hf(timm.create_model(name, **small), tmp_path / name, safe_serialization=True)
        with pytest.raises(UserError, match=pattern):
            read_weights(str(tmp_path / name))


def test_missing_tensor_is_named_as_in_its_layout(tmp_path, folder):
    for to, name in {"timm": "norm.bias", "huggingface": "vit.layernorm.bias"}.items():
        file = folder(to) / "model.safetensors"
        tensors = load_file(file)
        del tensors[name]
        save_file(tensors, file)
        with pytest.raises(UserError, match=rf"tensor '{name}' is missing"):
            read_weights(str(file))


def test_names_of_classes_that_do_not_fit(tmp_path, folder):
    edit(folder("timm") / "config.json", {"label_names": ["a", "b"]})
    weights = read_weights(str(tmp_path / "timm"))
    assert weights.card.classes == () and re.search("label_names .* 5", weights.assumed)


def test_a_crop_of_nothing(tmp_path, folder):
    edit(folder("timm") / "config.json", {"crop_pct": 0, "crop_mode": "center"}, "pretrained_cfg")
    with pytest.raises(UserError, match="crop_fraction"):
        read_weights(str(tmp_path / "timm"))
