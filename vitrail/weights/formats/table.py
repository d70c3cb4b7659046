"""One table for each format: what a tensor is called in our networks and in theirs, and how it lies in both."""

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

# {0} stands for a number as we count, from zero; {0+1} counts from one, {0+1:02} writes it with two digits.
NUMBER = re.compile(r"\{(\d)(\+1)?(:02)?\}")


class Form(NamedTuple):
    """How a tensor lies there: `read` turns theirs into ours, `write` ours into theirs."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


SAME = Form(lambda t: t, lambda t: t)

# The tensors of one kind of module: how our name ends -> how theirs ends, and how the tensor lies there.
Kind = Mapping[str, tuple[str, Form]]
TENSOR: Kind = {"": ("", SAME)}
WEIGHT: Kind = {".weight": (".weight", SAME)}
MODULE: Kind = {".weight": (".weight", SAME), ".bias": (".bias", SAME)}

# Modules of one kind: our name -> theirs. Several of theirs are stacked in ours, as query, key and value.
Group = tuple[Kind, Mapping[str, str | Sequence[str]]]


def bottleneck(ours: str, theirs: str) -> list[Group]:
    """A block of a ResNet, of which timm and transformers have the names."""
    convolutions = {f"{ours}.conv{index}": f"{theirs}.conv{index}" for index in (1, 2, 3)}
    norms = {f"{ours}.norm{index}": f"{theirs}.norm{index}" for index in (1, 2, 3)}
    return [
        (WEIGHT, convolutions | {f"{ours}.shortcut": f"{theirs}.downsample.conv"}),
        (MODULE, norms | {f"{ours}.shortcut_norm": f"{theirs}.downsample.norm"}),
    ]


# Part of a tensor's name to the thing that no network of vitrail has.
UNSUPPORTED = {
    "dist_token": "a distillation token",
    "distillation": "a distillation token",
    "head_dist": "a distillation head",
    "q_norm": "normalised queries and keys",
    "k_norm": "normalised queries and keys",
    "norm_pre": "a norm before the encoder",
    "rope": "rotary positions",
    "freqs": "rotary positions",
    "rel_pos": "relative positions of another kind",
    "relative_position": "relative positions of another kind",
    "backbone": "a convolutional stem of another kind",
    "running_": "batch norms",
    "num_batches": "batch norms",
    "mlp.fc1_g": "a gated MLP",
    "mlp.w12": "a gated MLP",
    "mlp.weights_": "a gated MLP",
    "mlp.gate": "a gated MLP",
    "mlp.norm": "norms inside attention and MLP",
    "attn.norm": "norms inside attention and MLP",
    "mask_token": "a mask token",
    "decoder": "a decoder",
}
BLOCK = "blocks.{0}"


class Rule(NamedTuple):
    ours: str
    theirs: tuple[str, ...]
    form: Form


Place = tuple[Rule, tuple[int, ...]]  # a rule, and the numbers of its placeholders


class Table:
    def __init__(self, *groups: Group):
        rules = [
            Rule(
                ours + end, tuple(name + their_end for name in ([theirs] if isinstance(theirs, str) else theirs)), form
            )
            for kind, names in groups
            for ours, theirs in names.items()
            for end, (their_end, form) in kind.items()
        ]
        self._theirs = [(_pattern(name), rule, part) for rule in rules for part, name in enumerate(rule.theirs)]
        self._ours = [(_pattern(rule.ours), rule) for rule in rules]

    def place(self, name: str) -> tuple[Place, int] | None:
        """Where a tensor of theirs belongs, and as which part of a stack."""
        for pattern, rule, part in self._theirs:
            if match := pattern.fullmatch(name):
                numbers = _numbers(rule.theirs[part], match)
                if min(numbers, default=0) >= 0 and _fill(rule.theirs[part], numbers) == name:  # unit1 is not unit01
                    return (rule, numbers), part
        return None

    def read(self, source: TensorSource, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our names and shapes for the tensors of `source`: its contents, or blanks of their shapes."""
        places = {name: place for name in tensors if (place := self.place(name))}
        if strange := [name for name in tensors if name not in places]:
            known = (words for name in strange for part, words in UNSUPPORTED.items() if part in name)
            thing = next(known, f"a tensor '{strange[0]}'")
            raise UserError(f"{source.where} has {thing}, which vitrail's networks have not")
        found: dict[Place, dict[int, Tensor]] = {}
        for name, tensor in tensors.items():
            (rule, numbers), part = places[name]
            try:
                turned = rule.form.read(tensor)
            except (RuntimeError, IndexError, ValueError):
                raise _wrong_shape(source, name, tensor) from None
            if turned.ndim == 0:
                raise _wrong_shape(source, name, tensor)
            found.setdefault((rule, numbers), {})[part] = turned
        self._check_whole(source, found)
        return {_fill(place[0].ours, place[1]): _stack(source, place, parts) for place, parts in found.items()}

    def theirs(self, ours: str) -> str:
        """What they call a tensor of ours, or the first of those that it stacks."""
        place = self._place_of_ours(ours)
        return _fill(place[0].theirs[0], place[1]) if place else ours

    def write(self, state: State) -> dict[str, Tensor]:
        """Our tensors in their names and shapes."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in state.items():
            place = self._place_of_ours(name)
            if place is None:
                raise UserError(f"the layout to write has no place for '{name}'")
            rule, numbers = place
            for theirs, part in zip(rule.theirs, tensor.chunk(len(rule.theirs)), strict=True):
                tensors[_fill(theirs, numbers)] = rule.form.write(part).contiguous()
        return tensors

    def _place_of_ours(self, name: str) -> Place | None:
        found = ((rule, match) for pattern, rule in self._ours if (match := pattern.fullmatch(name)))
        return next(((rule, _numbers(rule.ours, match)) for rule, match in found), None)

    def _check_whole(self, source: TensorSource, found: Mapping[Place, Mapping[int, Tensor]]) -> None:
        """No stack lacks a part, and what one block of the encoder has, the others have too."""
        repeated = [(rule, numbers[0]) for rule, numbers in found if rule.ours.startswith(BLOCK)]
        rules, blocks = dict.fromkeys(rule for rule, _ in repeated), sorted({index for _, index in repeated})
        for rule, numbers in itertools.chain(((rule, (index,)) for rule in rules for index in blocks), found):
            parts = found.get((rule, numbers), {})
            missing = [name for part, name in enumerate(rule.theirs) if part not in parts]
            if missing and rule.ours.endswith("qkv.bias"):
                raise without_bias(source.where)
            if missing:
                raise UserError(f"{source.where}: tensor '{source.called(_fill(missing[0], numbers))}' is missing")


def _listed(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def without_bias(where: str) -> UserError:
    return UserError(f"{where} has queries, keys and values without bias, and vitrail's network has biases")


def _stack(source: TensorSource, place: Place, parts: Mapping[int, Tensor]) -> Tensor:
    if len({tensor.shape[1:] for tensor in parts.values()}) > 1:
        raise _wrong_shape(source, _fill(place[0].theirs[0], place[1]), parts[0])
    return concatenate([parts[part] for part in range(len(parts))])


def concatenate(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """One contiguous tensor. Without storage only its shape is worked out: torch would import its compiler first,
    which would double the time that loading weights takes."""
    if not parts[0].is_meta:
        return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0].contiguous()
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return torch.empty(shape, device="meta")


def _wrong_shape(source: TensorSource, name: str, tensor: Tensor) -> UserError:
    return UserError(f"{source.where}: tensor '{name}' has shape {tuple(tensor.shape)}, which does not fit its place")


def _pattern(template: str) -> re.Pattern[str]:
    pieces = NUMBER.split(template)  # text, number, +1, :02, text, ...
    return re.compile(r"(\d{1,9})".join(re.escape(text) for text in pieces[::4]))


def _numbers(template: str, match: re.Match[str]) -> tuple[int, ...]:
    """The numbers of a name as we count them, in the order of their placeholders' digits."""
    places = [
        (int(place[1]), int(text) - bool(place[2]))
        for place, text in zip(NUMBER.finditer(template), match.groups(), strict=True)
    ]
    return tuple(number for _, number in sorted(places))


def _fill(template: str, numbers: tuple[int, ...]) -> str:
    def text(place: re.Match[str]) -> str:
        number = numbers[int(place[1])] + bool(place[2])
        return f"{number:02}" if place[3] else str(number)

    return NUMBER.sub(text, template)
