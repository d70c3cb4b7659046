"""A config.json that contradicts the tensors is a UserError before any library builds the network."""

from __future__ import annotations

import json
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
def folder(tmp_path, convert, ours):
    def write(to, **options):
        assert convert(ours(**options), tmp_path / to, "--to", to)[0] == 0
        return tmp_path / to

    return write


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 100_000}, "has num_hidden_layers 100000, and its tensors have 2"),
        ({"hidden_size": 96}, "has hidden_size 96, and its tensors have 48"),
        ({"intermediate_size": 10**9}, "has intermediate_size 1000000000, and its tensors have 96"),
        ({"patch_size": 4}, "has patch_size 4, and its tensors have 8x8"),
        ({"num_channels": 1}, "has num_channels 1, and its tensors have 3"),
        ({"image_size": 64}, "has image_size 64, and its tensors have 32x32"),
        ({"num_labels": 10**9}, "has num_labels 1000000000, and its tensors have 5"),
        ({"id2label": {"0": "a"}}, "names 1 classes, and its tensors have 5"),
        ({"id2label": ["a"]}, "id2label in its config.json must map"),
        ({"num_attention_heads": "3"}, "has num_attention_heads '3', which is not a positive integer"),
        ({"num_attention_heads": True}, "has num_attention_heads True, which is not a positive integer"),
        ({"layer_norm_eps": "small"}, "has layer_norm_eps 'small', which is not a finite number"),
        ({"qkv_bias": False}, "has qkv_bias False, and its tensors have True"),
    ],
    ids=str,
)
def test_transformers_configs_that_contradict_the_tensors(tmp_path, convert, folder, change, words):
    edit(folder("huggingface") / "config.json", change)
    start = time.time()
    code, _, error = convert(tmp_path / "huggingface", tmp_path / "new.safetensors", "--to", "vitrail")
    assert code == 2 and words in error and time.time() - start < 10
    assert not (tmp_path / "new.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"depth": 100_000}, "has model_args.depth 100000, and its tensors have 2"),
        ({"embed_dim": 96}, "has model_args.embed_dim 96, and its tensors have 48"),
        ({"mlp_ratio": 10**6}, "has model_args.mlp_ratio 1000000, and its tensors have 2.0"),
        ({"qk_norm": True}, "has model_args.qk_norm True, and its tensors have False"),
        ({"pos_embed": "none"}, "has model_args.pos_embed 'none', and its tensors have 'learn'"),
        ({"num_classes": "5"}, "has model_args.num_classes '5', and its tensors have 5"),
        ({"img_size": 64}, "has model_args.img_size 64, and its tensors have 32x32"),
        ({"window_size": 7}, "has model_args.window_size, which vitrail does not support"),
        ({"num_heads": True}, "has num_heads True, which is not a positive integer"),
        ({"num_heads": 0}, "has num_heads 0, which is not a positive integer"),
        (
            {"global_pool": "avg", "fc_norm": None},
            "cannot load these weights: tensor 'fc_norm",
        ),
    ],
    ids=str,
)
def test_timm_configs_that_contradict_the_tensors(tmp_path, convert, folder, change, words):
    edit(folder("timm") / "config.json", change, "model_args")
    code, _, error = convert(tmp_path / "timm", tmp_path / "new.safetensors", "--to", "vitrail")
    assert code == 2 and words in error and not (tmp_path / "new.safetensors").exists()


def test_an_architecture_of_another_family(tmp_path, convert, folder):
    """timm's own network of that name is tried as shapes alone: it may be of any size."""
    edit(folder("timm") / "config.json", {"architecture": "vit_giant_patch14_224"})
    values = json.loads((tmp_path / "timm" / "config.json").read_text())
    values["model_args"] = {"num_heads": 3, "act_layer": "gelu"}
    (tmp_path / "timm" / "config.json").write_text(json.dumps(values))
    code, _, error = convert(tmp_path / "timm", tmp_path / "new.safetensors", "--to", "vitrail")
    assert (
        code == 2
        and "timm's vit_giant_patch14_224 cannot load these weights: " in error
        and "nothing is written" in error
    )


def test_resnets(tmp_path, convert, folder):
    folder("huggingface", kind="resnet", blocks=(1, 1), width=32, image_size=(32, 32), num_classes=3,
           pool_padding="zeros", norm_eps=1e-5, weight_eps=1e-8, weight_eps_in="variance")  # fmt: skip
    edit(tmp_path / "huggingface" / "config.json", {"depths": [1, 10**6]})
    with pytest.raises(UserError, match=r"has depths \[1, 1000000\], and its tensors have \[1, 1\]"):
        read_weights(str(tmp_path / "huggingface"))


def test_a_size_that_contradicts_the_one_asked_for(folder):
    for to in ("timm", "huggingface"):
        with pytest.raises(UserError, match=r"is for 32x32 images .*, not 16x64"):
            read_weights(str(folder(to)), image_size=(16, 64))


def test_weights_whose_file_has_another_name(tmp_path, convert, folder):
    """transformers looks for one name alone; it is compared with all the same."""
    (folder("huggingface") / "model.safetensors").rename(tmp_path / "huggingface" / "mine.safetensors")
    edit(tmp_path / "huggingface" / "config.json", {"dtype": "float16"})
    code, said, _ = convert(tmp_path / "huggingface", tmp_path / "new.safetensors", "--to", "vitrail")
    assert code == 0 and "as read: transformers gives the same outputs" in said


@pytest.mark.parametrize("what", ["nan", "inf"])
def test_numbers_that_are_none(tmp_path, convert, folder, what):
    file = folder("timm") / "model.safetensors"
    tensors = load_file(file)
    tensors["norm.bias"][3] = float(what)
    save_file(tensors, file)
    code, _, error = convert(tmp_path / "timm", tmp_path / "new.safetensors", "--to", "vitrail")
    words = "NaN" if what == "nan" else "infinite values"
    assert code == 2 and f"tensor 'norm.bias' contains {words}" in error


@pytest.mark.slow
@pytest.mark.parametrize(("size", "patch"), [((2048, 2048), 1024), ((520, 520), 8)])
def test_images_too_large_to_compare_on(tmp_path, convert, ours, size, patch):
    source = ours(image_size=size, patch=(patch, patch), width=12, heads=1, depth=1)
    code, said, _ = convert(source, tmp_path / "timm", "--to", "timm", "--adopt-constants")
    assert code == 0 and "as written: not compared with timm: images of this size would take too long" in said


def test_the_kind_of_a_foreign_network(tmp_path):
    save_file({"convnext.layers.0.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "convnext"}))
    with pytest.raises(UserError, match="transformers model of type 'convnext'; vitrail reads vit, dinov2"):
        read_weights(str(tmp_path))


def test_the_tensors_speak_before_the_name(tmp_path):
    timm = pytest.importorskip("timm")
    from timm.models import save_for_hf

    for name, words in {
        "vit_base_patch16_clip_224": "a norm before the encoder",
        "deit_tiny_distilled_patch16_224": "a distillation token",
        "beit_base_patch16_224": "a different kind of relative position embedding",
        "swin_tiny_patch4_window7_224": "a different kind of relative position embedding",
    }.items():
        small = {} if "swin" in name else {"depth": 1}
        save_for_hf(timm.create_model(name, **small), tmp_path / name, safe_serialization=True)
        with pytest.raises(UserError, match=f"has {words}"):
            read_weights(str(tmp_path / name))


def test_a_missing_tensor_has_the_name_it_would_have_there(tmp_path, folder):
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
    assert weights.card.classes == () and "its label_names are not 5 names" in weights.assumed


def test_a_crop_of_nothing(tmp_path, folder):
    edit(folder("timm") / "config.json", {"crop_pct": 0, "crop_mode": "center"}, "pretrained_cfg")
    with pytest.raises(UserError, match="crop_fraction"):
        read_weights(str(tmp_path / "timm"))
