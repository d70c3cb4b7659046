"""`vitrail plan` and `vitrail models`: the numbers, the page they make, and what they refuse."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from vitrail.cli.main import app
from vitrail.commands.models import list_models, show_models
from vitrail.commands.plan import estimate, show
from vitrail.errors import UserError
from vitrail.models.estimate import ACCELERATORS
from vitrail.models.variants import MODEL_NAMES


def page(name="B/16", batch=256, accelerator="H200", image_size=(224, 224)) -> str:
    text = io.StringIO()
    show(estimate(name, 1000, image_size, batch, accelerator), Console(file=text, width=120))
    return text.getvalue()


def test_the_estimate_has_exact_counts_and_names_the_parts():
    text = page()
    assert "86,567,656" in text and "17.56 G" in text and "105.4 GFLOP" in text and "14x14 patches" in text
    for part in ("weights", "optimizer", "activations", "gradients", "images per second", "largest batch"):
        assert part in text
    assert "unverified" not in text
    assert "unverified" in page(accelerator="L4")


def test_a_network_that_does_not_fit_in_memory_is_reported():
    assert "more than its 24.0 GB; the largest batch" in page("L/16", 256, "RTX-4090")
    assert "even without a batch" in page("G/14", 1, "RTX-4090")


def test_a_resnet_has_no_tokens():
    assert "tokens" not in page("R50x1")


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_network_has_a_plan_on_every_accelerator(name):
    for accelerator in ACCELERATORS:
        found = estimate(name, 1000, (224, 224), 64, accelerator).to_dict()
        assert found["step_seconds"] > 0 and found["memory_bytes"]["total"] > 16 * found["parameters"]
        assert found["fits"] == (found["largest_batch"] >= 64)


def test_json_from_the_command(capsys):
    app(
        ["plan", "H/14", "--batch", "64", "--image-size", "224x280", "--classes", "10", "--json"],
        result_action="return_value",
    )
    found = json.loads(capsys.readouterr().out)
    assert found["image_size"] == [224, 280] and found["num_classes"] == 10 and found["tokens"] == 321
    assert found["images_per_second"] == pytest.approx(64 / found["step_seconds"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["B/17"], "not a multiple of the patch 17x17"),
        (["X/16"], "did you mean"),
        (["R50+B/8"], "R50\\+B/16"),
        (["R51x1"], "did you mean 'R50x1'"),
        (["B/16", "--accelerator", "h20"], "did you mean 'H200'"),
        (["B/16", "--accelerator", "A100"], "did you mean 'A100-80GB'"),
        (["B/16", "--batch", "0"], "--batch must be 1 or more"),
        (["B/16", "--image-size", "big"], "224x320"),
        (["B/16", "--classes", "-1"], "--classes must be 0 or more"),
    ],
)
def test_invalid_arguments_of_plan(arguments, words):
    with pytest.raises(UserError, match=words):
        app(["plan", *arguments], exit_on_error=False, result_action="return_value")


def test_models_are_listed_with_their_counts():
    rows = {row["model"]: row for row in list_models()}
    assert list(rows) == MODEL_NAMES
    assert rows["R50+B/16"]["parameters"] == 98_659_112 and rows["R50x1"]["layers"] == 50
    text = io.StringIO()
    show_models(Console(file=text, width=120))
    assert "98,659,112" in text.getvalue() and "hybrids" in text.getvalue()
