"""The .npz checkpoints of google-research: vision_transformer with its hybrids, big_vision, and BiT's ResNets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from vitrail.config import NetworkConfig, Preprocess, Size
from vitrail.errors import UserError
from vitrail.weights.foreign import Foreign, guessed_square, resnet_config, translate, vit_config
from vitrail.weights.layout import SAME, Form, Layout, Rule
from vitrail.weights.tensors import Tensors

# flax multiplies from the other side: inputs come first in its kernels, and heads have an axis of their own.
DENSE = Form(lambda t: t.flatten(1).T, lambda t, _: t.T)  # (in, out) <-> (out, in)
CONV = Form(lambda t: t.permute(3, 2, 0, 1), lambda t, _: t.permute(2, 3, 1, 0))  # (h, w, in, out) <-> (out, in, h, w)
SPLIT = Form(lambda t: t.flatten(1).T, lambda t, heads: t.T.reshape(t.shape[1], heads, -1))  # (D, heads, D/heads)
SPLIT_BIAS = Form(lambda t: t.flatten(), lambda t, heads: t.reshape(heads, -1))
MERGE = Form(lambda t: t.flatten(0, -2).T, lambda t, heads: t.T.reshape(heads, -1, len(t)))  # (heads, D/heads, D)
FLAT = Form(lambda t: t.flatten(), lambda t, _: t)
WIDE = Form(lambda t: t.flatten(), lambda t, _: t.reshape(1, 1, 1, -1))
POINT = Form(lambda t: t.flatten(0, 2).T, lambda t, _: t.T[None, None])  # a 1x1 convolution that we have as a matrix

PREFIXES = ("opt/target/", "params/")  # where training code keeps the parameters among other things


def _dense(ours: str, theirs: str) -> list[Rule]:
    return [Rule(f"{ours}.weight", (f"{theirs}/kernel",), DENSE), Rule(f"{ours}.bias", (f"{theirs}/bias",))]


def _norm(ours: str, theirs: str, form: Form = SAME, words: tuple[str, str] = ("scale", "bias")) -> list[Rule]:
    return [
        Rule(f"{ours}.{leaf}", (f"{theirs}/{word}",), form)
        for leaf, word in zip(("weight", "bias"), words, strict=True)
    ]


def _conv(ours: str, theirs: str) -> list[Rule]:
    return [Rule(f"{ours}.weight", (f"{theirs}/kernel",), CONV)]


def _attention(ours: Mapping[str, tuple[str, ...]], out: str, theirs: str) -> list[Rule]:
    rules = [Rule(f"{out}.weight", (f"{theirs}/out/kernel",), MERGE), Rule(f"{out}.bias", (f"{theirs}/out/bias",))]
    for name, parts in ours.items():
        rules.append(Rule(f"{name}.weight", tuple(f"{theirs}/{part}/kernel" for part in parts), SPLIT))
        rules.append(Rule(f"{name}.bias", tuple(f"{theirs}/{part}/bias" for part in parts), SPLIT_BIAS))
    return rules


ATTENTION, MLP = "MultiHeadDotProductAttention", "MlpBlock"
BLOCK, UNIT = "Transformer/encoderblock_{0}", "block{0+1}/unit{1+1}"
# Old flax counts all modules of a block together, newer flax each kind: the numbers of attention, MLP, second norm.
OLD, NEW = (1, 3, 2), (0, 0, 1)


def vit_layout(positions: str, numbers: tuple[int, int, int]) -> Layout:
    attention, mlp, norm2 = numbers
    ours, stage, pool = "blocks.{0}", "patch_embed.stem.stages.{0}.{1}", f"MAPHead_0/{ATTENTION}_0"
    rules = [
        Rule("cls_token", ("cls",)),
        Rule("pos_embed.table", (positions,)),
        *_conv("patch_embed.proj", "embedding"),
        Rule("patch_embed.proj.bias", ("embedding/bias",)),
        *_norm(f"{ours}.norm1", f"{BLOCK}/LayerNorm_0"),
        *_attention(
            {f"{ours}.attn.qkv": ("query", "key", "value")},
            f"{ours}.attn.proj",
            f"{BLOCK}/{ATTENTION}_{attention}",
        ),
        *_norm(f"{ours}.norm2", f"{BLOCK}/LayerNorm_{norm2}"),
        *_dense(f"{ours}.mlp.fc1", f"{BLOCK}/{MLP}_{mlp}/Dense_0"),
        *_dense(f"{ours}.mlp.fc2", f"{BLOCK}/{MLP}_{mlp}/Dense_1"),
        *_norm("norm", "Transformer/encoder_norm"),
        Rule("attn_pool.latent", ("MAPHead_0/probe",)),
        *_attention({"attn_pool.q": ("query",), "attn_pool.kv": ("key", "value")}, "attn_pool.proj", pool),
        *_norm("attn_pool.norm", "MAPHead_0/LayerNorm_0"),
        *_dense("attn_pool.mlp.fc1", f"MAPHead_0/{MLP}_0/Dense_0"),
        *_dense("attn_pool.mlp.fc2", f"MAPHead_0/{MLP}_0/Dense_1"),
        *_dense("pre_logits.fc", "pre_logits"),
        *_dense("head", "head"),
        *_conv("patch_embed.stem.root", "conv_root"),
        *_norm("patch_embed.stem.norm", "gn_root", FLAT),
        *_conv(f"{stage}.shortcut", f"{UNIT}/conv_proj"),
        *_norm(f"{stage}.shortcut_norm", f"{UNIT}/gn_proj", FLAT),
    ]
    for index in (1, 2, 3):
        rules += _conv(f"{stage}.conv{index}", f"{UNIT}/conv{index}")
        rules += _norm(f"{stage}.norm{index}", f"{UNIT}/gn{index}", FLAT)
    return Layout(rules)


def big_vision_resnet() -> Layout:
    ours, theirs = "stages.{0}.{1}", "block{0+1}/unit{1+1:02}"
    rules = [
        *_conv("root", "root_block/conv_root"),
        *_conv(f"{ours}.shortcut", f"{theirs}/conv_proj"),
        *_norm("norm", "norm-pre-head", WIDE),
        *_dense("head", "head"),
    ]
    for index in (1, 2, 3):
        rules += _conv(f"{ours}.conv{index}", f"{theirs}/conv{index}")
        rules += _norm(f"{ours}.norm{index}", f"{theirs}/gn{index}", WIDE)
    return Layout(rules)


def released_resnet() -> Layout:
    """BiT's own files, which hold the names of TensorFlow modules."""
    ours, theirs, conv, words = (
        "stages.{0}.{1}",
        "resnet/block{0+1}/unit{1+1:02}",
        "standardized_conv2d",
        ("gamma", "beta"),
    )
    rules = [
        *_conv("root", f"resnet/root_block/{conv}"),
        *_conv(f"{ours}.shortcut", f"{theirs}/a/proj/{conv}"),
        *_norm("norm", "resnet/group_norm", FLAT, words),
        Rule("head.weight", ("resnet/head/conv2d/kernel",), POINT),
        Rule("head.bias", ("resnet/head/conv2d/bias",), FLAT),
    ]
    for index, letter in enumerate("abc", start=1):
        rules += _conv(f"{ours}.conv{index}", f"{theirs}/{letter}/{conv}")
        rules += _norm(f"{ours}.norm{index}", f"{theirs}/{letter}/group_norm", FLAT, words)
    return Layout(rules)


INPUT_TABLE, TABLE = "Transformer/posembed_input/pos_embedding", "pos_embedding"  # vision_transformer's, big_vision's
QUERY = re.compile(rf"Transformer/encoderblock_\d+/{ATTENTION}_0/query/kernel|MAPHead_0/{ATTENTION}_0/query/kernel")
RELEASED_MARK = "resnet/root_block/standardized_conv2d/kernel"
BIG_VISION_MARK = "root_block/conv_root/kernel"


def read(source: Tensors, image_size: Size | None = None) -> Foreign:
    """Weights in flax's names. The file knows no non-square size, no class names and no preprocessing of its own:
    every network of this family takes squashed images with pixels in [-1, 1]."""
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in source.shapes)), "")
    source = source.named({name.removeprefix(prefix): name for name in source.shapes if name.startswith(prefix)})
    if RELEASED_MARK in source.shapes or BIG_VISION_MARK in source.shapes:
        return _read_resnet(source, image_size)
    source = source.named(_renumbered(source.shapes))
    heads = {shape[1:2] for name, shape in source.shapes.items() if QUERY.fullmatch(name)}
    if len(heads) != 1 or () in heads:
        problem = "layers of different numbers of heads" if len(heads) > 1 else "no network of google-research"
        raise UserError(f"{source.where} has {problem}")
    big_vision = INPUT_TABLE not in source.shapes
    learned = INPUT_TABLE in source.shapes or TABLE in source.shapes
    model, state = translate(
        source,
        vit_layout(TABLE if big_vision else INPUT_TABLE, NEW),
        lambda blank: vit_config(
            blank,
            source.where,
            [],
            image_size,
            (not big_vision,),
            heads=heads.pop()[0],
            positions="1d" if learned else "sincos",
            **CONSTANTS,
        ),
    )
    assumed = guessed_square(model, [], image_size) if learned else ""
    return Foreign(model, state, preprocess_for(model), assumed=assumed)


CONSTANTS = {"gelu": "tanh", "norm_eps": 1e-6}


def _read_resnet(source: Tensors, image_size: Size | None) -> Foreign:
    released = RELEASED_MARK in source.shapes
    if released:  # beside the network, the optimiser's step and its like
        source = source.named({name: name for name in source.shapes if name.startswith("resnet/")})
        source = source.named({re.sub(r"(standardized_conv2d)_\d+/", r"\1/", name): name for name in source.shapes})
    model, state = translate(
        source,
        released_resnet() if released else big_vision_resnet(),
        lambda blank: resnet_config(
            blank, source.where, image_size or (224, 224), pool_padding="zeros" if released else "none"
        ),
    )
    assumed = "" if image_size else "images of 224x224, since its weights fit any"
    return Foreign(model, state, preprocess_for(model), assumed=assumed)


def preprocess_for(model: NetworkConfig) -> Preprocess:
    """What these files go without saying."""
    half = (0.5,) * model.channels
    return Preprocess(size=model.image_size, antialias=False, mean=half, std=half)


NUMBERED = re.compile(rf"(.*/encoderblock_\d+)/(LayerNorm|{ATTENTION}|{MLP})_(\d{{1,9}})(/.*)")


def _renumbered(names: Iterable[str]) -> dict[str, str]:
    """Newer flax's names, with the modules of each block numbered by kind, to those of the file."""
    matches = [match for name in names if (match := NUMBERED.fullmatch(name))]
    numbers: dict[tuple[str, str], set[int]] = {}
    for match in matches:
        numbers.setdefault((match[1], match[2]), set()).add(int(match[3]))
    order = {key: sorted(found) for key, found in numbers.items()}
    new = {m[0]: f"{m[1]}/{m[2]}_{order[m[1], m[2]].index(int(m[3]))}{m[4]}" for m in matches}
    return {new.get(name, name): name for name in names}
