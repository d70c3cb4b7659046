"""Filters and position similarity against scikit-learn and closed forms."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity

from tests.interpret.nets import KINDS, random_net
from vitrail.errors import UserError
from vitrail.interpret.filters import embedding_filters
from vitrail.interpret.position_similarity import position_similarity
from vitrail.models.pos_embed import sincos


@pytest.mark.parametrize(("patch", "channels"), [((4, 4), 3), ((8, 4), 3), ((4, 4), 1)])
def test_filters_are_the_principal_components_of_scikit_learn(patch, channels):
    net = random_net(width=96, patch=patch, channels=channels)
    found = embedding_filters(net, 10)
    rows = net.patch_embed.proj.weight.permute(0, 2, 3, 1).flatten(1).double().numpy()
    oracle = PCA(10, svd_solver="full").fit(rows)
    assert found.components.shape == (10, *patch, channels)
    assert np.allclose(found.components.reshape(10, -1), oracle.components_, atol=1e-9)
    assert np.allclose(found.explained_variance_ratio, oracle.explained_variance_ratio_)


def test_the_filters_of_a_hybrid_are_those_of_its_stem():
    net = random_net(**KINDS["hybrid"])
    found = embedding_filters(net)
    assert found.components.shape == (28, 7, 7, 3) and "stem" in found.layer
    rows = net.patch_embed.stem.root.standardized_weight().permute(0, 2, 3, 1).flatten(1).double().numpy()
    assert np.allclose(found.components.reshape(28, -1), PCA(28, svd_solver="full").fit(rows).components_, atol=1e-7)


def test_fewer_components_than_requested():
    assert len(embedding_filters(random_net(channels=1, patch=(2, 2)), 28).components) == 4


@pytest.mark.parametrize("kind", ["token", "registers", "hybrid"])
def test_similarity_of_learned_positions(kind):
    net = random_net(**KINDS[kind])
    prefix, (height, width) = net.config.prefix, net.config.grid
    found = position_similarity(net)
    table = net.pos_embed.table[0, prefix:].numpy()
    assert found.shape == (height, width, height, width)
    assert np.allclose(found.reshape(len(table), -1), cosine_similarity(table), atol=1e-6)


def test_similarity_of_sincos_and_2d_positions():
    sincos_similarity = position_similarity(random_net(positions="sincos")).reshape(6, 6)
    assert np.allclose(sincos_similarity, cosine_similarity(sincos((2, 3), 24)), atol=1e-6)
    axes = random_net(positions="2d")
    table = [np.r_[axes.pos_embed.columns[x], axes.pos_embed.rows[y]] for y in range(2) for x in range(3)]
    assert np.allclose(position_similarity(axes).reshape(6, 6), cosine_similarity(table), atol=1e-6)


def test_a_position_table_per_block():
    net = random_net(positions_at="layers")
    table = net.pos_embed[2].table[0, 1:].numpy()
    assert np.allclose(position_similarity(net, 2).reshape(6, 6), cosine_similarity(table), atol=1e-6)
    with pytest.raises(UserError, match="blocks 0 to 2"):
        position_similarity(net, 3)


@pytest.mark.parametrize("positions", ["none", "relative"])
def test_networks_without_position_embeddings_are_an_error(positions):
    with pytest.raises(UserError, match=positions):
        position_similarity(random_net(positions=positions))


def test_a_table_without_a_row_for_the_class_token():
    net = random_net(prefix_positions=False)
    assert np.allclose(
        position_similarity(net).reshape(6, 6), cosine_similarity(net.pos_embed.table[0].numpy()), atol=1e-6
    )
    assert torch.is_grad_enabled()
