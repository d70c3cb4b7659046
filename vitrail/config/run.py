"""Schema of a training run: the sections of a recipe and of config.toml. Unknown keys are errors."""

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


def _square(side: Any) -> Any:
    """Turn 96 into (96, 96)."""
    return (side, side) if isinstance(side, int) else side


class ModelChoice(Schema):
    """The network of a run. With the number of classes of the data it becomes a ModelConfig."""

    name: str = ""  # such as "S/16"; empty: that of the starting weights, or chosen from the data
    weights: str = ""  # starting weights: a run folder, a file, bundled or hf-hub:owner/name; empty: see `start`
    # Without `weights`: random weights, pre-trained weights chosen automatically, or an error. None: auto, or random if
    # other settings of this section describe a new network
    start: Literal["random", "auto", "required"] | None = None
    init: Literal["paper", "mimetic"] = "paper"  # of random weights; mimetic: attention as in trained networks
    image_size: Annotated[Size | None, BeforeValidator(_square)] = None  # None: of the starting weights, else 224
    channels: Literal[1, 3, 4] | None = None  # gray, RGB or RGBA; None: of the starting weights, else 3
    pool: Pooling | None = None
    norm: NormPosition | None = None
    positions: Positions | None = None
    positions_at: PositionsAt | None = None
    prefix_positions: bool | None = None
    registers: int | None = Field(default=None, ge=0)
    layer_scale: float | None = Field(default=None, ge=0)  # initial value; None: of the starting weights
    gelu: Gelu | None = None
    representation: bool = False  # a tanh layer before the classifier
    dropout: float = Field(default=0.0, ge=0, lt=1)
    drop_path: float = Field(default=0.0, ge=0, lt=1)  # stochastic depth
    head_bias: float = 0.0  # initial value
    # Classifier on starting weights: zero, as in the paper, or the linear probe that is fitted as a baseline on small
    # data
    head_init: Literal["zero", "probe"] = "zero"
    resample: Resampling = "paper"  # interpolation of position embeddings to another image size


class DataConfig(Schema):
    path: str = ""
    quarantine: str = ""  # list of images to skip, written by `vitrail check`
    follow_links: bool = True  # false: skip symbolic links in the data
    holdout_fraction: float = Field(default=0.2, gt=0, lt=1)  # of each class, if the data has no split
    # Fraction of the training images used for validation if the data has a test split only. 0: no validation; train on
    # all images except the test split
    val_fraction: float = Field(default=0.1, ge=0, lt=1)
    # If the data has no test split, as in ImageNet: use the validation split as test split, measured once
    val_as_test: bool = False
    use_test: bool = True  # false: do not read the test split; measure on the validation images
    split_seed: int = 0
    group_similar: bool = True  # keep near-duplicates on the same side of a split
    workers: int | None = Field(default=None, ge=0, le=256)  # decoding processes; None: chosen from the machine
    max_pixels: int = Field(default=100_000_000, gt=0)  # larger images are rejected without decoding
    cache: Literal["auto", "memory", "disk", "none"] = "auto"  # of decoded images; auto: memory, if they fit
    scaled_decoding: bool = True  # without a cache: decode large JPEGs at reduced size for small training crops


class AugmentConfig(Schema):
    """Data augmentation of training images, in the order of these keys. Only crop and flip are on by default."""

    # inception: the paper's random resized crop
    # random_resized: torchvision's random resized crop
    # resmall: a random square of `crop_fraction` of the short side, like resize to 256 and random crop of 224
    # part: a random crop of `crop_fraction` of both sides, as BiT crops 128 from 160
    # shift: the evaluation crop, shifted by up to `shift` of its sides with reflection padding
    # zoom: the evaluation crop, then torchvision's random resized crop of it
    # none: the evaluation crop
    crop: Literal["inception", "random_resized", "resmall", "part", "shift", "zoom", "none"] = "inception"
    crop_fraction: float = Field(default=0.875, ge=0.05, le=1)
    shift: float = Field(default=0.125, ge=0, le=0.5)  # 0.125: 4 of CIFAR's 32 pixels
    scale: tuple[Fraction, Fraction] = (0.05, 1.0)  # area of the crop; torchvision: [0.08, 1]
    ratio: tuple[float, float] = (0.75, 1.33)  # aspect ratio of the crop; TensorFlow's default
    flip: bool = True  # horizontal
    flip_vertical: bool = False
    randaugment_layers: int = Field(default=0, ge=0, le=16)  # operations per image; 0: off
    randaugment_magnitude: float = Field(default=10.0, ge=0, le=30)  # 10 is full strength
    randaugment_std: float = Field(default=0.0, ge=0)  # standard deviation of the magnitude
    # timm: as its "inc1": all operations get stronger with the magnitude, and each is applied with probability 0.5
    randaugment_style: Literal["big_vision", "timm"] = "big_vision"
    three_augment: bool = False  # DeiT III: one of grayscale, solarize and blur; combine with color_jitter = 0.3
    color_jitter: float = Field(default=0.0, ge=0)  # brightness, contrast, saturation: factor 1 - value to 1 + value
    hue: float = Field(default=0.0, ge=0, le=0.5)  # largest hue shift, as a fraction of the color circle
    erasing: Fraction = 0.0  # probability of random erasing: a box of 2 to 33 % of the image
    erasing_fill: Literal["noise", "mean"] = "noise"
    mixup: float = Field(default=0.0, ge=0)  # Beta parameter; 0: off
    cutmix: float = Field(default=0.0, ge=0)  # Beta parameter; 0: off; with mixup, each with probability 0.5
    mix_per: Literal["batch", "sample"] = (
        "batch"  # draw the mixing ratio, and mixup or cutmix, once per batch or sample
    )
    repeats: int = Field(default=1, gt=0, le=16)  # repeated augmentation: copies of each image per batch; DeiT: 3

    @model_validator(mode="after")
    def _consistent(self) -> AugmentConfig:
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high:
                raise ValueError(f"{name} must be a range [low, high] with 0 < low <= high, not [{low:g}, {high:g}]")
        if self.three_augment and self.randaugment_layers:
            raise ValueError("three_augment and randaugment_layers exclude each other: set one of them")
        if self.randaugment_style == "timm" and self.randaugment_magnitude > 10:
            raise ValueError(
                f"randaugment_magnitude is at most 10 with randaugment_style=timm, not {self.randaugment_magnitude:g}"
            )
        return self


class ObjectiveConfig(Schema):
    loss: Literal["softmax", "sigmoid"] = "softmax"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    # Weights of the classes in the loss; balanced: inversely proportional to their number of images
    class_weights: Literal["none", "balanced"] | dict[str, NotNegative] = "none"
    teacher: str = ""  # weights to distil from, with the same classes; empty: no distillation
    teacher_weight: Fraction | None = None  # weight of the distillation loss; None: 0.5
    teacher_targets: Literal["soft", "hard"] = "soft"  # probabilities of the teacher, or its predicted label
    temperature: float = Field(default=1.0, gt=0)  # soft: divides the logits of teacher and student


class MaskedConfig(Schema):
    """Masked-patch prediction (kind = "masked"), the self-supervision of the paper."""

    # color: mean color of the patch, 3 bits per channel, 512 classes; grid: the same for each of its 4x4 parts;
    # pixels: all its pixels, with squared error
    target: Literal["color", "grid", "pixels"] = "color"
    mask_ratio: float = Field(default=0.5, gt=0, lt=1)  # fraction of patches that are corrupted


class OptimizerConfig(Schema):
    name: Literal["adamw", "sgd", "muon"] = "adamw"  # muon: for the weight matrices of the blocks; adamw for the rest
    lr: float = Field(default=1e-3, gt=0)  # peak learning rate
    weight_decay: float = Field(default=0.0, ge=0)
    weight_decay_params: Literal["all", "matrices"] = "all"  # paper: all parameters; big_vision: matrices only
    # Factor on weight_decay in each step. lr: the learning rate, as in the paper; schedule: the schedule's fraction of
    # the peak (0 to 1), as in big_vision
    weight_decay_scale: Literal["lr", "schedule"] = "lr"
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float | None = Field(default=None, ge=0, lt=1)  # None: 0.9 for sgd, 0.95 for muon
    clip_grad_norm: float = Field(default=0.0, ge=0)  # maximum global gradient norm; 0: no clipping
    layer_decay: float = Field(default=1.0, gt=0, le=1)  # learning rate of a block, relative to the block after it
    freeze: int | Literal["backbone"] = (
        0  # number of first blocks to freeze, with the embedding; backbone: all but the head
    )


class LoraConfig(Schema):
    """Low-rank adaptation. The updates are merged into the weights after training."""

    rank: int = Field(default=0, ge=0)  # 0: off
    alpha: float = Field(default=16.0, gt=0)  # updates are scaled by alpha / rank
    target_modules: Literal["attention", "all"] = "attention"  # all: attention and MLP


class ScheduleConfig(Schema):
    shape: Literal["cosine", "linear", "rsqrt", "staircase", "constant"] = "cosine"
    warmup: int | float = Field(default=0, ge=0)  # steps; below 1: fraction of all steps
    warmup_start_lr: float = Field(default=0.0, ge=0)
    end_lr: float = Field(default=0.0, ge=0)  # the paper's linear decay ends at 1e-5
    timescale: int = Field(default=10_000, gt=0)  # rsqrt: steps after warmup until the learning rate is lr / sqrt(2)
    cooldown: int | float = Field(default=0, ge=0)  # last steps, linear to 0; below 1: fraction of all steps
    milestones: tuple[Fraction, ...] = (0.3, 0.6, 0.9)  # staircase: lr x 0.1 at these fractions of all steps

    def warmup_steps(self, total: int) -> int:
        return _steps(self.warmup, total)

    def cooldown_steps(self, total: int) -> int:
        return _steps(self.cooldown, total)


def _steps(value: float, total: int) -> int:
    """Return a number of steps; below 1, the value is a fraction of `total`."""
    return round(value * total) if value < 1 else int(value)


class PrecisionConfig(Schema):
    """Number formats of a training step."""

    parameters: Literal["fp32", "bf16"] = "fp32"  # and the optimizer state
    compute: Literal["auto", "fp32", "bf16"] = "auto"  # matrix products; auto: bf16 if the hardware supports it
    residual: Literal["fp32", "bf16"] = "fp32"  # residual stream
    reduce: Literal["fp32", "bf16"] = "fp32"  # gradient reduction between processes


class TrainConfig(Schema):
    steps: int | None = Field(default=None, gt=0, lt=10**9)  # takes precedence over epochs
    epochs: float | None = Field(default=None, gt=0, lt=10**9)
    batch_size: int = Field(default=64, gt=0)  # over all processes
    micro_batch_size: int = Field(default=0, ge=0)  # per process and forward pass; 0: the largest that fits in memory
    seed: int = Field(default=0, ge=0, lt=2**32)
    ema: float = Field(default=0.0, ge=0, lt=1)  # decay of the averaged weights per step; 0: no averaging
    ema_warmup: bool = True  # decay at most (1 + t) / (10 + t) at step t, for short runs; the paper: false
    device: str = "auto"
    parallel: Literal["auto", "ddp", "fsdp"] = (
        "auto"  # under torchrun; auto: fsdp for models that are large for the GPU
    )
    # auto: off on a CPU; on a GPU the whole network, with CUDA graphs if it is small; fsdp: always the blocks
    compile: Literal["auto", "off", "blocks", "network", "graphs"] = "auto"
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more compute
    log_every: int = Field(default=10, gt=0)  # steps
    evaluate_every: int = Field(default=0, ge=0)  # steps; 0: ten times per run
    checkpoint_every: int = Field(default=0, ge=0)  # steps; 0: ten times per run, and about once a minute
    keep_checkpoints: int = Field(default=2, gt=0)
    deterministic: bool = True  # on a GPU: bitwise reproducible kernels, slightly slower
    max_nonfinite_steps: int = Field(default=10, gt=0)  # consecutive non-finite gradients before a rollback
    max_rollbacks: int = Field(default=3, ge=0)  # returns to the last checkpoint before the run fails
    tensorboard: bool = False  # write TensorBoard event files


class ProbeConfig(Schema):
    """Linear probe on cached features."""

    penalties: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # L2 penalties, chosen on a split of the training data
    iterations: int = Field(default=200, gt=0)  # of L-BFGS


class RunConfig(Schema):
    """All settings of a run. `--set section.key=value` overrides one."""

    recipe: str = ""  # name of the recipe
    kind: Literal["train", "probe", "masked", "custom"] = "train"  # custom: network and data from vitrail.fit
    model: ModelChoice = ModelChoice()
    preprocess: dict[str, Any] = Field(default={})  # differences from the Preprocess of the starting weights
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
