"""Maps of weights from transformers against transformers with eager attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vitrail
from vitrail.interpret.attention import attention_maps
from vitrail.interpret.relevance import relevance
from vitrail.interpret.rollout import rollout

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # transformers takes seconds to import


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A network of transformers for non-square images, and vitrail's from the folder it saves."""
    config = transformers.ViTConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=96,
        image_size=[16, 40],
        patch_size=8,
        num_labels=4,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    folder = tmp_path_factory.mktemp("vit")
    model.save_pretrained(folder)
    return model, vitrail.load(folder).net, torch.randn(2, 3, 16, 40)


def test_attention(pair):
    model, net, pixels = pair
    with torch.no_grad():
        expected = model(pixels, output_attentions=True).attentions
    found = attention_maps(net, pixels, [0, 1, 2])
    for layer, attention in enumerate(expected):
        assert np.allclose(found[:, layer], attention[:, :, 0, 1:].unflatten(2, (2, 5)).numpy(), atol=1e-5)


def test_rollout_and_relevance(pair):
    model, net, pixels = pair
    out = model(pixels, output_attentions=True)
    gradients = torch.autograd.grad((out.logits[:, 2] - out.logits[:, 0]).sum(), out.attentions)
    product = total = torch.eye(11).repeat(2, 1, 1)
    for attention, gradient in zip(out.attentions, gradients, strict=True):
        product = (attention.mean(1) + torch.eye(11)) / 2 @ product
        total = total + (attention * gradient).clamp_min(0).mean(1) @ total
    for found, expected in ((rollout(net, pixels), product), (relevance(net, pixels, [2, 2], [0, 0]), total)):
        reference = expected[:, 0, 1:].unflatten(1, (2, 5)).detach().numpy()
        assert reference.max() > 0.01 and np.allclose(found, reference, rtol=1e-3, atol=1e-5)
