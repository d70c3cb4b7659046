"""The cases of the lock: commands and library calls, each in its own folder with the data and files of the old code.

Cases use public names only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.lock import observe

Work = tuple[str, ...] | Callable[[], Any]
TINY = (
    "train.steps=4",
    "train.batch_size=8",
    "train.device=cpu",
    "train.log_every=1",
    "train.evaluate_every=2",
    "precision.compute=fp32",
    "data.workers=0",
    "schedule.warmup=1",
    "optimizer.lr=0.003",
)


@dataclass(frozen=True)
class Case:
    name: str
    work: tuple[Work, ...]
    fast: bool = False
    numbers: bool = False  # compare the numbers in printed text
    mentions: tuple[str, ...] = ()  # parts that the error must contain
    left_out: tuple[str, ...] = field(default=())  # files whose contents are not compared


def settings(*assignments: str) -> tuple[str, ...]:
    return tuple(word for assignment in assignments for word in ("--set", assignment))


def command(line: str) -> tuple[str, ...]:
    return tuple(line.split())


def case(name: str, *lines: str, **options: Any) -> Case:
    return Case(name, tuple(command(line) for line in lines), **options)


def training(
    name: str, *own: str, start: str = "--from start.safetensors", data: str = "photos", more: str = ""
) -> Case:
    """A few training steps of a tiny network, with additional settings."""
    words = command(f"train {data} {start} --out out {more}") + settings(*TINY, *own)
    return Case(name, (words,))


def family(name: str) -> Case:
    """Convert, train, evaluate and explain a network of another family."""
    file, size = FIXTURE[name]
    lines = (
        f"convert {{fixtures}}/{file} {name}.safetensors --to vitrail --image-size {size}",
        "evaluate out unseen --json --device cpu",
        "predict out unseen --json --device cpu",
        "explain out unseen --shown 1 --measured 0 --out shown --json --device cpu",
    )
    train = command(f"train photos --from {name}.safetensors --out out") + settings(*TINY)
    return Case(f"family-{name}", (command(lines[0]), train, *map(command, lines[1:])))


def refused(name: str, line: str, *mentions: str, fast: bool = False) -> Case:
    return Case(name, (command(line),), fast=fast, mentions=mentions)


# Tiny networks of every family, in the layouts of the original code.
FIXTURE = {
    "hybrid": ("google_hybrid_stem_only.npz", "64x64"),
    "resnet": ("bigvision_bit_resnet.npz", "48x64"),
    "map": ("bigvision_map.npz", "16x16"),
    "gap": ("bigvision_gap_sincos.npz", "16x24"),
    "representation": ("google_vit_representation.npz", "16x16"),
}
COMMANDS = command(
    "check compare convert demo evaluate explain fewshot knn models pack paper plan predict recipes train transfer vtab"
)


def _bits(module: Any) -> dict[str, Any]:
    """Checksums of the weights and outputs of a network."""
    import torch

    whole = hashlib.sha256()
    for name, tensor in sorted(observe.called_before(module.state_dict()).items()):
        whole.update(name.encode() + tensor.numpy().tobytes())
    side = 32
    pixels = torch.linspace(-1, 1, 2 * 3 * side * side).reshape(2, 3, side, side)
    answers = module.eval()(pixels)
    state = [tensor.double().abs().mean().item() for tensor in module.state_dict().values()]
    return {
        "bits": {"state": whole.hexdigest()[:32], "answers": hashlib.sha256(_bytes(answers)).hexdigest()[:32]},
        "answers": answers.flatten().tolist(),
        "tensors": len(state),
        "size": sum(state),
    }


def _bytes(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().numpy().tobytes())


NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gap": {"pool": "gap"},
    "map": {"pool": "map"},
    "registers": {"registers": 2, "layer_scale": 0.1},
    "1d-layers": {"positions_at": "layers"},
    "2d-shared": {"positions": "2d", "positions_at": "shared"},
    "sincos": {"positions": "sincos", "norm": "after_pool", "pool": "gap"},
    "relative": {"positions": "relative"},
    "none": {"positions": "none"},
    "no-prefix-positions": {"prefix_positions": False},
    "representation": {"representation": 24, "gelu": "erf", "head_bias": -10.0},
    "drop": {"dropout": 0.1, "drop_path": 0.1},
}


def create_networks() -> dict[str, Any]:
    """Initial weights and outputs of tiny networks of every kind."""
    import torch

    import vitrail

    found = {}
    small = {"width": 48, "depth": 2, "mlp_dim": 96, "heads": 3}
    for name, options in NETWORKS.items():
        torch.manual_seed(1)
        found[name] = _bits(vitrail.create("Ti/8", 5, 32, **small, **options))
    for name, options in (
        ("Axial-Ti/8", small),
        ("R+Ti/16", small),
        ("R26+Ti/32", {**small, "stem": {"blocks": [1, 1, 1, 1], "width": 32}}),
        ("R26x1", {"blocks": [1, 1], "width": 32}),
    ):
        torch.manual_seed(1)
        found[name] = _bits(vitrail.create(name, 5, 32, **options))
    return found


def learn_gradients() -> dict[str, Any]:
    """Loss and gradients of tiny networks in training mode, with dropout."""
    import torch

    import vitrail

    found = {}
    for name, options in NETWORKS.items():
        torch.manual_seed(2)
        net = vitrail.create("Ti/8", 5, 32, width=48, depth=2, mlp_dim=96, heads=3, **options).train()
        torch.nn.init.normal_(net.head.weight, std=0.1)
        loss = torch.nn.functional.cross_entropy(net(torch.randn(4, 3, 32, 32)), torch.arange(4))
        loss.backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        bits = hashlib.sha256(b"".join(_bytes(one) for one in gradients)).hexdigest()[:32]
        norms = sum(one.double().square().sum().item() for one in gradients)
        found[name] = {"bits": bits, "loss": loss.item(), "norms": norms, "gradients": len(gradients)}
    return found


def use_loaded() -> dict[str, Any]:
    """Predictions and attributes of classifiers from `load`."""
    from pathlib import Path

    import vitrail

    found: dict[str, Any] = {}
    for name in ("run", "start.safetensors", "tagger.safetensors"):
        classifier = vitrail.load(name)
        answers = classifier.predict([str(path) for path in sorted(Path("unseen/red").glob("*.png"))])
        found[name] = {
            "classes": list(classifier.classes or []),
            "answers": [
                {"label": one.label, "probability": one.probability, "top": [list(pair) for pair in one.top]}
                for one in answers
            ],
            "parameters": sum(p.numel() for p in classifier.net.parameters()),
        }
    return found


def train_module() -> dict[str, Any]:
    """Train a custom network with a custom loss and custom batches."""
    import torch

    import vitrail

    def batches(start: int) -> Any:
        for number in range(start, 100):
            random = torch.Generator().manual_seed(number)
            inputs = torch.randn(16, 4, generator=random)
            yield inputs, inputs.sum(1, keepdim=True)

    def loss(module: Any, batch: Any) -> Any:
        return (module(batch[0]) - batch[1]).square().mean()

    def measure(module: Any) -> dict[str, float]:
        return {"val_loss": float(loss(module, next(iter(batches(99)))))}

    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    overrides = ["train.steps=6", "train.log_every=1", "train.evaluate_every=3", "optimizer.lr=0.01", "train.ema=0.9"]
    result = vitrail.train(
        model=module, objective=loss, source=batches, evaluator=measure, out="own", overrides=overrides
    )
    scores = result.scores
    assert isinstance(scores, dict)
    return {"scores": scores, "weights": str(result.weights), "first": module[0].weight.flatten().tolist()}


def refuse_in_python() -> dict[str, Any]:
    """Types of the exceptions that invalid calls raise."""
    import vitrail

    found = {}
    calls: dict[str, Callable[[], Any]] = {
        "no such weights": lambda: vitrail.load("nowhere.safetensors"),
        "no such model": lambda: vitrail.create("Q/16"),
        "no such data": lambda: vitrail.train("nowhere", out="x"),
        "no such option": lambda: vitrail.create("Ti/16", colour=3),
        "no data": lambda: vitrail.train(),
        "no such name": lambda: vitrail.nothing,
    }
    for name, call in calls.items():
        try:
            call()
            found[name] = "none"
        except Exception as error:
            found[name] = type(error).__name__
    return found


def make_task() -> None:
    """Write a task of VTAB-1k with its lists of images."""
    from pathlib import Path

    from tests.lock import data

    folder, number = Path("tasks/patch_camelyon"), 0
    for name, count in (("train800", 800), ("val200", 200), ("test", 40)):
        lines = []
        for _ in range(count):
            number += 1
            data.write_image(folder / f"{number}.png", list(data.CENTRES.values())[number % 2], number, (8, 8))
            lines.append(f"{number}.png {number % 2}\n")
        (folder / f"{name}.txt").write_text("".join(lines))


PYTHON = [
    Case("python-create", (create_networks,)),
    Case("python-gradients", (learn_gradients,)),
    Case("python-load", (use_loaded,), fast=True),
    Case("python-train-module", (train_module,)),
    Case("python-errors", (refuse_in_python,), fast=True),
]

TRAINING = [
    training("train"),
    training("train-splits", data="splits"),
    training("train-workers", "data.workers=2", "data.cache=none", data="splits"),
    training("train-cache-disk", "data.cache=disk"),
    training("train-table", data="tags/tags.csv"),
    training("train-tags-mixup", "augment.mixup=0.3", "objective.label_smoothing=0.1", data="tags/tags.csv"),
    training("train-mixup-ema", "augment.mixup=0.4", "augment.cutmix=1.0", "train.ema=0.8"),
    training("train-mix-sample", "augment.mixup=0.4", "augment.mix_per=sample", "augment.repeats=2"),
    training(
        "train-randaugment",
        "augment.randaugment_layers=2",
        "augment.erasing=0.5",
        "augment.hue=0.1",
        "augment.jitter=0.3",
    ),
    training("train-timm-randaugment", "augment.randaugment_layers=2", "augment.randaugment_style=timm"),
    training("train-three-augment", "augment.three_augment=true", "augment.crop=resmall"),
    training("train-crop-shift", "augment.crop=shift", "augment.flip_vertical=true"),
    training("train-crop-zoom", "augment.crop=zoom", "objective.label_smoothing=0.1"),
    training("train-sgd", "optimizer.name=sgd", "schedule.shape=linear", "schedule.end=1e-4"),
    training("train-muon", "optimizer.name=muon", "schedule.shape=rsqrt", "schedule.cooldown=2"),
    training("train-layer-decay", "optimizer.layer_decay=0.5", "optimizer.clip=0.1", "schedule.shape=constant"),
    training("train-staircase", "schedule.shape=staircase", "optimizer.decay=all", "optimizer.weight_decay=0.3"),
    training("train-freeze", "optimizer.freeze=backbone"),
    training("train-micro-batch", "train.micro_batch=3", "train.recompute=true"),
    training("train-bf16", "precision.compute=bf16", "precision.parameters=bf16", "precision.residual=bf16"),
    training("train-sigmoid", "objective.loss=sigmoid", "objective.class_weights=balanced"),
    training("train-lora", "lora.rank=2", "lora.matrices=all", more="--recipe lora"),
    training("train-distil", "objective.teacher=run", "objective.teacher_share=0.7", "objective.temperature=2.0"),
    training("train-distil-hard", "objective.teacher=run", "objective.teacher_answers=hard", more="--recipe distill"),
    training("train-masked", 'model.name=""', "model.image_size=[16,16]", more="--recipe masked"),
    training("train-masked-grid", 'model.name=""', "model.image_size=[16,16]", more="--recipe masked-grid"),
    training("train-masked-pixels", 'model.name=""', "model.image_size=[16,16]", more="--recipe masked-pixels"),
    training("train-paper-finetune", "model.image_size=8", more="--recipe paper-finetune-cifar"),
    training("train-size", "model.image_size=[12,16]"),
    training("train-own-size", "preprocess.resize=short_side", "preprocess.crop_fraction=0.9"),
    training("train-grey", "model.channels=1", "train.steps=1", "model.image_size=16", start="--model Ti/16"),
    training("train-all-tested", "data.monitor=0", "data.val=test", data="splits"),
    *(family(name) for name in FIXTURE),
    training("train-scratch", "model.image_size=16", "train.steps=2", start="--model Ti/16", more="--recipe scratch"),
    training(
        "train-masked-scratch",
        "model.image_size=32",
        "model.registers=2",
        "train.steps=1",
        start="--model Ti/16",
        more="--recipe masked --set model.initial=mimetic",
    ),
    case("train-probe", "train photos --from start.safetensors --recipe probe --out out --set data.workers=0"),
    case("train-user-recipe", "train photos --from start.safetensors --recipe recipe.toml --out out"),
    training("train-chosen-start", "train.steps=1", start=""),
    Case(
        "train-twice",
        (
            command("train photos --from run --out runs/first") + settings(*TINY),
            command("train photos --from run --out runs/first") + settings(*TINY),
            command("train splits --from run --out runs/first --overwrite") + settings(*TINY),
            command("train splits --out runs/first --resume"),
            command("compare runs/first run --data unseen --json --device cpu"),
        ),
    ),
    training("train-quarantine", data="broken"),
]

OLD_FILES = [
    case("old-resume", "train --resume --out stopped", "train --resume --accept-changes --out stopped"),
    case("old-resume-finished", "train --resume --out run"),
    training("old-train-from-run", start="--from run"),
    training("old-train-pack", data="packed"),
    case("old-evaluate", "evaluate run unseen --json --device cpu", fast=True),
    case("old-evaluate-held-out", "evaluate run photos --json --device cpu --report report.html"),
    case("old-evaluate-pack", "evaluate run packed --split val --json --device cpu"),
    case("old-evaluate-tags", "evaluate tagger.safetensors tags/tags.csv --json --device cpu --write"),
    case(
        "old-evaluate-write",
        "evaluate run unseen --target-accuracy 0.6 --write --json --device cpu",
        "predict run unseen --json --device cpu",
    ),
    case("old-predict-json", "predict run unseen --json --top 3 --device cpu", fast=True),
    case("old-predict-csv", "predict run unseen.zip packed --csv --top 2 --device cpu"),
    case("old-predict-table", "predict tagger.safetensors tags/tags.csv --csv --device cpu"),
    case("old-predict-text", "predict run photos/red/000.png --top 3 --threshold 0.4 --device cpu", numbers=True),
    case("old-predict-broken", "predict run broken --json --device cpu"),
    case("old-predict-foreign", "predict small.npz photos/red --image-size 8x8 --json --device cpu"),
    case("old-explain", "explain run unseen --shown 2 --measured 10 --out shown --json --device cpu"),
    case("old-explain-weights", "explain start.safetensors --out shown --json --device cpu"),
    case("old-explain-one", "explain run photos/red/000.png --why red --rather-than blue --measured 0 --out shown"),
    case("old-paper", "paper figure-6 run --images photos/red --out six.svg", "paper figure-7 run --images photos/red"),
    case("old-paper-two", "paper figure-10 run start.safetensors", "paper figure-11 run --images photos/red"),
    case("old-fewshot", "fewshot run unseen splits --shots 1,2,all --by least-squares --by probe --by knn --json"),
    case("old-fewshot-form", "fewshot run unseen splits --shots 1,2 --form big_vision --json", "fewshot run unseen"),
    case("old-knn", "knn run splits unseen --neighbours 5 --temperature 0.1 --json"),
    Case(
        "old-transfer",
        (
            command("transfer splits --from run --rates 0.003,0.03 --seeds 2 --out row --recipe finetune")
            + settings(*TINY[:-1], "train.steps=2"),
        ),
        numbers=True,
    ),
    case("old-check", "check broken --out found --json", "check photos", "check packed --json"),
    case("old-quarantine", "check broken --out found", "evaluate run broken --quarantine found/quarantine.csv --json"),
    case(
        "old-pack",
        "pack tags/tags.csv new",
        "pack photos small --resize 12 --quality 90",
        "predict run small --json",
        left_out=("small/",),  # JPEGs differ between versions of libjpeg
    ),
    case(
        "old-convert",
        "convert run plain.safetensors --to vitrail --half --licence free",
        "convert run timm --to timm --adopt-constants",
        "convert run hf --to huggingface --adopt-constants",
        "convert run google.npz --to google --adopt-constants",
        "convert timm back-timm.safetensors --to vitrail",
        "convert hf back-hf.safetensors --to vitrail",
        "convert google.npz back-google.safetensors --to vitrail --image-size 8x8",
        "predict back-timm.safetensors photos/red --json --device cpu",
        "predict hf photos/red --json --device cpu",
        "convert run google.npz --to google",
    ),
    case(
        "convert-fixtures",
        *(
            f"convert {{fixtures}}/{file} {kind}.safetensors --to vitrail --image-size {size}"
            for kind, (file, size) in FIXTURE.items()
        ),
        "convert resnet.safetensors hf --to huggingface --adopt-constants",
        "convert hybrid.safetensors timm --to timm --adopt-constants",
        "convert map.safetensors map.npz --to google --adopt-constants",
    ),
]

LISTS = [
    case("models", "models --json", fast=True),
    case("models-text", "models", numbers=True),
    case("recipes", "recipes", numbers=True),
    case("recipes-text", *(f"recipes {name}" for name in ("finetune", "masked", "paper-jft-h14")), numbers=True),
    case(
        "plan",
        "plan B/16 --json",
        "plan R50+L/32 --image-size 384 --batch 64 --accelerator A100-80GB --json",
        "plan R50x1 --classes 10 --json",
        "plan Axial-B/16 --json",
        "plan S/16 --set model.positions=relative --set model.pool=gap --json",
        "plan Ti/16 --set lora.rank=4 --set train.ema=0.9 --set train.recompute=true --json",
        fast=True,
    ),
    case("vtab", "vtab --json", "vtab run", "vtab run empty --json", "vtab run empty --tasks dtdd"),
    Case("vtab-task", (make_task, command("vtab run tasks --json --device cpu"))),
    case("version", "--version", "--help", *(f"{name} --help" for name in COMMANDS), fast=True),
]

REFUSED = [
    refused("no-such-command", "trian photos", "train", fast=True),
    refused("no-such-option", "train photos --modle S/16", "--model"),
    refused("no-such-data", "train photso", "photso", "photos", fast=True),
    refused("no-such-recipe", "train photos --recipe finetun", "finetun", "finetune"),
    refused("no-such-model", "train photos --model s/16", "s/16", "S/16"),
    refused("no-such-setting", "train photos --set train.stesp=3", "train.stesp", "train.steps", fast=True),
    refused("no-such-value", "train photos --set optimizer.name=sdg", "optimizer.name", "adamw", "muon"),
    refused("no-equals", "train photos --set train.steps", "train.steps"),
    refused("no-such-weights", "train photos --from nowhere", "nowhere"),
    refused("no-images", "train empty", "empty"),
    refused("no-classes", "train photos/red"),
    refused("free-folder", "train photos --from start.safetensors --out run", "run"),
    refused("no-run", "train --resume --out empty", "empty"),
    refused("other-settings", "train photos --resume --out run --set train.steps=3", "run"),
    refused("no-reader", "train photos --from start.safetensors --set masked.share=0.3", "masked"),
    refused("bad-config", "plan S/16 --set model.pool=best", "pool", "gap"),
    refused("predict-missing", "predict run photos/nothing.png", "photos/nothing.png"),
    refused("predict-swapped", "predict photos/red/000.png run", "photos/red/000.png"),
    refused("predict-size", "predict {fixtures}/google_vit_token.npz photos/red/000.png", "--image-size"),
    refused("evaluate-split", "evaluate run photos --split test", "test"),
    refused("evaluate-classes", "evaluate run tags/tags.csv"),
    refused("evaluate-unnamed", "evaluate start.safetensors unseen"),
    refused("compare-unnamed", "compare run start.safetensors --data unseen --json"),
    refused("explain-class", "explain run photos/red/000.png --why purple", "purple"),
    refused("compare-one", "compare run"),
    refused("convert-there", "convert run start.safetensors --to vitrail", "start.safetensors"),
    refused("convert-pickle", "convert model.pt out.safetensors --to vitrail", "model.pt"),
    refused("fewshot-none", "fewshot run"),
    refused("paper-two", "paper figure-7 run start.safetensors"),
    refused("vtab-where", "vtab run nowhere", "nowhere"),
    refused("transfer-no-test", "transfer photos --from run --out row", "photos"),
]

CASES = [*PYTHON, *TRAINING, *OLD_FILES, *LISTS, *REFUSED]
