"""What a run can be told: the sections of a recipe and of config.toml. Unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from vitrail.config.legacy_settings import current_settings
from vitrail.config.network import (
    Fraction,
    Gelu,
    NormPosition,
    Pooling,
    Positions,
    PositionsAt,
    Resampling,
    Schema,
    Size,
)

Beta = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]


def _both(side: Any) -> Any:
    """96 is 96x96."""
    return (side, side) if isinstance(side, int) else side


class ModelChoice(Schema):
    """The network a run asks for; with the data's class count it becomes a ModelConfig."""

    name: str = ""  # "S/16"; empty: that of the starting weights, or chosen from the data
    weights: str = ""  # what to start from: a file, a folder, bundled or hf-hub:owner/name; empty: as `start` says
    # without weights: random ones; some that the run finds by itself; none, they have to be named; if not set, some are
    # found, unless the other keys describe a network of its own
    start: Literal["random", "auto", "required"] | None = None
    init: Literal["paper", "mimetic"] = "paper"  # random weights: as the paper draws them, or like trained attention
    image_size: Annotated[Size | None, BeforeValidator(_both)] = None  # none: of the starting weights, else 224
    channels: Literal[1, 3, 4] | None = None  # grey, colour, colour with alpha; none: of the starting weights, else 3
    pool: Pooling | None = None
    norm: NormPosition | None = None
    positions: Positions | None = None
    positions_at: PositionsAt | None = None
    prefix_positions: bool | None = None
    registers: int | None = Field(default=None, ge=0)
    layer_scale: float | None = Field(default=None, ge=0)  # initial value; none: as the starting weights have it
    gelu: Gelu | None = None
    representation: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    drop_path: float = Field(default=0.0, ge=0, lt=1)
    head_bias: float = 0.0
    # where the head of starting weights begins: at zero, as in the paper, or as the linear probe that is fitted for a
    # baseline, if the data is small enough for one
    head_init: Literal["zero", "probe"] = "zero"
    resample: Resampling = "paper"  # how positions of the starting weights are fitted to another image size


class DataConfig(Schema):
    path: str = ""
    quarantine: str = ""  # a list of images to leave out, as `vitrail check` writes it
    follow_links: bool = True  # in the data; false: what links lead to is left out
    test_fraction: float = Field(default=0.2, gt=0, lt=1)  # share of each class held out when the data has no split
    # share of training images that is watched when only a test split is given; 0: none is watched, and all but the
    # test images are trained on, those of a validation split too
    val_fraction: float = Field(default=0.1, ge=0, lt=1)
    # what a validation split is for where there is no test split, as in ImageNet; "test": it is looked at once
    val_as_test: bool = False
    use_test: bool = True  # false: the test images are left alone, and the watched ones are measured on
    split_seed: int = 0
    group_similar: bool = True  # images that look alike are held out together, or not at all
    workers: int | None = Field(default=None, ge=0, le=256)  # none: chosen from the machine
    max_pixels: int = Field(default=100_000_000, gt=0)  # larger images are refused before decoding
    cache: Literal["auto", "memory", "disk", "none"] = "auto"  # of decoded images; auto: in memory, if they fit
    scaled_decoding: bool = True  # where none are kept: large JPEGs are decoded smaller for small training crops


class AugmentConfig(Schema):
    """Random changes of training images, in the order of these keys. All but crop and flip are off unless asked for."""

    # inception: the paper's; random_resized: torchvision's rule; resmall: a square of `part` of the short side,
    # anywhere, as if resized to 256 and cut to 224; part: that share of both sides, anywhere, as BiT cuts 128 of 160;
    # shift: as in evaluation, then moved by up to `shift` of the sides, the border mirrored; zoom: as in evaluation,
    # then a part of that by torchvision's rule, magnified; none: as in evaluation
    crop: Literal["inception", "random_resized", "resmall", "part", "shift", "zoom", "none"] = "inception"
    crop_fraction: float = Field(default=0.875, ge=0.05, le=1)
    shift: float = Field(default=0.125, ge=0, le=0.5)  # 4 of CIFAR's 32 pixels
    scale: tuple[Fraction, Fraction] = (0.05, 1.0)  # of the crop, as a share; torchvision's is [0.08, 1]
    ratio: tuple[float, float] = (0.75, 1.33)  # as TensorFlow has it
    flip: bool = True
    flip_vertical: bool = False
    randaugment_layers: int = Field(default=0, ge=0, le=16)  # operations on each image; 0: off
    randaugment_magnitude: float = Field(default=10.0, ge=0, le=30)  # of 10
    randaugment_std: float = Field(default=0.0, ge=0)  # standard deviation of the magnitude
    # timm: "inc1", where every operation grows with the magnitude and each layer is left out half of the time
    randaugment_style: Literal["big_vision", "timm"] = "big_vision"
    three_augment: bool = False  # DeiT-III: grey, solarised or blurred, one of them; its recipe adds jitter = 0.3
    color_jitter: float = Field(default=0.0, ge=0)  # brightness, contrast and saturation: times 1 - this to 1 + this
    hue: float = Field(default=0.0, ge=0, le=0.5)  # largest turn of the colour circle, either way
    erasing: Fraction = 0.0  # chance that a box of 2 to 33 % of the image is erased
    erasing_fill: Literal["noise", "mean"] = "noise"
    mixup: float = Field(default=0.0, ge=0)  # Beta parameter; 0: off
    cutmix: float = Field(default=0.0, ge=0)  # Beta parameter; 0: off; beside mixup each is used half of the time
    mix_per: Literal["batch", "sample"] = "batch"  # what has one share, and one choice of mixup or cutmix
    repeats: int = Field(default=1, gt=0, le=16)  # of each image in a batch, each changed in its own way; DeiT: 3

    @model_validator(mode="after")
    def _consistent(self) -> AugmentConfig:
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high:
                raise ValueError(f"{name} is a range [low, high] with 0 < low <= high, not [{low:g}, {high:g}]")
        if self.three_augment and self.randaugment_layers:
            raise ValueError("three_augment and randaugment_layers are two policies: choose one")
        if self.randaugment_style == "timm" and self.randaugment_magnitude > 10:
            raise ValueError(f"timm's magnitudes end at 10, not {self.randaugment_magnitude:g}")
        return self


class ObjectiveConfig(Schema):
    loss: Literal["softmax", "sigmoid"] = "softmax"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    # How much images of a class count; balanced: all classes alike in sum, whatever their number of images
    class_weights: Literal["none", "balanced"] | dict[str, NotNegative] = "none"
    teacher: str = ""  # weights to distil from, with the same classes; empty: none
    teacher_weight: Fraction | None = None  # of the loss, that the teacher's answers make; none: half of it
    teacher_targets: Literal["soft", "hard"] = "soft"  # its probabilities, or its first choice as if it were the label
    temperature: float = Field(default=1.0, gt=0)  # soft: logits of both are divided by it


class MaskedConfig(Schema):
    """Masked-patch prediction (kind = "masked"): the paper's self-supervision."""

    # color: the mean colour of a patch, 3 bits a channel, 512 classes; grid: the same for each of its 4x4 parts;
    # pixels: all its pixels, by least squares
    target: Literal["color", "grid", "pixels"] = "color"
    mask_ratio: float = Field(default=0.5, gt=0, lt=1)  # of the patches that are corrupted


class OptimizerConfig(Schema):
    name: Literal["adamw", "sgd", "muon"] = "adamw"  # muon: for the matrices of the blocks; adamw for the rest
    lr: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    weight_decay_params: Literal["all", "matrices"] = (
        "all"  # the paper decays every parameter; big_vision only matrices
    )
    # What weight_decay is multiplied by in a step: the learning rate, as the paper has it, or only the schedule's
    # share of it (0 to 1), as big_vision has it
    weight_decay_scale: Literal["lr", "schedule"] = "lr"
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float | None = Field(default=None, ge=0, lt=1)  # none: 0.9 for sgd, 0.95 for muon
    clip_grad_norm: float = Field(default=0.0, ge=0)  # largest global gradient norm; 0: no clipping
    layer_decay: float = Field(default=1.0, gt=0, le=1)  # each block learns at this times the rate of the one after it
    freeze: int | Literal["backbone"] = 0  # first blocks that stay as they are, with all before them; backbone: all


class LoraConfig(Schema):
    """Low-rank updates beside frozen matrices, merged into them at the end. Rank 0: none."""

    rank: int = Field(default=0, ge=0)
    alpha: float = Field(default=16.0, gt=0)  # the update counts alpha / rank
    target_modules: Literal["attention", "all"] = "attention"  # of the blocks; all: the MLPs too


class ScheduleConfig(Schema):
    shape: Literal["cosine", "linear", "rsqrt", "staircase", "constant"] = "cosine"
    warmup: int | float = Field(default=0, ge=0)  # below 1: a share of all steps
    warmup_start_lr: float = Field(default=0.0, ge=0)  # first learning rate
    end_lr: float = Field(default=0.0, ge=0)  # last learning rate; the paper's linear decay ends at 1e-5
    timescale: int = Field(default=10_000, gt=0)  # rsqrt: steps after warm-up until the rate is base / sqrt(2)
    cooldown: int | float = Field(default=0, ge=0)  # last steps, down to 0 in a line; below 1: a share
    milestones: tuple[Fraction, ...] = (
        0.3,
        0.6,
        0.9,
    )  # staircase: lr x 0.1 at these fractions of all steps

    def warmup_steps(self, total: int) -> int:
        return _steps(self.warmup, total)

    def cooldown_steps(self, total: int) -> int:
        return _steps(self.cooldown, total)


def _steps(value: float, total: int) -> int:
    """Below 1, a share of all steps."""
    return round(value * total) if value < 1 else int(value)


class PrecisionConfig(Schema):
    """Number formats, one for each thing a step handles."""

    parameters: Literal["fp32", "bf16"] = "fp32"  # and what the optimizer keeps
    compute: Literal["auto", "fp32", "bf16"] = "auto"  # matrix products; auto: bf16 where the hardware has it
    residual: Literal["fp32", "bf16"] = "fp32"  # the stream that blocks add to
    reduce: Literal["fp32", "bf16"] = "fp32"  # gradients on their way between processes


class TrainConfig(Schema):
    steps: int | None = Field(default=None, gt=0, lt=10**9)  # wins over epochs
    epochs: float | None = Field(default=None, gt=0, lt=10**9)
    batch_size: int = Field(default=64, gt=0)  # of all processes together
    # Images that one process takes at a time, their gradients summed; 0: all of its part, or as many as memory holds
    micro_batch_size: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0, lt=2**32)
    ema: float = Field(default=0.0, ge=0, lt=1)  # the average keeps this share of itself in a step; 0: no average
    ema_warmup: bool = (
        True  # early on it keeps less, (1 + t) / (10 + t): short runs forget their start; the paper: false
    )
    device: str = "auto"
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"  # under torchrun: whole copies, or weights divided among all
    # auto: the network on a GPU, where small ones are launched as CUDA graphs; under fsdp always the blocks
    compile: Literal["auto", "off", "blocks", "network", "graphs"] = "auto"
    gradient_checkpointing: bool = (
        False  # blocks forget what the backward pass needs and compute it again: less memory, more work
    )
    log_every: int = Field(default=10, gt=0)
    evaluate_every: int = Field(default=0, ge=0)  # steps; 0: ten times in a run
    checkpoint_every: int = Field(default=0, ge=0)  # steps; 0: ten times in a run, and about once a minute
    keep_checkpoints: int = Field(default=2, gt=0)
    deterministic: bool = True  # on a GPU: kernels that repeat bit for bit, a little slower
    max_nonfinite_steps: int = Field(default=10, gt=0)  # without a finite gradient, in a row, before the run goes back
    max_rollbacks: int = Field(default=3, ge=0)  # times it goes back to its last checkpoint before it ends
    tensorboard: bool = False  # also write event files


class ProbeConfig(Schema):
    """The linear probe on cached features: ridge strengths tried on a split of the training data."""

    penalties: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    iterations: int = Field(default=200, gt=0)


class RunConfig(Schema):
    """One training run. A recipe file holds these sections; `--set section.key=value` overrides one."""

    recipe: str = ""  # the name it came from
    kind: Literal["train", "probe", "masked", "custom"] = "train"  # custom: network and data of the caller's own
    model: ModelChoice = ModelChoice()
    preprocess: dict[str, Any] = Field(default={})  # what differs from the starting weights' Preprocess
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    masked: MaskedConfig = MaskedConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    precision: PrecisionConfig = PrecisionConfig()
    train: TrainConfig = TrainConfig()
    probe: ProbeConfig = ProbeConfig()

    @model_validator(mode="before")
    @classmethod
    def _current_names(cls, values: Any) -> Any:
        return current_settings(values)
