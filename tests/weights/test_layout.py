"""Key mapping tables, in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

from vitrail.errors import UserError
from vitrail.weights import formats
from vitrail.weights.formats.table import MODULE, TENSOR, Form, Table
from vitrail.weights.tensors import TensorSource, make_source

TABLE = Table(
    (MODULE, {"stages.{0}.{1}.conv": "block{0+1}/unit{1+1:02}/conv"}),
    (TENSOR, {"blocks.{0}.qkv": ("q{0}", "k{0}", "v{0}"), "swapped.{0}.{1}": "by.{1}.{0}"}),
    ({"": ("", Form(lambda t: t.T, lambda t: t.T))}, {"head": "kernel"}),
)
VITRAIL_TENSORS = {
    "stages.0.11.conv.weight": torch.arange(3.0),
    "stages.2.0.conv.bias": torch.arange(4.0),
    "blocks.7.qkv": torch.arange(6.0).view(6, 1),
    "head": torch.arange(6.0).view(2, 3),
    "swapped.1.2": torch.arange(2.0),
}
OTHER_NAMES = {
    "block1/unit12/conv.weight", "block3/unit01/conv.bias", "q7", "k7", "v7", "kernel", "by.2.1",
}  # fmt: skip


def source_of(tensors: dict[str, torch.Tensor]) -> TensorSource:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return make_source("it", Path(), shapes, dict.fromkeys(shapes, "F32"), lambda names: tensors)


def read(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return TABLE.read(source_of(tensors), tensors)


def test_round_trip():
    written = TABLE.write(VITRAIL_TENSORS)
    assert set(written) == OTHER_NAMES
    assert written["kernel"].shape == (3, 2) and written["kernel"].is_contiguous()
    assert written["k7"].flatten().tolist() == [2, 3]
    back = read(written)
    assert back.keys() == VITRAIL_TENSORS.keys()
    assert all(torch.equal(tensor, VITRAIL_TENSORS[name]) for name, tensor in back.items())


@pytest.mark.parametrize(
    "name", ["block1/unit1/conv.weight", "block0/unit01/conv.weight", "block01/unit01/conv.weight"]
)
def test_names_with_different_number_formats_do_not_match(name):
    assert TABLE.slot(name) is None
    with pytest.raises(UserError, match=f"unknown tensor .'{name}'"):
        read({name: torch.zeros(1)})


def test_missing_and_mismatched_parts():
    with pytest.raises(UserError, match="it: tensor 'v3' is missing"):
        read({"q3": torch.zeros(1), "k3": torch.zeros(1)})
    with pytest.raises(UserError, match=r"it: tensor 'q3' has shape \(1, 2\)"):
        read({"q3": torch.zeros(1, 2), "k3": torch.zeros(1), "v3": torch.zeros(1)})


def test_tensors_without_equivalent():
    with pytest.raises(UserError, match=r"'pos_embed.rows' has no equivalent"):
        TABLE.write({"pos_embed.rows": torch.zeros(1)})


def test_every_layout_is_a_module_and_a_name_in_one_list():
    """The list defines the choices of the command line and the order in which layouts are detected."""
    modules = [path for path in Path(formats.__file__).parent.glob("*.py") if "\nFORMAT = " in path.read_text()]
    assert {path.stem for path in modules} == set(formats.FORMATS) == set(get_args(formats.FormatName))
    assert list(formats.formats()) == list(formats.FORMATS)
    with pytest.raises(UserError, match=r"unknown layout 'tim'.*did you mean 'timm'"):
        formats.format_named("tim")
