import errno
import shutil

import pytest
import torch

from vitrail.config import ModelConfig, OptimizerConfig
from vitrail.errors import UserError
from vitrail.models.build import build_model
from vitrail.training.checkpoint import CheckpointManager
from vitrail.training.ema import EMA
from vitrail.training.optimizer import build_optimizer
from vitrail.training.state import TrainState


def trained_state(steps, seed=0, name="adamw"):
    torch.manual_seed(seed)
    net = build_model(
        ModelConfig(width=24, depth=2, mlp_dim=48, heads=2, patch=(8, 8), image_size=(16, 16), num_classes=3)
    )
    state = TrainState(net, build_optimizer(net, OptimizerConfig(name=name)), EMA(net, 0.9))
    advance(state, steps)
    return state


def advance(state, steps):
    for _ in range(steps):
        torch.manual_seed(state.step)
        loss = state.model(torch.randn(2, 3, 16, 16)).logsumexp(-1).mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        state.ema.update(state.model, state.step)


def files(checkpoints):
    return [path for _, parts in checkpoints.steps() for path in parts]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_a_restored_run_resumes_bit_for_bit(tmp_path, name):
    checkpoints = CheckpointManager(tmp_path, keep=2)
    state = trained_state(3, name=name)
    checkpoints.save(state, {"fingerprint": "x"})
    advance(state, 4)
    saved, damaged = checkpoints.latest()
    other = trained_state(1, seed=5, name=name)
    other.load(saved.tensor_parts.keys(), saved.read, saved.facts)
    assert other.step == 3 and saved.facts["fingerprint"] == "x" and not damaged
    advance(other, 4)
    for key, value in state.tensors().items():
        assert torch.equal(value, other.tensors()[key]), key


def test_only_the_newest_are_kept_and_a_damaged_one_is_skipped(tmp_path):
    checkpoints = CheckpointManager(tmp_path, keep=2)
    state = trained_state(1)
    for _ in range(3):
        checkpoints.save(state, {})
        advance(state, 1)
    assert [p.name for p in files(checkpoints)] == ["step_000000002.safetensors", "step_000000003.safetensors"]
    newest = files(checkpoints)[-1]
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1  # one flipped bit
    newest.write_bytes(data)
    saved, damaged = checkpoints.latest()
    assert saved.facts["step"] == 2 and "step_000000003" in damaged[0] and "checksum" in damaged[0]
    files(checkpoints)[0].write_bytes(b"cut")
    with pytest.raises(UserError, match=r"no undamaged checkpoint.*step_000000002"):
        checkpoints.latest()


def test_checkpoints_to_roll_back_to_are_kept(tmp_path):
    checkpoints = CheckpointManager(tmp_path, keep=2)
    state = trained_state(1)
    for nonfinite_steps in (0, 0, 0, 1, 2, 3):
        state.nonfinite_steps.fill_(nonfinite_steps)
        checkpoints.save(state, {})
        advance(state, 1)
    assert [step for step, _ in checkpoints.steps()] == [2, 3, 5, 6]
    assert checkpoints.latest()[0].facts["step"] == 6
    for until, rejected, expected in ((6, (), 3), (2, (), 2), (6, (3,), 2), (6, (2, 3), 2)):
        assert checkpoints.latest_good(until, rejected)[0].facts["step"] == expected
    state.step = 3  # rolled back to step 2, then trained one step
    state.nonfinite_steps.zero_()
    checkpoints.save(state, {})
    assert [step for step, _ in checkpoints.steps()] == [2, 3]


def test_saving_a_step_again_in_other_parts_deletes_the_old_parts(tmp_path):
    checkpoints = CheckpointManager(tmp_path, keep=2)
    state = trained_state(1)
    checkpoints.save(state, {})
    (file,) = files(checkpoints)
    for part in (1, 2):
        shutil.copy(file, tmp_path / f"step_000000001.part_{part}_of_2.safetensors")
    checkpoints.save(state, {})
    assert [path.name for path in files(checkpoints)] == ["step_000000001.safetensors"]


def test_a_changed_fact_fails_the_checksum(tmp_path):
    checkpoints = CheckpointManager(tmp_path, keep=2)
    checkpoints.save(trained_state(5), {"mean": 0.5})
    (file,) = files(checkpoints)
    content = file.read_bytes()
    for old, new in ((b'step\\": 5', b'step\\": 4'), (b'mean\\": 0.5', b'mean\\": 0.4')):
        assert content.count(old) == 1
        file.write_bytes(content.replace(old, new))
        with pytest.raises(UserError, match="checksum"):
            checkpoints.latest()


def test_a_folder_without_checkpoints_is_not_an_error(tmp_path):
    assert CheckpointManager(tmp_path / "none", keep=1).latest() is None


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    checkpoints = CheckpointManager(tmp_path, keep=1)
    state = trained_state(1)
    checkpoints.save(state, {})
    advance(state, 1)

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("vitrail.atomic.os.fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        checkpoints.save(state, {})
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step_000000001.safetensors"]
    assert checkpoints.latest()[0].facts["step"] == 1
