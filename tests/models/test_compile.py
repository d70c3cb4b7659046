"""Every kind of network is one graph for torch's compiler, forward and backward, and trains a step there.

The graph is captured and differentiated as for any backend; generating machine code would need a C++ compiler.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vitrail.config import ModelConfig, ResNetConfig
from vitrail.models.build import build_model

pytestmark = pytest.mark.slow

SMALL = {"width": 32, "depth": 2, "mlp_dim": 40, "heads": 4, "patch": (8, 8), "image_size": (32, 32), "num_classes": 5}
KINDS = {
    "token": {"dropout": 0.1, "representation": 16},
    "mean": {"pool": "gap", "class_token": False},
    "map, patches first": {"pool": "map", "class_token": True, "prefix_positions": False},
    "registers, layer scale, stochastic depth": {"registers": 2, "layer_scale": 1e-5, "drop_path": 0.1},
    "2d at every layer": {"positions": "2d", "positions_at": "layers"},
    "1d shared": {"positions_at": "shared"},
    "sincos": {"positions": "sincos"},
    "relative": {"positions": "relative"},
    "axial": {"axial": True, "pool": "gap", "class_token": False},
    "hybrid": {"stem": {"blocks": (1, 1), "width": 32}, "patch": (1, 1)},
}
CONFIGS = {name: ModelConfig(**{**SMALL, **options}) for name, options in KINDS.items()}
CONFIGS["resnet"] = ResNetConfig(kind="resnet", blocks=(1, 1), width=32, image_size=(32, 32), num_classes=5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_compiles_whole_and_trains(kind):
    torch.compiler.reset()
    torch.manual_seed(0)
    net = build_model(CONFIGS[kind])
    torch.nn.init.normal_(net.head.weight, std=0.1)
    pixels, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    first = F.cross_entropy(compiled(pixels), labels)
    first.backward()
    optimizer.step()
    assert torch.isfinite(first)
    unmoved = {name for name, parameter in net.named_parameters() if torch.equal(parameter, before[name])}
    # The last norm of a new block of the stem is 0, and so are the gradients of the layers before it.
    assert all(".stem.stages." in name for name in unmoved), unmoved
    net.eval()
    with torch.no_grad():
        assert torch.allclose(compiled(pixels), net(pixels), atol=1e-5)


def test_blocks_share_what_is_compiled_whatever_their_rates():
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    net = build_model(ModelConfig(**{**SMALL, "depth": 6, "drop_path": 0.3})).train()
    for block in net.blocks:
        block.compile(backend=backend)
    net(torch.randn(4, 3, 32, 32))
    assert len(graphs) == 3  # the first block has no stochastic depth, the last computes only one token
