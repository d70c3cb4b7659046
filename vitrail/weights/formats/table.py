"""The key mapping of a layout: each tensor's name and memory layout in vitrail and in the other library.

One table serves reading and writing. "Foreign" means the other library's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.weights.tensors import TensorSource

State = Mapping[str, Tensor]

# Placeholders in names: {0} is an index from zero, {0+1} counts from one, {0+1:02} pads that to two digits.
NUMBER = re.compile(r"\{(\d)(\+1)?(:02)?\}")


class Form(NamedTuple):
    """Conversion of one tensor: `read` from the foreign layout to vitrail's, `write` back."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


SAME = Form(lambda t: t, lambda t: t)

# The tensors of a module type: suffix in vitrail -> foreign suffix and conversion.
Kind = Mapping[str, tuple[str, Form]]
TENSOR: Kind = {"": ("", SAME)}
WEIGHT: Kind = {".weight": (".weight", SAME)}
MODULE: Kind = {".weight": (".weight", SAME), ".bias": (".bias", SAME)}

# Modules of one type: name in vitrail -> foreign name, or the names of modules that vitrail stacks (query, key, value).
Group = tuple[Kind, Mapping[str, str | Sequence[str]]]


def bottleneck(name: str, foreign: str) -> list[Group]:
    """A bottleneck block of a ResNet, which timm and transformers name alike."""
    convolutions = {f"{name}.conv{index}": f"{foreign}.conv{index}" for index in (1, 2, 3)}
    norms = {f"{name}.norm{index}": f"{foreign}.norm{index}" for index in (1, 2, 3)}
    return [
        (WEIGHT, convolutions | {f"{name}.shortcut": f"{foreign}.downsample.conv"}),
        (MODULE, norms | {f"{name}.shortcut_norm": f"{foreign}.downsample.norm"}),
    ]


# Part of a tensor name -> the unsupported feature it belongs to.
UNSUPPORTED = {
    "dist_token": "a distillation token",
    "distillation": "a distillation token",
    "head_dist": "a distillation head",
    "q_norm": "query and key normalization",
    "k_norm": "query and key normalization",
    "norm_pre": "a norm before the encoder",
    "rope": "rotary position embeddings",
    "freqs": "rotary position embeddings",
    "rel_pos": "a different kind of relative position embedding",
    "relative_position": "a different kind of relative position embedding",
    "backbone": "a different kind of convolutional stem",
    "running_": "batch normalization",
    "num_batches": "batch normalization",
    "mlp.fc1_g": "a gated MLP",
    "mlp.w12": "a gated MLP",
    "mlp.weights_": "a gated MLP",
    "mlp.gate": "a gated MLP",
    "mlp.norm": "norm layers inside attention or MLP",
    "attn.norm": "norm layers inside attention or MLP",
    "mask_token": "a mask token",
    "decoder": "a decoder",
}
BLOCK = "blocks.{0}"


class Rule(NamedTuple):
    vitrail: str
    foreign: tuple[str, ...]
    form: Form


Slot = tuple[Rule, tuple[int, ...]]  # a rule and the values of its placeholders: one tensor in vitrail


class Table:
    def __init__(self, *groups: Group):
        rules = [
            Rule(
                vitrail_name + suffix,
                tuple(name + foreign_suffix for name in ([foreign] if isinstance(foreign, str) else foreign)),
                form,
            )
            for kind, names in groups
            for vitrail_name, foreign in names.items()
            for suffix, (foreign_suffix, form) in kind.items()
        ]
        self._foreign = [(_pattern(name), rule, part) for rule in rules for part, name in enumerate(rule.foreign)]
        self._vitrail = [(_pattern(rule.vitrail), rule) for rule in rules]

    def slot(self, name: str) -> tuple[Slot, int] | None:
        """The slot of a foreign tensor, and its index among the tensors stacked there."""
        for pattern, rule, part in self._foreign:
            if match := pattern.fullmatch(name):
                numbers = _numbers(rule.foreign[part], match)
                # Filling the numbers in again rejects unit1 if the layout has unit01.
                if min(numbers, default=0) >= 0 and _fill(rule.foreign[part], numbers) == name:
                    return (rule, numbers), part
        return None

    def read(self, source: TensorSource, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename and reshape the tensors of `source` (its contents, or meta tensors) to vitrail's state dict."""
        slots = {name: slot for name in tensors if (slot := self.slot(name))}
        if unknown := [name for name in tensors if name not in slots]:
            features = (feature for name in unknown for part, feature in UNSUPPORTED.items() if part in name)
            feature = next(features, "an unknown tensor")
            raise UserError(f"{source.where} has {feature} ('{unknown[0]}'), which vitrail does not support")
        parts_by_slot: dict[Slot, dict[int, Tensor]] = {}
        for name, tensor in tensors.items():
            (rule, numbers), part = slots[name]
            try:
                converted = rule.form.read(tensor)
            except (RuntimeError, IndexError, ValueError):
                raise _wrong_shape(source, name, tensor) from None
            if converted.ndim == 0:
                raise _wrong_shape(source, name, tensor)
            parts_by_slot.setdefault((rule, numbers), {})[part] = converted
        self._check_complete(source, parts_by_slot)
        return {_fill(slot[0].vitrail, slot[1]): _stack(source, slot, parts) for slot, parts in parts_by_slot.items()}

    def foreign_name(self, name: str) -> str:
        """The foreign name of a vitrail tensor (of the first one, if several are stacked)."""
        slot = self._slot_of_vitrail(name)
        return _fill(slot[0].foreign[0], slot[1]) if slot else name

    def write(self, state: State) -> dict[str, Tensor]:
        """Rename and reshape vitrail's state dict to the foreign layout."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in state.items():
            slot = self._slot_of_vitrail(name)
            if slot is None:
                raise UserError(f"tensor '{name}' has no equivalent in the target layout")
            rule, numbers = slot
            for foreign, part in zip(rule.foreign, tensor.chunk(len(rule.foreign)), strict=True):
                tensors[_fill(foreign, numbers)] = rule.form.write(part).contiguous()
        return tensors

    def _slot_of_vitrail(self, name: str) -> Slot | None:
        matches = ((rule, match) for pattern, rule in self._vitrail if (match := pattern.fullmatch(name)))
        return next(((rule, _numbers(rule.vitrail, match)) for rule, match in matches), None)

    def _check_complete(self, source: TensorSource, parts_by_slot: Mapping[Slot, Mapping[int, Tensor]]) -> None:
        """Raise if a stack lacks a part, or an encoder block lacks a tensor that other blocks have."""
        repeated = [(rule, numbers[0]) for rule, numbers in parts_by_slot if rule.vitrail.startswith(BLOCK)]
        rules, blocks = dict.fromkeys(rule for rule, _ in repeated), sorted({index for _, index in repeated})
        for rule, numbers in itertools.chain(((rule, (index,)) for rule in rules for index in blocks), parts_by_slot):
            parts = parts_by_slot.get((rule, numbers), {})
            missing = [name for part, name in enumerate(rule.foreign) if part not in parts]
            if missing and rule.vitrail.endswith("qkv.bias"):
                raise missing_qkv_bias(source.where)
            if missing:
                raise UserError(
                    f"{source.where}: tensor '{source.name_in_file(_fill(missing[0], numbers))}' is missing"
                )


def missing_qkv_bias(where: str) -> UserError:
    return UserError(f"{where} has no bias for query, key and value, and vitrail's attention requires one (qkv.bias)")


def _stack(source: TensorSource, slot: Slot, parts: Mapping[int, Tensor]) -> Tensor:
    if len({tensor.shape[1:] for tensor in parts.values()}) > 1:
        raise _wrong_shape(source, _fill(slot[0].foreign[0], slot[1]), parts[0])
    return concatenate([parts[part] for part in range(len(parts))])


def concatenate(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate to a contiguous tensor.

    Meta tensors are not passed to torch.cat: it would import torch's compiler, which doubles the time to load weights.
    """
    if not parts[0].is_meta:
        return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0].contiguous()
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return torch.empty(shape, device="meta")


def _wrong_shape(source: TensorSource, name: str, tensor: Tensor) -> UserError:
    return UserError(
        f"{source.where}: tensor '{name}' has shape {tuple(tensor.shape)}, which is wrong for this parameter"
    )


def _pattern(template: str) -> re.Pattern[str]:
    pieces = NUMBER.split(template)  # text, number, +1, :02, text, ...
    return re.compile(r"(\d{1,9})".join(re.escape(text) for text in pieces[::4]))


def _numbers(template: str, match: re.Match[str]) -> tuple[int, ...]:
    """The placeholder values in a name, from zero, in the order of the placeholders' digits."""
    values = [
        (int(placeholder[1]), int(text) - bool(placeholder[2]))
        for placeholder, text in zip(NUMBER.finditer(template), match.groups(), strict=True)
    ]
    return tuple(value for _, value in sorted(values))


def _fill(template: str, numbers: tuple[int, ...]) -> str:
    def text(placeholder: re.Match[str]) -> str:
        number = numbers[int(placeholder[1])] + bool(placeholder[2])
        return f"{number:02}" if placeholder[3] else str(number)

    return NUMBER.sub(text, template)
