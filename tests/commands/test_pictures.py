"""The example images of a report: which images, their captions, and maps from the network."""

import numpy as np
import pytest
import torch

from vitrail.config import DataConfig, ModelConfig, Preprocess, ResNetConfig
from vitrail.data.dataset import open_dataset
from vitrail.data.decode import open_image
from vitrail.data.transforms import eval_transform, normalise
from vitrail.inference.runner import Outputs
from vitrail.interpret.relevance import relevance
from vitrail.interrupt import Interrupts
from vitrail.models.build import build_model
from vitrail.report.explain_plots import overlay_heatmap
from vitrail.tasks.table import prediction_task
from vitrail.workflows.measure import measure, score_outputs

SPEC = Preprocess(size=(16, 16), resize="short_side", crop_fraction=0.8)
CPU = torch.device("cpu")
SINGLE, MULTI = (prediction_task(name, 3) for name in ("classification", "multilabel"))


@pytest.fixture(scope="module")
def samples(photos):
    """45 images of blue, green and red."""
    return open_dataset(photos, None).splits["all"]


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    made = build_model(
        ModelConfig(width=24, depth=2, mlp_dim=40, heads=2, patch=(4, 4), image_size=(16, 16), num_classes=3)
    )
    for parameter in made.parameters():
        parameter.data.normal_(std=0.4)
    return made


def image_of(samples, name):
    index = next(i for i in range(len(samples)) if samples.name(i) == name)
    opened = open_image(samples.read(index), channels=3, background=(255, 255, 255), max_pixels=10**6)
    return opened.pixels(), int(samples.labels[index])


def test_maps_are_of_the_prediction_rather_than_the_truth(net, samples):
    found = measure(net, "folder", samples, SPEC, DataConfig(workers=0), CPU, Interrupts(), task=SINGLE)
    assert len(found.mistakes) == 6 and len(found.uncertain) == 3
    for one in [*found.mistakes, *found.uncertain]:
        image, truth = image_of(samples, one.name)
        np.testing.assert_array_equal(one.image, image)
        view = eval_transform(image, SPEC)
        pixels = normalise(view[None], SPEC)
        with torch.no_grad():
            order = net(pixels)[0].argsort(descending=True).tolist()
        output, rather = order[0], truth if truth != order[0] else order[1]
        assert one.predicted == samples.classes[output] and one.truth == samples.classes[truth]
        assert one.why == f"{samples.classes[output]} rather than {samples.classes[rather]}"
        expected = overlay_heatmap(view.permute(1, 2, 0).numpy(), relevance(net, pixels, [output], [rather])[0])
        assert np.abs(one.map.astype(int) - expected).max() <= 1  # of 255: batches of four round otherwise than one
    assert {one.name for one in found.mistakes} <= {samples.name(i) for i in range(len(samples))}
    assert all(one.predicted != one.truth for one in found.mistakes)


def test_a_resnet_has_images_without_maps(samples):
    torch.manual_seed(0)
    net = build_model(ResNetConfig(kind="resnet", blocks=(1,), width=32, image_size=(16, 16), num_classes=3))
    torch.nn.init.normal_(net.head.weight)
    found = measure(net, "folder", samples, SPEC, DataConfig(workers=0), CPU, Interrupts(), task=SINGLE)
    assert len(found.mistakes) == 12 and len(found.uncertain) == 6
    assert all(one.map is None for one in [*found.mistakes, *found.uncertain])


def test_planted_wrong_labels_are_found(net, samples):
    true, rng = torch.as_tensor(samples.labels), np.random.default_rng(0)
    logits = torch.as_tensor(0.2 * rng.normal(size=(45, 3)), dtype=torch.float32) + 5 * torch.eye(3)[true]
    labels = true.clone()
    planted = [3, 20, 41]
    labels[planted] = (labels[planted] + 1) % 3
    out = Outputs(logits, labels, torch.arange(45), [])
    found = score_outputs(net, out, "folder", samples, SPEC, DataConfig(workers=0), task=SINGLE)
    assert dict(found.examples.suggested) == {row: int(true[row]) for row in planted}
    assert {one.name for one in found.suspects} == {samples.name(i) for i in planted}
    for one in found.suspects:
        index = next(i for i in planted if samples.name(i) == one.name)
        assert one.predicted == samples.classes[true[index]] and one.truth == samples.classes[labels[index]]
        assert one.map is None


def test_multilabel_maps_are_of_the_label(net, samples):
    truth = torch.eye(3, dtype=torch.uint8)[torch.as_tensor(samples.labels)]
    logits = torch.where(truth > 0, 3.0, -3.0)
    logits[7, 0], logits[9] = 6.0, torch.tensor([-3.0, -3.0, -3.0])
    truth[7], truth[9] = torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1])
    found = score_outputs(
        net, Outputs(logits, truth, torch.arange(45), []), "folder", samples, SPEC, DataConfig(workers=0), task=MULTI
    )
    first, second = found.mistakes[0], next(one for one in found.mistakes if one.name == samples.name(9))
    assert first.name == samples.name(7) and (first.predicted, first.truth) == ("blue", "not blue")
    assert (second.predicted, second.truth, second.why) == ("not red", "red", "red")
    image, _ = image_of(samples, first.name)
    view = eval_transform(image, SPEC)
    expected = overlay_heatmap(view.permute(1, 2, 0).numpy(), relevance(net, normalise(view[None], SPEC), [0])[0])
    assert np.abs(first.map.astype(int) - expected).max() <= 1
