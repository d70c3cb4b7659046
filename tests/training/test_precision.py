import pytest
import torch

from vitrail.errors import UserError
from vitrail.infer.device import choose_device
from vitrail.training import precision
from vitrail.training.precision import autocast, choose_precision

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


def test_what_is_asked_for_must_work_but_not_pay(trial):
    assert choose_precision("fp32", CPU) == ("fp32", "as asked")
    trial("print(0.6)")
    assert choose_precision("bf16", CPU) == ("bf16", "as asked")
    trial("raise SystemExit(132)")
    with pytest.raises(UserError, match="cannot compute in bfloat16"):
        choose_precision("bf16", CPU)


def test_autocast_is_on_for_bf16_alone():
    with autocast("bf16", CPU)():
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    with autocast("fp32", CPU)():
        assert not torch.is_autocast_enabled("cpu")


def test_a_device_that_is_not_there_is_one_sentence():
    assert choose_device("cpu") == CPU
    with pytest.raises(UserError, match="no device 'gpu'"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="there is no device 'cuda'"):
            choose_device("cuda")
    for name in ("meta", "xpu"):
        with pytest.raises(UserError, match="no device"):
            choose_device(name)
