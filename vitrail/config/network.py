"""Schema of a network, down to every parameter, and of its preprocessing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

Side = Annotated[int, Field(gt=0)]
Size = tuple[Side, Side]  # (height, width), always in this order
Fraction = Annotated[float, Field(ge=0, le=1)]
Byte = Annotated[int, Field(ge=0, le=255)]
Count = Annotated[int, Field(gt=0)]
Positions = Literal["none", "1d", "2d", "sincos", "relative"]
PositionsAt = Literal["stem", "layers", "shared"]  # added once; before each block, one table each; or one table for all
Pooling = Literal["token", "gap", "map"]
NormPosition = Literal["before_pool", "after_pool"]
Gelu = Literal["tanh", "erf"]
Resampling = Literal["paper", "bicubic", "bicubic_antialias"]  # bicubic: DeiT; bicubic_antialias: timm

MAX_PIXELS = 100_000_000  # of an input image
GROUPS = 32  # of every GroupNorm
# Computed position embeddings need memory that is in no tensor of a weights file: T x T offsets, T x D waves.
MAX_TOKENS = {"relative": 4096, "sincos": 65_536}


class Schema(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class StemConfig(Schema):
    """The convolutional stem of a hybrid: a post-activation ResNet, as in the original code.

    Epsilons are those of the original. timm uses 1e-5 and, added to the variance, 1e-8.
    """

    blocks: tuple[Count, ...] = Field(default=(), max_length=8)  # blocks per stage; empty: the root only
    width: int = Field(default=64, gt=0)  # channels of the root convolution
    norm_eps: float = Field(default=1e-6, gt=0)
    weight_eps: float = Field(default=1e-5, ge=0)
    weight_eps_in: Literal["deviation", "variance"] = "deviation"

    @model_validator(mode="after")
    def _grouped(self) -> StemConfig:
        _check_groups(self.width)
        return self

    @property
    def stride(self) -> int:
        """Image pixels per pixel of the feature map."""
        return 4 * 2 ** max(len(self.blocks) - 1, 0)

    @property
    def features(self) -> int:
        """Channels of the feature map."""
        return self.width * 4 * 2 ** (len(self.blocks) - 1) if self.blocks else self.width


class ModelConfig(Schema):
    """Architecture of a Vision Transformer, with the constants that differ between libraries (GELU form, epsilon)."""

    kind: Literal["vit"] = "vit"
    width: int = Field(gt=0)
    depth: int = Field(gt=0)
    mlp_dim: int = Field(gt=0)
    heads: int = Field(gt=0)
    patch: Size  # in pixels of the image, or of the feature map of the stem
    image_size: Size
    num_classes: int = Field(ge=0)  # 0: no classifier; the network returns features
    channels: int = Field(default=3, gt=0)
    stem: StemConfig | None = None
    class_token: bool = True
    registers: int = Field(default=0, ge=0)  # extra learned tokens
    positions: Positions = "1d"
    positions_at: PositionsAt = "stem"
    prefix_positions: bool = True  # 1d: position embeddings for class token and registers too; big_vision: false
    axial: bool = False  # two blocks in place of one: attention along rows, then along columns
    pool: Pooling = "token"
    norm: NormPosition = "before_pool"
    representation: int = Field(default=0, ge=0)  # size of the tanh layer before the classifier; 0: none
    dropout: float = Field(default=0.0, ge=0, lt=1)
    drop_path: float = Field(
        default=0.0, ge=0, lt=1
    )  # stochastic depth: rate of the last block, increasing linearly from 0
    layer_scale: float | None = Field(default=None, ge=0)  # initial value of LayerScale; None: no LayerScale
    gelu: Gelu = "tanh"
    norm_eps: float = Field(default=1e-6, gt=0)
    head_bias: float = 0.0  # initial value; -10 in the paper's pre-training with sigmoid loss

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        rows, columns = self.cell
        if self.image_size[0] % rows or self.image_size[1] % columns:
            what = "the stride of stem and patch," if self.stem else "the patch"
            size = f"{self.image_size[0]}x{self.image_size[1]}"
            raise ValueError(f"image size {size} is not a multiple of {what} {rows}x{columns}")
        if self.pool == "token" and not self.class_token:
            raise ValueError("pool 'token' needs class_token=true")
        if self.pool == "map" and self.norm == "after_pool":
            raise ValueError("pool 'map' needs norm 'before_pool'")
        if self.positions_at != "stem" and self.positions not in ("1d", "2d", "sincos"):
            raise ValueError(f"positions '{self.positions}' are not added to tokens: positions_at must be 'stem'")
        if self.positions_at == "layers" and self.positions == "sincos":
            raise ValueError("positions 'sincos' are the same in every layer: positions_at must be 'stem' or 'shared'")
        parts = {"2d": 2, "sincos": 4}.get(self.positions, 1)
        if self.width % parts:
            raise ValueError(f"positions '{self.positions}' need a width divisible by {parts}, not {self.width}")
        limit = MAX_TOKENS.get(self.positions, self.sequence)
        if self.sequence > limit:
            raise ValueError(f"positions '{self.positions}' take {limit:,} tokens at most, not {self.sequence:,}")
        if self.axial and (self.prefix or self.positions == "relative"):
            raise ValueError("axial=true excludes class_token, registers and relative positions")
        _check_pixels(self.image_size)
        return self

    @property
    def cell(self) -> Size:
        """Image pixels per token."""
        stride = self.stem.stride if self.stem else 1
        return self.patch[0] * stride, self.patch[1] * stride

    @property
    def grid(self) -> Size:
        return self.image_size[0] // self.cell[0], self.image_size[1] // self.cell[1]

    @property
    def prefix(self) -> int:
        """Number of tokens before the patch tokens."""
        return int(self.class_token) + self.registers

    @property
    def sequence(self) -> int:
        return self.grid[0] * self.grid[1] + self.prefix

    @property
    def blocks(self) -> int:
        """Number of transformer blocks."""
        return self.depth * (2 if self.axial else 1)


class ResNetConfig(Schema):
    """Architecture of a BiT ResNet (pre-activation), the paper's baseline."""

    kind: Literal["resnet"]
    blocks: tuple[Count, ...] = Field(min_length=1, max_length=8)  # blocks per stage
    width: int = Field(default=64, gt=0)  # channels of the root convolution
    image_size: Size  # of training; the weights fit any size
    num_classes: int = Field(ge=0)
    channels: int = Field(default=3, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    weight_eps: float = Field(default=1e-10, ge=0)
    weight_eps_in: Literal["deviation", "variance"] = "variance"
    pool_padding: Literal["zeros", "none"] = "zeros"  # of the max pooling in the root; big_vision: none
    head_bias: float = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> ResNetConfig:
        _check_groups(self.width)
        _check_pixels(self.image_size)
        return self

    @property
    def features(self) -> int:
        """Size of the features before the classifier."""
        return self.width * 4 * 2 ** (len(self.blocks) - 1)


def _check_pixels(size: Size) -> None:
    if size[0] * size[1] > MAX_PIXELS:
        raise ValueError(f"images of {size[0]}x{size[1]} have more than {MAX_PIXELS:,} pixels")


def _check_groups(width: int) -> None:
    if width % GROUPS:
        raise ValueError(f"width {width} is not divisible by {GROUPS} groups of channels")


def _kind(value: Any) -> str:
    return str(value.get("kind", "vit") if isinstance(value, dict) else getattr(value, "kind", "vit"))


# Any network. Values without `kind` describe a Vision Transformer.
NetworkConfig = Annotated[
    Annotated[ModelConfig, Tag("vit")] | Annotated[ResNetConfig, Tag("resnet")], Discriminator(_kind)
]


class Preprocess(Schema):
    """Preprocessing of images for a network, the same in training, evaluation and prediction."""

    size: Size
    resize: Literal["squash", "short_side"] = (
        "squash"  # squash: to `size`; short_side: keep the aspect ratio, then center crop
    )
    crop_fraction: float = Field(
        default=1.0, gt=0, le=1
    )  # short_side: side of the crop / short side of the resized image
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    antialias: bool = True
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # of pixels in [0, 1]
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    background: tuple[Byte, Byte, Byte] = (255, 255, 255)  # color behind transparent pixels

    @model_validator(mode="after")
    def _consistent(self) -> Preprocess:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(f"mean has {len(self.mean)} values and std {len(self.std)}: both need one per channel")
        if min(self.std) <= 0:
            raise ValueError("std must be positive")
        _check_pixels(self.size)
        return self

    @property
    def channels(self) -> int:
        return len(self.mean)
