"""`vitrail convert`: convert weights between layouts, checked against the networks of the other libraries."""

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

TOLERANCE = 1e-4  # relative to the largest logit
MAX_RESNET_SIZE = 224  # pixels: ResNets are compared at most at this size, since their weights fit any size
MAX_TOKENS, MAX_PIXELS = 4096, 1024 * 1024  # networks are not compared on larger images


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
    """Read weights, check them against the library of the source, write them, and check them against the target's.

    After an error nothing is written. With `half`, weights are stored in float16. `licence` replaces the licence in
    the card.
    """
    console = console or make_console()
    if half and to != "vitrail":
        raise UserError("--half has no effect without --to vitrail")
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
        console.print(f"changed to the fixed values of {form.library}: {escape(change)}")
    try:
        with Interrupts() as signals, signals.interruptible(), staged_output(path, form.folder) as output:
            written = replace(weights, card=form.adopt_constants(card))
            state = _halved(weights.state, source) if half else weights.state
            form.write(output, written.card, {**state, **(_digests(weights) if to == "vitrail" else {})})
            _check_written(console, form, output, weights, written, pixels)
            if half and pixels is not None:
                expected = _vitrail_outputs(weights, pixels)
                difference, largest = _difference(_vitrail_outputs(read_weights(output), pixels), expected)
                scale = f"(the largest output is {largest:.2g})"
                console.print(f"effect of float16: outputs differ by up to {difference:.1e} {scale}")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write '{path}': {error_reason(error)}") from None
    if lost := ", ".join(name for name, present in form.lost_information(card).items() if present):
        console.print(f"not written, since {form.owner} layout does not support it: {escape(lost)}")
    console.print(f"wrote [bold]{escape(str(path))}[/]")


def _digests(weights: Weights) -> dict[str, Tensor]:
    """Return the tensor by which `evaluate` recognises training images, if the file has one."""
    if weights.layout != "vitrail":
        return {}
    digests = read_trained_on(weights.file)
    return {TRAINED_ON: digest_tensor(digests)} if len(digests) else {}


def _halved(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    halved = {name: tensor.half() for name, tensor in state.items()}
    for name, tensor in halved.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"'{source}': tensor '{name}' has values too large for float16: remove --half")
    return halved


def describe(card: Card) -> list[str]:
    """Return one line each on the network, its images and its classes."""
    model = card.model
    names = "" if card.classes else " without names"
    return [
        f"network: {_network(model)}",
        f"images: {'x'.join(map(str, model.image_size))} pixels, {model.channels} channels",
        f"classes: {model.num_classes:,}{names}" if model.num_classes else "classes: none (features only)",
    ]


POSITIONS = {
    "none": "no position embeddings",
    "2d": "2D position embeddings",
    "sincos": "sin-cos position embeddings",
    "relative": "relative position embeddings",
}


def _network(model: NetworkConfig) -> str:
    if not isinstance(model, ModelConfig):
        return f"BiT ResNet, blocks {model.blocks}, root width {model.width}"
    patch = "x".join(map(str, model.patch))
    facts = [
        f"width {model.width}, depth {model.depth}, {model.heads} heads, MLP {model.mlp_dim}, patches of {patch}",
        "axial attention" if model.axial else "",
        POSITIONS.get(model.positions, ""),
        {"layers": "position embeddings in every layer", "shared": "shared position embeddings in every layer"}.get(
            model.positions_at
        ),
        {"token": "class token", "gap": "global average pooling", "map": "attention pooling"}[model.pool],
        f"{model.registers} registers" if model.registers else "",
        "LayerScale" if model.layer_scale is not None else "",
        f"representation layer of width {model.representation}" if model.representation else "",
    ]
    stem = f" with ResNet stem, blocks {model.stem.blocks}" if model.stem else ""
    return ", ".join([f"Vision Transformer{stem}", *filter(None, facts)])


def _pixels(model: NetworkConfig) -> Tensor | None:
    """Return two random images to compare networks on, or None if that would take too long."""
    height, width = model.image_size
    if not isinstance(model, ModelConfig):
        height, width = min(height, MAX_RESNET_SIZE), min(width, MAX_RESNET_SIZE)
    elif model.sequence > MAX_TOKENS or height * width > MAX_PIXELS:
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
    """Compare the outputs of the network with those of the library of this layout; they must agree.

    `path` is the file that was read or the output that was written. Nothing is compared if the library is missing.
    """
    if form.reference_model is None:
        return
    try:
        if pixels is None:
            raise ReferenceUnavailable("images of this size would take too long")
        reference = form.reference_model(path, weights.card, tensors)
        with loading(reference.library, "run"):
            outputs = _outputs(reference.run, pixels)
    except ReferenceUnavailable as reason:
        if isinstance(reason, LoadFailure) and form.must_load_in_library:
            raise UserError(f"{reason}; nothing is written") from None
        console.print(f"{when}: not compared with {form.compared_with}: {escape(str(reason))}")
        return
    difference, largest = _difference(outputs, _vitrail_outputs(weights, pixels))
    if not reference.expected_difference and difference > TOLERANCE * largest:
        raise UserError(
            f"the outputs of {form.compared_with} and vitrail differ by {difference:.1e}; nothing is written"
        )
    result = reference.expected_difference or "gives the same outputs, within"
    console.print(f"{when}: {form.compared_with} {result} {difference:.1e} (the largest output is {largest:.2g})")


def _check_written(
    console: Console, form: Format, output: Path, weights: Weights, written: Weights, pixels: Tensor | None
) -> None:
    """Compare the written weights with the library of the target, and with the source."""
    _compare(console, "as written", form, written, pixels, output, None)
    if written.card.model != weights.card.model and pixels is not None:
        change = _difference(_vitrail_outputs(written, pixels), _vitrail_outputs(weights, pixels))[0]
        console.print(f"effect of the changed constants: outputs differ by up to {change:.1e}")
    if written.card.preprocess != weights.card.preprocess:
        console.print("effect of the changed preprocessing: run vitrail evaluate to measure it")
    if form.round_trip:
        read = read_weights(str(output), image_size=written.card.model.image_size).state
        expected = form.round_trip(written.card.model, written.state)[1]
        same = read.keys() == expected.keys()
        if not same or not all(torch.equal(tensor, expected[name]) for name, tensor in read.items()):
            raise UserError("the written file does not read back the same; nothing is written")
        console.print("read back: every tensor is bit-identical")


def _vitrail_outputs(weights: Weights, pixels: Tensor) -> Tensor:
    return _outputs(build_from_state_dict(weights.card.model, weights.state).eval(), pixels)


@torch.inference_mode()
def _outputs(run: Run, pixels: Tensor) -> Tensor:
    return run(pixels)


def _difference(outputs: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the maximum absolute difference, and the maximum of `expected`."""
    return (outputs - expected).abs().max().item(), expected.abs().max().item()
