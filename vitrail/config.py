"""The schema: everything a run, a network or a weights file can be told. Unknown keys are errors. No torch here."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from vitrail.errors import UserError, did_you_mean

Side = Annotated[int, Field(gt=0)]
Size = tuple[Side, Side]  # (height, width), always in this order
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Byte = Annotated[int, Field(ge=0, le=255)]
Count = Annotated[int, Field(gt=0)]
Positions = Literal["none", "1d", "2d", "sincos", "relative"]
PositionsAt = Literal["stem", "layers", "shared"]  # added once; a table for every block; one table, at every block
Pooling = Literal["token", "gap", "map"]
NormPlace = Literal["before_pool", "after_pool"]
Gelu = Literal["tanh", "erf"]
Resampling = Literal["paper", "bicubic", "bicubic_antialias"]  # the last two as DeiT and timm do it

GROUPS = 32  # of channels in every GroupNorm
# Positions that are computed take memory which no tensor of a weights file stands for: T x T places, T x D waves.
MOST_TOKENS = {"relative": 4096, "sincos": 65_536}


class Schema(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class StemConfig(Schema):
    """The convolutional stem of a hybrid: a ResNet with activations after its norms, as in the original code.

    Epsilons are the original's. timm's are 1e-5 and, in the variance, 1e-8.
    """

    blocks: tuple[Count, ...] = Field(default=(), max_length=8)  # of each stage; none: the root alone
    width: int = Field(default=64, gt=0)  # channels of the root
    norm_eps: float = Field(default=1e-6, gt=0)
    weight_eps: float = Field(default=1e-5, ge=0)
    weight_eps_in: Literal["deviation", "variance"] = "deviation"

    @model_validator(mode="after")
    def _grouped(self) -> StemConfig:
        _check_groups(self.width)
        return self

    @property
    def stride(self) -> int:
        """How many image pixels one pixel of its feature map spans."""
        return 4 * 2 ** max(len(self.blocks) - 1, 0)

    @property
    def features(self) -> int:
        """Channels of its feature map."""
        return self.width * 4 * 2 ** (len(self.blocks) - 1) if self.blocks else self.width


class ModelConfig(Schema):
    """One Vision Transformer, to the parameter. Constants that differ by origin (GELU form, epsilon) live here."""

    kind: Literal["vit"] = "vit"
    width: int = Field(gt=0)
    depth: int = Field(gt=0)
    mlp_dim: int = Field(gt=0)
    heads: int = Field(gt=0)
    patch: Size  # in pixels of the image, or of the stem's feature map
    image_size: Size
    num_classes: int = Field(ge=0)  # 0: no classifier, the network returns features
    channels: int = Field(default=3, gt=0)
    stem: StemConfig | None = None
    class_token: bool = True
    registers: int = Field(default=0, ge=0)  # extra learned tokens that nothing reads
    positions: Positions = "1d"
    positions_at: PositionsAt = "stem"
    prefix_positions: bool = True  # 1d: class token and registers have rows too; false in big_vision
    axial: bool = False  # each block becomes two: attention along rows, then along columns
    pool: Pooling = "token"
    norm: NormPlace = "before_pool"
    representation: int = Field(default=0, ge=0)  # size of the tanh layer before the classifier; 0: none
    dropout: float = Field(default=0.0, ge=0, lt=1)
    drop_path: float = Field(default=0.0, ge=0, lt=1)  # chance to skip the last block's branches; less in earlier ones
    layer_scale: float | None = Field(default=None, ge=0)  # initial gain, learned, of each branch; none: no gain
    gelu: Gelu = "tanh"
    norm_eps: float = Field(default=1e-6, gt=0)
    head_bias: float = 0.0  # initial value; -10 in the paper's sigmoid pre-training

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide into {self.heads} heads")
        rows, columns = self.cell
        if self.image_size[0] % rows or self.image_size[1] % columns:
            what = "the stride of stem and patch," if self.stem else "the patch"
            size = f"{self.image_size[0]}x{self.image_size[1]}"
            raise ValueError(f"image size {size} is not a multiple of {what} {rows}x{columns}")
        if self.pool == "token" and not self.class_token:
            raise ValueError("pool 'token' needs a class token")
        if self.pool == "map" and self.norm == "after_pool":
            raise ValueError("pool 'map' has the norm before it")
        if self.positions_at != "stem" and self.positions not in ("1d", "2d", "sincos"):
            raise ValueError(f"positions '{self.positions}' are not added to tokens: leave positions_at at 'stem'")
        if self.positions_at == "layers" and self.positions == "sincos":
            raise ValueError("positions 'sincos' are the same in every layer: positions_at is 'stem' or 'shared'")
        parts = {"2d": 2, "sincos": 4}.get(self.positions, 1)
        if self.width % parts:
            raise ValueError(f"positions '{self.positions}' need a width that divides by {parts}")
        most = MOST_TOKENS.get(self.positions, self.sequence)
        if self.sequence > most:
            raise ValueError(f"positions '{self.positions}' are for {most:,} tokens at most, not {self.sequence:,}")
        if self.axial and (self.prefix or self.positions == "relative"):
            raise ValueError("an axial network has patches alone: no class token, registers or relative positions")
        return self

    @property
    def cell(self) -> Size:
        """Image pixels that one token stands for."""
        stride = self.stem.stride if self.stem else 1
        return self.patch[0] * stride, self.patch[1] * stride

    @property
    def grid(self) -> Size:
        return self.image_size[0] // self.cell[0], self.image_size[1] // self.cell[1]

    @property
    def prefix(self) -> int:
        """Tokens before the patches."""
        return int(self.class_token) + self.registers

    @property
    def sequence(self) -> int:
        return self.grid[0] * self.grid[1] + self.prefix

    @property
    def blocks(self) -> int:
        """Pairs of attention and MLP."""
        return self.depth * (2 if self.axial else 1)


class ResNetConfig(Schema):
    """One BiT ResNet: the paper's baseline, with activations before its convolutions."""

    kind: Literal["resnet"]
    blocks: tuple[Count, ...] = Field(min_length=1, max_length=8)  # of each stage
    width: int = Field(default=64, gt=0)  # channels of the root
    image_size: Size  # what it is trained on; its weights fit any
    num_classes: int = Field(ge=0)
    channels: int = Field(default=3, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    weight_eps: float = Field(default=1e-10, ge=0)
    weight_eps_in: Literal["deviation", "variance"] = "variance"
    pool_padding: Literal["zeros", "none"] = "zeros"  # around the map that the root pools; none in big_vision
    head_bias: float = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> ResNetConfig:
        _check_groups(self.width)
        return self

    @property
    def features(self) -> int:
        """Size of the vector before the classifier."""
        return self.width * 4 * 2 ** (len(self.blocks) - 1)


def _check_groups(width: int) -> None:
    if width % GROUPS:
        raise ValueError(f"width {width} does not divide into {GROUPS} groups of channels")


def _kind(value: Any) -> str:
    return str(value.get("kind", "vit") if isinstance(value, dict) else getattr(value, "kind", "vit"))


# Any network; values without a kind are a Vision Transformer's.
NetworkConfig = Annotated[
    Annotated[ModelConfig, Tag("vit")] | Annotated[ResNetConfig, Tag("resnet")], Discriminator(_kind)
]


class Preprocess(Schema):
    """How pixels are made for the network. Training, evaluation, export and serving all build from this one spec."""

    size: Size
    resize: Literal["squash", "short_side"] = "squash"  # short_side: keep the aspect, then crop the centre
    crop_fraction: float = Field(default=1.0, gt=0, le=1)  # short_side: share of the resized image the crop keeps
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    antialias: bool = True
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # of pixels scaled to [0, 1]
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    background: tuple[Byte, Byte, Byte] = (255, 255, 255)  # what shows through transparent pixels

    @model_validator(mode="after")
    def _consistent(self) -> Preprocess:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(f"mean has {len(self.mean)} values and std {len(self.std)}: one each for every channel")
        if min(self.std) <= 0:
            raise ValueError("std must be positive")
        return self

    @property
    def channels(self) -> int:
        return len(self.mean)


class ModelChoice(Schema):
    """The network a run asks for; with the data's class count it becomes a ModelConfig."""

    name: str = ""  # "S/16"; empty: that of the starting weights, or chosen from the data
    weights: str = ""  # what to start from: a file, a folder or hf-hub:owner/name; empty: random weights
    image_size: Size | None = None  # none: the size of the starting weights, else 224
    channels: Literal[1, 3, 4] | None = None  # grey, colour, colour with alpha; none: of the starting weights, else 3
    pool: Pooling | None = None
    norm: NormPlace | None = None
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
    resample: Resampling = "paper"  # how positions of the starting weights are fitted to another image size


class DataConfig(Schema):
    path: str = ""
    quarantine: str = ""  # a list of images to leave out, as `vitrail check` writes it
    holdout: float = Field(default=0.2, gt=0, lt=1)  # share of each class held out when the data has no split
    monitor: float = Field(default=0.1, gt=0, lt=1)  # share of training images watched when only a test split is given
    split_seed: int = 0
    alike: bool = True  # images that look alike are held out together, or not at all
    workers: int | None = Field(default=None, ge=0, le=256)  # none: chosen from the machine
    max_pixels: int = Field(default=100_000_000, gt=0)  # larger images are refused before decoding
    cache: Literal["auto", "memory", "disk", "none"] = "auto"  # of decoded images; auto: in memory, if they fit
    scaled_decoding: bool = True  # where none are kept: large JPEGs are decoded smaller for small training crops


class AugmentConfig(Schema):
    """Random changes of training images, in the order of these keys. All but crop and flip are off unless asked for."""

    # inception: the paper's; random_resized: torchvision's rule; resmall: a square of 7/8 of the short side, anywhere,
    # as if resized to 256 and cut to 224; none: as in evaluation
    crop: Literal["inception", "random_resized", "resmall", "none"] = "inception"
    area: tuple[Share, Share] = (0.05, 1.0)  # of the crop, as a share; torchvision's is [0.08, 1]
    aspect: tuple[float, float] = (0.75, 1.33)  # as TensorFlow has it
    flip: bool = True
    flip_vertical: bool = False
    randaugment_layers: int = Field(default=0, ge=0, le=16)  # operations on each image; 0: off
    randaugment_magnitude: float = Field(default=10.0, ge=0, le=30)  # of 10
    randaugment_spread: float = Field(default=0.0, ge=0)  # standard deviation of the magnitude
    # timm: "inc1", where every operation grows with the magnitude and each layer is left out half of the time
    randaugment_style: Literal["big_vision", "timm"] = "big_vision"
    three_augment: bool = False  # DeiT-III: grey, solarised or blurred, one of them; its recipe adds jitter = 0.3
    jitter: float = Field(default=0.0, ge=0)  # brightness, contrast and saturation: times 1 - this to 1 + this
    hue: float = Field(default=0.0, ge=0, le=0.5)  # largest turn of the colour circle, either way
    erasing: Share = 0.0  # chance that a box of 2 to 33 % of the image is erased
    erasing_fill: Literal["noise", "mean"] = "noise"
    mixup: float = Field(default=0.0, ge=0)  # Beta parameter; 0: off
    cutmix: float = Field(default=0.0, ge=0)  # Beta parameter; 0: off; beside mixup each is used half of the time
    mix_per: Literal["batch", "sample"] = "batch"  # what has one share, and one choice of mixup or cutmix

    @model_validator(mode="after")
    def _consistent(self) -> AugmentConfig:
        for name, (low, high) in (("area", self.area), ("aspect", self.aspect)):
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


class OptimizerConfig(Schema):
    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    decay: Literal["all", "matrices"] = "all"  # the paper decays every parameter; big_vision only matrices
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    clip: float = Field(default=0.0, ge=0)  # largest global gradient norm; 0: no clipping


class ScheduleConfig(Schema):
    shape: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: int | float = Field(default=0, ge=0)  # below 1: a share of all steps
    end: float = Field(default=0.0, ge=0)  # last learning rate; the paper's linear decay ends at 1e-5


class TrainConfig(Schema):
    steps: int | None = Field(default=None, gt=0)  # wins over epochs
    epochs: float | None = Field(default=None, gt=0)
    batch_size: int = Field(default=64, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**32)
    ema: float = Field(default=0.0, ge=0, lt=1)
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    device: str = "auto"
    log_every: int = Field(default=10, gt=0)
    evaluate_every: int = Field(default=0, ge=0)  # steps; 0: ten times in a run
    checkpoint_every: int = Field(default=0, ge=0)  # steps; 0: ten times in a run, and at least once a minute
    keep_checkpoints: int = Field(default=2, gt=0)
    deterministic: bool = True  # on a GPU: kernels that repeat bit for bit, a little slower


class ProbeConfig(Schema):
    """The linear probe on cached features: ridge strengths tried on a split of the training data."""

    penalties: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    iterations: int = Field(default=200, gt=0)


class RunConfig(Schema):
    """One training run. A recipe file holds these sections; `--set section.key=value` overrides one."""

    recipe: str = ""  # the name it came from
    kind: Literal["train", "probe"] = "train"
    model: ModelChoice = ModelChoice()
    preprocess: dict[str, Any] = {}  # what differs from the starting weights' Preprocess
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    probe: ProbeConfig = ProbeConfig()


S = TypeVar("S", bound=BaseModel)


def validate(schema: type[S], values: Mapping[str, Any], where: str) -> S:
    """Build a schema from plain values; the first problem becomes one sentence that names the key."""
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"] if part not in ("vit", "resnet"))
        if problem["type"] == "extra_forbidden":
            known = key_paths(schema)
            raise UserError(f"{where}: unknown key '{key}'{did_you_mean(key, known)}") from None
        about = f"'{key}' " if key else ""
        raise UserError(f"{where}: {about}{problem['msg'].removeprefix('Value error, ')}") from None


def network_config(values: Mapping[str, Any], where: str) -> NetworkConfig:
    """The config of any network from plain values."""
    if values.get("kind") == "resnet":
        return validate(ResNetConfig, values, where)
    return validate(ModelConfig, values, where)


def key_paths(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key a schema takes: model.name, train.steps, ..."""
    paths: list[str] = []
    for name, field in schema.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            paths += key_paths(kind, f"{prefix}{name}.")
        else:
            paths.append(prefix + name)
    return paths


def recipe_names() -> list[str]:
    return sorted(p.name.removesuffix(".toml") for p in recipe_folder().iterdir() if p.name.endswith(".toml"))


def recipe_folder() -> Any:
    return resources.files("vitrail") / "recipes"


def read_recipe(name: str) -> dict[str, Any]:
    """The values of a named recipe or a TOML file, laid over the recipe its `base` names."""
    values = read_recipe_file(name)
    base = values.pop("base", None)
    if base is None:
        return values
    if base not in recipe_names() or base == name:
        raise UserError(f"recipe '{name}': base must be one of {', '.join(recipe_names())}, not '{base}'")
    return merge(read_recipe(base), values)


def read_recipe_file(name: str) -> dict[str, Any]:
    """What the file of a recipe itself says, without its base."""
    if name in recipe_names():
        text = (recipe_folder() / f"{name}.toml").read_text(encoding="utf-8")
    elif name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"recipe file '{name}' does not exist")
        text = path.read_text(encoding="utf-8", errors="replace")
    else:
        known = recipe_names()
        raise UserError(f"no recipe '{name}'{did_you_mean(name, known) or '.'} Recipes: {', '.join(known)}.")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"recipe '{name}' is not valid TOML: {error}") from None


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`, section by section."""
    result = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else value
    return result


def parse_overrides(assignments: Iterable[str]) -> dict[str, Any]:
    """`["train.steps=500", "model.name=S/16"]` as nested values; a value is TOML, or a plain word."""
    nested: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise UserError(f"--set takes section.key=value, not '{assignment}'")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        for part in reversed(path.strip().split(".")):
            value = {part: value}
        nested = merge(nested, value)
    return nested
