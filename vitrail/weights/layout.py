"""How a layout's tensors correspond to ours: one table of rules for each, used in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import UserError

# {0} stands for a number as we count, from zero; {0+1} counts from one, {0+1:02} writes it with two digits.
PLACE = re.compile(r"\{(\d)(\+1)?(:02)?\}")


class Form(NamedTuple):
    """How a tensor lies there: `read` turns theirs into ours; `write` turns ours, of so many heads, into theirs."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor, int], Tensor]


SAME = Form(lambda tensor: tensor, lambda tensor, _: tensor)


class Rule(NamedTuple):
    """One kind of tensor: our name and theirs. Several of theirs are stacked in ours, as query, key and value."""

    ours: str
    theirs: tuple[str, ...]
    form: Form = SAME


def both(ours: str, *theirs: str) -> list[Rule]:
    """Weight and bias of a module that torch calls by the same words there."""
    return [Rule(f"{ours}.{leaf}", tuple(f"{name}.{leaf}" for name in theirs)) for leaf in ("weight", "bias")]


class Place(NamedTuple):
    """Where a tensor of theirs belongs: which rule, with which numbers, and as which part of a stack."""

    rule: Rule
    numbers: tuple[int, ...]
    part: int


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


class Layout:
    def __init__(self, rules: Sequence[Rule]):
        self._theirs = [(_pattern(name), rule, part) for rule in rules for part, name in enumerate(rule.theirs)]
        self._ours = [(_pattern(rule.ours), rule) for rule in rules]

    def place(self, name: str) -> Place | None:
        for pattern, rule, part in self._theirs:
            if match := pattern.fullmatch(name):
                numbers = _numbers(rule.theirs[part], match)
                if min(numbers, default=0) >= 0 and _fill(rule.theirs[part], numbers) == name:  # unit1 is not unit01
                    return Place(rule, numbers, part)
        return None

    def read(self, tensors: Mapping[str, Tensor], where: str, called: Callable[[str], str] = str) -> dict[str, Tensor]:
        """Their tensors in our names and shapes. `called`: what the file itself calls a tensor of theirs."""
        parts: dict[tuple[Rule, tuple[int, ...]], dict[int, Tensor]] = {}
        places = {name: self.place(name) for name in tensors}
        if strange := [name for name, place in places.items() if place is None]:
            known = (words for name in strange for part, words in UNSUPPORTED.items() if part in name)
            thing = next(known, f"a tensor '{strange[0]}'")
            raise UserError(f"{where} has {thing}, which vitrail's networks have not")
        for name, place in places.items():
            tensor = tensors[name]
            assert place is not None
            try:
                turned = place.rule.form.read(tensor)
            except (RuntimeError, IndexError, ValueError):
                raise _wrong_shape(name, tensor, where) from None
            if turned.ndim == 0:
                raise _wrong_shape(name, tensor, where)
            parts.setdefault((place.rule, place.numbers), {})[place.part] = turned
        self._check_same_everywhere(parts, where, called)
        return {
            _fill(rule.ours, numbers): _stack(rule, numbers, found, where, called)
            for (rule, numbers), found in parts.items()
        }

    def theirs(self, ours: str) -> str:
        """What they call a tensor of ours, or the first of those that it stacks."""
        for pattern, rule in self._ours:
            if match := pattern.fullmatch(ours):
                return _fill(rule.theirs[0], _numbers(rule.ours, match))
        return ours

    def write(self, state: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
        """Our tensors in their names and shapes."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in state.items():
            found = ((rule, match) for pattern, rule in self._ours if (match := pattern.fullmatch(name)))
            rule, match = next(found, (None, None))
            if rule is None or match is None:
                raise UserError(f"the layout to write has no place for '{name}'")
            numbers = _numbers(rule.ours, match)
            for theirs, part in zip(rule.theirs, tensor.chunk(len(rule.theirs)), strict=True):
                tensors[_fill(theirs, numbers)] = rule.form.write(part, heads).contiguous()
        return tensors

    def _check_same_everywhere(
        self, parts: Mapping[tuple[Rule, tuple[int, ...]], object], where: str, called: Callable[[str], str]
    ) -> None:
        """What one block of the encoder has, the others must have too; said in the file's own words."""
        repeated = [(rule, numbers[0]) for rule, numbers in parts if rule.ours.startswith("blocks.")]
        blocks = {index for _, index in repeated}
        for rule in dict.fromkeys(rule for rule, _ in repeated):
            missing = [index for index in blocks if (rule, (index,)) not in parts]
            if missing and rule.ours.endswith("qkv.bias"):
                raise without_bias(where)
            if missing:
                raise UserError(f"{where}: tensor '{called(_fill(rule.theirs[0], (min(missing),)))}' is missing")


def without_bias(where: str) -> UserError:
    return UserError(f"{where} has queries, keys and values without bias, and vitrail's network has biases")


def _stack(
    rule: Rule, numbers: tuple[int, ...], found: Mapping[int, Tensor], where: str, called: Callable[[str], str]
) -> Tensor:
    missing = [part for part in range(len(rule.theirs)) if part not in found]
    if missing and rule.ours.endswith("qkv.bias"):
        raise without_bias(where)
    if missing:
        raise UserError(f"{where}: tensor '{called(_fill(rule.theirs[missing[0]], numbers))}' is missing")
    if len({tensor.shape[1:] for tensor in found.values()}) > 1:
        raise _wrong_shape(_fill(rule.theirs[0], numbers), found[0], where)
    return concatenate([found[part] for part in range(len(found))])


def concatenate(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """One contiguous tensor. Without storage only its shape is worked out: torch would import its compiler first,
    which would double the time that loading weights takes."""
    if not parts[0].is_meta:
        return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0].contiguous()
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return torch.empty(shape, device="meta")


def _wrong_shape(name: str, tensor: Tensor, where: str) -> UserError:
    return UserError(f"{where}: tensor '{name}' has shape {tuple(tensor.shape)}, which does not fit its place")


def _pattern(template: str) -> re.Pattern[str]:
    pieces = PLACE.split(template)  # text, number, +1, :02, text, ...
    return re.compile(r"(\d{1,9})".join(re.escape(text) for text in pieces[::4]))


def _numbers(template: str, match: re.Match[str]) -> tuple[int, ...]:
    """The numbers of a name as we count them, in the order of their placeholders' digits."""
    places = [
        (int(place[1]), int(text) - bool(place[2]))
        for place, text in zip(PLACE.finditer(template), match.groups(), strict=True)
    ]
    return tuple(number for _, number in sorted(places))


def _fill(template: str, numbers: tuple[int, ...]) -> str:
    def text(place: re.Match[str]) -> str:
        number = numbers[int(place[1])] + bool(place[2])
        return f"{number:02}" if place[3] else str(number)

    return PLACE.sub(text, template)
