"""`vitrail convert`: weights from any layout into any other, checked against the networks of the libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor

from vitrail.config import ModelConfig, NetworkConfig, Size
from vitrail.errors import UserError, error_reason
from vitrail.interrupt import Interrupts
from vitrail.models.build import build_from_state_dict
from vitrail.terminal import escape, make_console
from vitrail.weights.bundle import TRAINED_ON, Card, digest_tensor, read_trained_on
from vitrail.weights.formats import FormatName, format_named
from vitrail.weights.formats.base import Format
from vitrail.weights.output_path import free_output_path, staged_output
from vitrail.weights.read import Weights, read_weights
from vitrail.weights.reference_models import LoadFailure, ReferenceUnavailable, Run, loading
from vitrail.weights.tensors import TensorSource

TOLERANCE = 1e-4  # of the largest logit
COMPARED_AT = 224  # pixels a side, the most that a ResNet is compared at: its weights fit any size
MOST_TOKENS, MOST_PIXELS = 4096, 1024 * 1024  # of an image that networks are compared on


def convert(
    source: str,
    target: str,
    to: FormatName,
    *,
    image_size: Size | None = None,
    allow_pickle: bool = False,
    adopt_constants: bool = False,
    half: bool = False,
    licence: str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> None:
    """Read, check against the source's library, write, check against the target's; on any failure nothing is left.

    With `half`, numbers are stored in float16; `licence` replaces what the card says of it.
    """
    console = console or make_console()
    if half and to != "vitrail":
        raise UserError("--half is for --to vitrail, whose files are read in float32 again")
    path = free_output_path(source, target, to, overwrite)
    weights = read_weights(source, image_size=image_size, pickle=allow_pickle)
    if licence is not None:
        weights = replace(weights, card=weights.card.model_copy(update={"licence": licence}))
    card, origin, form = weights.card, format_named(weights.layout), format_named(to)
    console.print(f"read {escape(source)}: weights in {origin.owner} layout")
    for line in describe(card):
        console.print(escape(line))
    if weights.assumed:
        console.print(f"assumed: {escape(weights.assumed)}")
    changes = form.check_expressible(card, adopt_constants)
    pixels = _pixels(card.model)
    _compare(console, "as read", origin, weights, pixels, weights.file, weights.tensors)
    for change in changes:
        console.print(f"changed to what {form.library} fixes: {escape(change)}")
    try:
        with Interrupts() as signals, signals.interruptible(), staged_output(path, form.folder) as place:
            written = replace(weights, card=form.adopt_constants(card))
            state = _halved(weights.state, source) if half else weights.state
            form.write(place, written.card, {**state, **(_digests(weights) if to == "vitrail" else {})})
            _check_written(console, form, place, weights, written, pixels)
            if half and pixels is not None:
                cost, largest = _difference(_ours(read_weights(place), pixels), _ours(weights, pixels))
                most = f"(the largest output is {largest:.2g})"
                console.print(f"cost of half precision: outputs differ by up to {cost:.1e} {most}")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write '{path}': {error_reason(error)}") from None
    if left := ", ".join(thing for thing, there in form.lost_information(card).items() if there):
        console.print(f"left out, since {form.owner} layout has no place for it: {escape(left)}")
    console.print(f"wrote [bold]{escape(str(path))}[/]")


def _digests(weights: Weights) -> dict[str, Tensor]:
    """The tensor by which `evaluate` recognises training images, of files that have one."""
    if weights.layout != "vitrail":
        return {}
    known = read_trained_on(weights.file)
    return {TRAINED_ON: digest_tensor(known)} if len(known) else {}


def _halved(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    found = {name: tensor.half() for name, tensor in state.items()}
    for name, tensor in found.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"'{source}': tensor '{name}' has numbers too large for half precision: leave out --half")
    return found


def describe(card: Card) -> list[str]:
    """The network, its images and its classes, a line for each."""
    model = card.model
    names = "" if card.classes else ", without names"
    return [
        f"network: {_network(model)}",
        f"images: {'x'.join(map(str, model.image_size))} pixels, {model.channels} channels",
        f"classes: {model.num_classes:,}{names}" if model.num_classes else "classes: none, it gives features",
    ]


POSITIONS = {
    "none": "no positions",
    "2d": "positions by row and column",
    "sincos": "fixed positions",
    "relative": "relative positions",
}


def _network(model: NetworkConfig) -> str:
    if not isinstance(model, ModelConfig):
        return f"BiT ResNet, blocks {model.blocks}, {model.width} channels at the root"
    patch = "x".join(map(str, model.patch))
    facts = [
        f"width {model.width}, depth {model.depth}, {model.heads} heads, MLP {model.mlp_dim}, patches of {patch}",
        "attention along rows and columns" if model.axial else "",
        POSITIONS.get(model.positions, ""),
        {"layers": "positions at every layer", "shared": "the same positions at every layer"}.get(model.positions_at),
        {"token": "class token", "gap": "mean of patches", "map": "attention pooling"}[model.pool],
        f"{model.registers} registers" if model.registers else "",
        "LayerScale" if model.layer_scale is not None else "",
        f"representation layer of {model.representation}" if model.representation else "",
    ]
    stem = f" on a stem with blocks {model.stem.blocks}" if model.stem else ""
    return ", ".join([f"Vision Transformer{stem}", *filter(None, facts)])


def _pixels(model: NetworkConfig) -> Tensor | None:
    """Two random images to compare networks on; none where that would take long."""
    height, width = model.image_size
    if not isinstance(model, ModelConfig):
        height, width = min(height, COMPARED_AT), min(width, COMPARED_AT)
    elif model.sequence > MOST_TOKENS or height * width > MOST_PIXELS:
        return None
    return torch.randn(2, model.channels, height, width, generator=torch.Generator().manual_seed(0))


def _compare(
    console: Console,
    when: str,
    form: Format,
    weights: Weights,
    pixels: Tensor | None,
    path: Path,
    tensors: TensorSource | None,
) -> None:
    """Our network beside that of the library whose layout this is, from a file that was read or a folder that was
    written; where both can run, they must agree."""
    if form.reference_model is None:
        return
    try:
        if pixels is None:
            raise ReferenceUnavailable("images of this size would take long here")
        theirs = form.reference_model(path, weights.card, tensors)
        with loading(theirs.library, "run"):
            found = _outputs(theirs.run, pixels)
    except ReferenceUnavailable as reason:
        if isinstance(reason, LoadFailure) and form.must_load_in_library:
            raise UserError(f"{reason}; nothing is written") from None
        console.print(f"{when}: not compared with {form.compared_with}: {escape(str(reason))}")
        return
    difference, largest = _difference(found, _ours(weights, pixels))
    if not theirs.expected_difference and difference > TOLERANCE * largest:
        raise UserError(f"{form.compared_with} and vitrail answer otherwise, by {difference:.1e}; nothing is written")
    words = theirs.expected_difference or "gives the same outputs, within"
    console.print(f"{when}: {form.compared_with} {words} {difference:.1e} (the largest output is {largest:.2g})")


def _check_written(
    console: Console, form: Format, place: Path, weights: Weights, written: Weights, pixels: Tensor | None
) -> None:
    """What was written, against the target's library and against what it was made from."""
    _compare(console, "as written", form, written, pixels, place, None)
    if written.card.model != weights.card.model and pixels is not None:
        cost = _difference(_ours(written, pixels), _ours(weights, pixels))[0]
        console.print(f"cost of the changed constants: outputs differ by up to {cost:.1e} from before")
    if written.card.preprocess != weights.card.preprocess:
        console.print("cost of the changed preprocessing: images alone can show it, see vitrail evaluate")
    if form.round_trip:
        read = read_weights(str(place), image_size=written.card.model.image_size).state
        expected = form.round_trip(written.card.model, written.state)[1]
        same = read.keys() == expected.keys()
        if not same or not all(torch.equal(tensor, expected[name]) for name, tensor in read.items()):
            raise UserError("what was written does not read back the same; nothing is written")
        console.print("read back: every tensor is the same, bit for bit")


def _ours(weights: Weights, pixels: Tensor) -> Tensor:
    return _outputs(build_from_state_dict(weights.card.model, weights.state).eval(), pixels)


@torch.inference_mode()
def _outputs(run: Run, pixels: Tensor) -> Tensor:
    return run(pixels)


def _difference(one: Tensor, other: Tensor) -> tuple[float, float]:
    """The largest difference of outputs, and the largest of the latter."""
    return (one - other).abs().max().item(), other.abs().max().item()
