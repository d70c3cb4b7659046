"""Parameter names of files written before the names of timm were used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from vitrail.config import LoraConfig, ModelConfig, OptimizerConfig, ResNetConfig
from vitrail.distributed import SINGLE_PROCESS
from vitrail.errors import UserError
from vitrail.models.build import build_model
from vitrail.models.legacy_names import new_name, new_names, old_name
from vitrail.models.lora import add_lora
from vitrail.models.masked import MaskedPatchNetwork
from vitrail.models.resnet import ResNet
from vitrail.training.ema import EMA
from vitrail.training.optimizer import build_optimizer
from vitrail.training.state import TrainState
from vitrail.weights.bundle import Card, read_bundle
from vitrail.weights.names import BUNDLED_FILE
from vitrail.weights.read import read_weights
from vitrail.workflows.fit import HEADER, _load_result

OLD_FILES = Path(__file__).parents[1] / "lock" / "old"
SMALL = {"width": 32, "depth": 2, "mlp_dim": 40, "heads": 4, "patch": (8, 8), "image_size": (32, 32), "num_classes": 5}
ALL = {
    "tokens": {"registers": 2, "layer_scale": 0.1, "representation": 8},
    "map": {"pool": "map", "positions": "relative"},
    "hybrid": {"stem": {"blocks": (1, 1), "width": 32}, "patch": (1, 1)},
    "2d": {"positions": "2d", "positions_at": "layers", "norm": "after_pool", "pool": "gap"},
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tokens.class_token", "cls_token"),
        ("tokens.stem.stages.0.1.norm1.weight", "patch_embed.stem.stages.0.1.norm1.weight"),
        ("tokens.stem.norm.weight", "patch_embed.stem.norm.weight"),
        ("positions.3.table", "pos_embed.3.table"),
        ("encoder.blocks.10.attention.qkv.bias", "blocks.10.attn.qkv.bias"),
        ("encoder.blocks.0.attention.relative.table", "blocks.0.attn.relative.table"),
        ("encoder.blocks.0.attention.out.lora_a", "blocks.0.attn.proj.lora_a"),
        ("encoder.blocks.1.scale2.gain", "blocks.1.ls2.gamma"),
        ("encoder.norm.bias", "norm.bias"),
        ("pool.norm.bias", "fc_norm.bias"),
        ("pool.probe", "attn_pool.latent"),
        ("pool.mlp_norm.weight", "attn_pool.norm.weight"),
        ("pool.mlp.down.weight", "attn_pool.mlp.fc2.weight"),
        ("representation.layer.weight", "pre_logits.fc.weight"),
        ("head.weight", "head.weight"),
        ("model/net.encoder.blocks.0.mlp.up.weight", "model/net.blocks.0.mlp.fc1.weight"),
        ("optimizer/exp_avg/encoder.norm.weight", "optimizer/exp_avg/norm.weight"),
        ("average/net.mask", "average/net.mask"),
    ],
)
def test_both_directions(old, new):
    assert new_name(old) == new
    assert old_name(new) == old
    assert new_name(new) == new


@pytest.mark.parametrize("kind", ALL)
def test_every_name_has_one_of_before(kind):
    config = ModelConfig(**{**SMALL, **ALL[kind]})
    masked = MaskedPatchNetwork(build_model(config.model_copy(update={"num_classes": 0})), "color")
    adapted = build_model(config)
    add_lora(adapted, LoraConfig(rank=2, target_modules="all"))
    for net in (masked, adapted):
        names = list(net.state_dict())
        old = [old_name(name) for name in names]
        assert len(set(old)) == len(names)
        assert [new_name(name) for name in old] == names
        assert new_names(old) == dict(zip(names, old, strict=True))


def test_the_names_of_a_resnet_stay():
    names = list(
        build_model(
            ResNetConfig(kind="resnet", blocks=(1, 1), width=32, image_size=(32, 32), num_classes=5)
        ).state_dict()
    )
    assert new_names(names) == {name: name for name in names}


def test_a_file_of_two_times_is_left_as_it_is():
    """The check against the network then reports the additional tensor."""
    assert new_names(["encoder.norm.weight", "norm.weight"]).keys() == {"encoder.norm.weight", "norm.weight"}


@pytest.mark.parametrize(
    "path", [OLD_FILES / "start.safetensors", OLD_FILES / "run" / "model.safetensors", BUNDLED_FILE], ids=str
)
def test_files_of_before_are_read_bit_for_bit(path):
    weights = read_weights(path)
    build_model(weights.card.model).load_state_dict(weights.state)
    with safe_open(path, framework="pt") as file:
        for name, tensor in weights.state.items():
            assert torch.equal(tensor, file.get_tensor(old_name(name)).float())


def test_a_tensor_of_a_later_name_in_a_file_of_before(tmp_path):
    path = tmp_path / "both.safetensors"
    config = ModelConfig(**SMALL)
    state = {old_name(name): tensor for name, tensor in build_model(config).state_dict().items()}
    card = Card(
        model=config,
        preprocess={"size": (32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3},
        created_with="a test",
        format=1,
    )
    save_file({**state, "norm.weight": torch.ones(32)}, path, metadata={"vitrail": card.model_dump_json()})
    with pytest.raises(UserError, match="is missing"):
        read_bundle(path)


def stepped(net):
    """A network with optimizer and EMA after one step."""
    optimizer = build_optimizer(net, OptimizerConfig(lr=0.1))
    state = TrainState(net, optimizer, EMA(net, 0.9))
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state.ema.update(net, 5)
    return state


def with_updates():
    net = build_model(ModelConfig(**SMALL))
    add_lora(net, LoraConfig(rank=2))
    return net


def named_before(name):
    """Also inside a custom module, as its submodule "mine"."""
    return old_name(name.replace("mine.", "net.")).replace("net.", "mine.") if "mine." in name else old_name(name)


@pytest.mark.parametrize(
    "make",
    [
        lambda: build_model(ModelConfig(**{**SMALL, **ALL["tokens"]})),
        lambda: MaskedPatchNetwork(build_model(ModelConfig(**{**SMALL, "num_classes": 0})), "color"),
        with_updates,
        lambda: build_model(ResNetConfig(kind="resnet", blocks=(1,), width=32, image_size=(32, 32), num_classes=5)),
        lambda: nn.ModuleDict({"mine": build_model(ModelConfig(**SMALL))}),  # a custom module
    ],
    ids=["plain", "masked", "lora", "resnet", "own"],
)
def test_checkpoints_of_before_are_taken_over(make):
    source, target = stepped(make()), stepped(make())
    resnet = isinstance(source.model, ResNet)
    saved = {name if resnet else named_before(name): tensor for name, tensor in source.tensors().items()}
    assert resnet or saved.keys() != source.tensors().keys()
    facts = {"step": 1, "passed": 0, "rollbacks": 0, "evaluated": 0, "unfit": 0}
    target.load(saved.keys(), lambda name, rows: saved[name].clone(), facts)
    restored = target.tensors()
    assert restored.keys() == source.tensors().keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in source.tensors().items())


def test_a_finished_module_of_the_callers_own(tmp_path):
    net, again = build_model(ModelConfig(**SMALL)), build_model(ModelConfig(**SMALL))
    state = {old_name(name): tensor + 1 for name, tensor in net.state_dict().items()}
    facts = {"config": {}, "created_with": "an earlier vitrail"}
    save_file(state, tmp_path / "model.safetensors", metadata={HEADER: json.dumps(facts)})
    _load_result(again, tmp_path, SINGLE_PROCESS)
    assert all(torch.equal(tensor, state[old_name(name)]) for name, tensor in again.state_dict().items())
