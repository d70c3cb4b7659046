import pytest
import torch

from vitrail.errors import UserError
from vitrail.inference.device import autocast, choose_device
from vitrail.training import precision
from vitrail.training.precision import choose_precision

CPU = torch.device("cpu")


@pytest.fixture
def trial(monkeypatch):
    """Set the code of the trial subprocess and whether the CPU has AMX; clears the cached result."""

    def set_to(code, amx=True):
        precision.bf16_works_on_cpu.cache_clear()
        monkeypatch.setattr(precision, "TRIAL", code)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)

    yield set_to
    precision.bf16_works_on_cpu.cache_clear()


def test_an_illegal_instruction_in_the_trial_selects_float32(trial):
    trial("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert choose_precision("auto", CPU)[0] == "fp32"


def test_precision_does_not_depend_on_the_duration_of_the_trial(trial):
    slow, quick = "import time; time.sleep(0.3)", "pass"
    for code in (slow, quick):
        trial(code)
        assert choose_precision("auto", CPU)[0] == "bf16"
        trial(code, amx=False)
        assert choose_precision("auto", CPU)[0] == "fp32"


def test_a_trial_that_is_killed_or_times_out_is_an_error(trial, monkeypatch):
    monkeypatch.setattr(precision, "TRIAL_TIMEOUT", 0.2)
    for code in ("import time; time.sleep(9)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"):
        trial(code)
        with pytest.raises(UserError, match=r"precision\.compute"):
            choose_precision("auto", CPU)


def test_bf16_by_setting_must_work_but_need_not_be_faster(trial):
    assert choose_precision("fp32", CPU)[0] == "fp32"
    trial("pass", amx=False)
    assert choose_precision("bf16", CPU)[0] == "bf16"
    trial("raise SystemExit(132)")
    with pytest.raises(UserError, match=r"bfloat16.*precision\.compute=fp32"):
        choose_precision("bf16", CPU)


def test_autocast_is_enabled_only_for_bf16():
    with autocast("bf16", CPU)():
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    with autocast("fp32", CPU)():
        assert not torch.is_autocast_enabled("cpu")


def test_a_missing_or_unknown_device_is_a_user_error():
    assert choose_device("cpu") == CPU
    with pytest.raises(UserError, match="unknown device 'gpu'"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no device 'cuda'"):
            choose_device("cuda")
    for name in ("meta", "xpu"):
        with pytest.raises(UserError, match=f"device '{name}'"):
            choose_device(name)
