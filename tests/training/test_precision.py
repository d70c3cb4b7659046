import pytest
import torch
from vitrail.train import precision

from vitrail.errors import UserError
from vitrail.training.precision import autocast, choose_device, choose_precision

CPU = torch.device("cpu")


@pytest.fixture
def trial(monkeypatch):
    """Sets what the trial process does; the outcome of an earlier trial is forgotten."""

    def set_to(code):
        precision.bf16_gain_on_cpu.cache_clear()
        monkeypatch.setattr(precision, "TRIAL", code)
        monkeypatch.setattr(precision.torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")

    yield set_to
    precision.bf16_gain_on_cpu.cache_clear()


def test_an_illegal_instruction_in_the_trial_means_float32(trial):
    trial("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert choose_precision("auto", CPU) == ("fp32", "a trial of bfloat16 failed on this processor")


def test_bfloat16_must_be_worth_it(trial):
    trial("print(0.6)")
    assert choose_precision("auto", CPU)[0] == "fp32"
    trial("print(1.9)")
    assert choose_precision("auto", CPU) == ("bf16", "bfloat16 gives 1.9 times the speed on this processor")


def test_what_is_asked_for_is_not_tried():
    assert choose_precision("fp32", CPU) == ("fp32", "as asked")
    assert choose_precision("bf16", CPU) == ("bf16", "as asked")


def test_autocast_leaves_weights_and_losses_alone():
    with autocast("bf16", CPU)():
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    with autocast("fp32", CPU)():
        assert not torch.is_autocast_enabled("cpu")


def test_a_device_that_is_not_there_is_one_sentence():
    assert choose_device("cpu") == CPU
    with pytest.raises(UserError, match="no device 'gpu'"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device here"):
            choose_device("cuda")
