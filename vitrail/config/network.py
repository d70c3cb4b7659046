"""What a network is, to the parameter, and how pixels are made for it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

Side = Annotated[int, Field(gt=0)]
Size = tuple[Side, Side]  # (height, width), always in this order
Fraction = Annotated[float, Field(ge=0, le=1)]
Byte = Annotated[int, Field(ge=0, le=255)]
Count = Annotated[int, Field(gt=0)]
Positions = Literal["none", "1d", "2d", "sincos", "relative"]
PositionsAt = Literal["stem", "layers", "shared"]  # added once; a table for every block; one table, at every block
Pooling = Literal["token", "gap", "map"]
NormPosition = Literal["before_pool", "after_pool"]
Gelu = Literal["tanh", "erf"]
Resampling = Literal["paper", "bicubic", "bicubic_antialias"]  # the last two as DeiT and timm do it

MAX_PIXELS = 100_000_000  # of an image that a network takes, as of one that is read
GROUPS = 32  # of channels in every GroupNorm
# Positions that are computed take memory which no tensor of a weights file stands for: T x T places, T x D waves.
MAX_TOKENS = {"relative": 4096, "sincos": 65_536}


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
    norm: NormPosition = "before_pool"
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
        most = MAX_TOKENS.get(self.positions, self.sequence)
        if self.sequence > most:
            raise ValueError(f"positions '{self.positions}' are for {most:,} tokens at most, not {self.sequence:,}")
        if self.axial and (self.prefix or self.positions == "relative"):
            raise ValueError("an axial network has patches alone: no class token, registers or relative positions")
        _check_pixels(self.image_size)
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
        _check_pixels(self.image_size)
        return self

    @property
    def features(self) -> int:
        """Size of the vector before the classifier."""
        return self.width * 4 * 2 ** (len(self.blocks) - 1)


def _check_pixels(size: Size) -> None:
    if size[0] * size[1] > MAX_PIXELS:
        raise ValueError(f"images of {size[0]}x{size[1]} have more than {MAX_PIXELS:,} pixels")


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
        _check_pixels(self.size)
        return self

    @property
    def channels(self) -> int:
        return len(self.mean)
