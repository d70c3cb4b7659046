"""Several processes against one: the same steps within float tolerance, and bit-identical checkpoint parts."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests import ranks as processes
from vitrail.config import (
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from vitrail.distributed import SINGLE_PROCESS, Ranks, process_group
from vitrail.errors import UserError
from vitrail.models.build import build_model
from vitrail.tasks.classification import Classification
from vitrail.tasks.task import Batch
from vitrail.training.checkpoint import HEADER, CheckpointManager, digest
from vitrail.training.ema import EMA
from vitrail.training.optimizer import build_optimizer
from vitrail.training.parallel import choose_parallel, distribute, full_tensor
from vitrail.training.state import TrainState
from vitrail.training.step import TrainStep

CPU = torch.device("cpu")
# No size is a multiple of three and most are odd, so shards are uneven; some processes have no row of the head.
NET = ModelConfig(width=50, depth=2, mlp_dim=71, heads=2, patch=(8, 8), image_size=(16, 16), num_classes=3)
BATCH, STEPS = 12, 50
OPTIMIZERS = {
    "adamw": OptimizerConfig(name="adamw", lr=1e-3, weight_decay=0.1, clip_grad_norm=1.0),
    "sgd": OptimizerConfig(name="sgd", lr=0.05, weight_decay=1e-4, clip_grad_norm=1.0),
    "muon": OptimizerConfig(name="muon", lr=1e-3, weight_decay=0.1, clip_grad_norm=1.0),
}


def make(name, how, ranks, micro=0, objective=None):
    """The same network and training step in every process."""
    torch.manual_seed(1)
    net = build_model(NET)
    network = distribute(net, how, PrecisionConfig(), CPU)
    state = TrainState(net, build_optimizer(net, OPTIMIZERS[name]), EMA(net, 0.9), wrapped=network)
    objective = objective or Classification(ObjectiveConfig(), 3).loss
    config = RunConfig(
        optimizer=OPTIMIZERS[name],
        schedule=ScheduleConfig(shape="constant"),
        precision=PrecisionConfig(compute="fp32"),
        train=TrainConfig(micro_batch_size=micro),
    )
    return state, TrainStep(objective, config, CPU, ranks)


def batch(step, ranks):
    """This process's rows of the batch of a step, with mixed targets and image weights, some of them zero."""
    draw = torch.Generator().manual_seed(step)
    pixels = torch.randn(BATCH, 3, 16, 16, generator=draw)
    targets = torch.rand(BATCH, 3, generator=draw).softmax(-1)
    weights = torch.rand(BATCH, generator=draw).mul(2).where(torch.rand(BATCH, generator=draw) > 0.2, 0.0)
    if step == 3:
        weights[BATCH // 2 :] = 0  # the second of two processes has no weight
    part = BATCH // ranks.world_size
    return Batch(pixels, targets, weights).micro_batch(ranks.rank * part, (ranks.rank + 1) * part)


def go(state, update, ranks, steps=STEPS):
    """The loss of each step over all processes, and the final tensors of the state."""
    losses = []
    for _ in range(steps):
        done = update(state, batch(state.step, ranks))
        losses.append(ranks.all_reduce_sum(torch.stack([done.loss, done.weight])))
    sums = torch.stack(losses)
    return sums[:, 0] / sums[:, 1], {name: full_tensor(t).detach().clone() for name, t in state.tensors().items()}


def _together(how, cases):
    with process_group() as ranks:
        return [go(*make(name, how, ranks, micro), ranks) for name, micro in cases]


CASES = {  # optimizer and micro-batch size
    "ddp": [("adamw", 0), ("adamw", 4), ("sgd", 5), ("muon", 4)],
    "fsdp": [("adamw", 0), ("adamw", 4), ("sgd", 0)],
}


@pytest.mark.slow
@pytest.mark.parametrize("how", CASES)
def test_two_processes_train_like_one(tmp_path, how):
    """With micro-batches, clipping, EMA and image weights, for every optimizer."""
    cases = CASES[how]
    first, second = processes.start(2, tmp_path, _together, how, cases).results()
    for case, (losses, tensors), (_, theirs) in zip(cases, first, second, strict=True):
        expected, alone = go(*make(case[0], "none", SINGLE_PROCESS), SINGLE_PROCESS)
        torch.testing.assert_close(
            losses, expected, rtol=1e-3, atol=1e-4, msg=lambda text, case=case: f"{case}: {text}"
        )
        assert tensors.keys() == alone.keys()
        for name in tensors:
            assert torch.equal(tensors[name], theirs[name]), (case, name)  # all processes agree
            if name.startswith(("model/", "average/")):
                # The gradient of a key's bias is pure rounding error, which Adam scales up to full steps.
                within = 2e-3 if name.endswith("qkv.bias") else 5e-5
                torch.testing.assert_close(tensors[name], alone[name], rtol=0, atol=within, msg=f"{case} {name}")


def _save_sharded(folder):
    """Save a sharded checkpoint; return the full tensors."""
    with process_group() as ranks:
        state, update = make("adamw", "fsdp", ranks)
        _, tensors = go(state, update, ranks, 3)
        CheckpointManager(folder, 2, ranks).save(state, {"seconds": 1.0})
        return tensors


def _load(folder, how):
    """The full tensors of a process that resumes from the checkpoint."""
    with process_group() as ranks:
        state, _ = make("adamw", how, ranks)
        saved, damaged = CheckpointManager(folder, 2, ranks).latest()
        assert not damaged
        state.load(saved.tensor_parts.keys(), saved.read, saved.facts)
        assert state.step == 3
        return {name: full_tensor(tensor).detach().clone() for name, tensor in state.tensors().items()}


@pytest.mark.slow
def test_uneven_parts_of_three_processes_load_bit_identically(tmp_path):
    folder = tmp_path / "checkpoints"
    tensors = processes.start(3, tmp_path, _save_sharded, folder).results()[0]
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"step_000000003.part_{number}_of_3.safetensors" for number in (1, 2, 3)]
    saved, damaged = CheckpointManager(folder, 2).latest()
    assert not damaged and saved.tensor_parts.keys() == tensors.keys() and saved.facts["seconds"] == 1.0
    for name, tensor in tensors.items():
        assert torch.equal(saved.read(name), tensor), name
        for rows in [(0, len(tensor)), (1, len(tensor) - 1), (len(tensor) // 2, len(tensor))] if tensor.ndim else []:
            assert torch.equal(saved.read(name, rows), tensor[slice(*rows)]), (name, rows)
    for world, how in ((1, "none"), (2, "fsdp"), (2, "ddp")):
        for loaded in processes.start(world, tmp_path, _load, folder, how).results():
            assert loaded.keys() == tensors.keys()
            assert all(torch.equal(loaded[name], tensors[name]) for name in tensors), (world, how)
    _change_save_id(folder / "step_000000003.part_2_of_3.safetensors")
    with pytest.raises(UserError, match=r"step_000000003.*different saves"):
        CheckpointManager(folder, 2).latest()


def _change_save_id(path):
    """Make an undamaged part of another save of the same step, as if its process was killed before the others saved."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()[HEADER])
    facts["save"] = "another"
    facts["digest"] = digest(tensors, facts)
    save_file(tensors, path, metadata={HEADER: json.dumps(facts)})


def test_a_checkpoint_with_a_missing_part_is_ignored(tmp_path):
    folder = tmp_path / "checkpoints"
    state, _ = make("sgd", "none", SINGLE_PROCESS)
    CheckpointManager(folder, 2).save(state, {})
    for part in (1, 3):
        (folder / f"step_000000003.part_{part}_of_3.safetensors").write_bytes(b"whatever")
    assert [step for step, _ in CheckpointManager(folder, 2).steps()] == [0]
    saved, damaged = CheckpointManager(folder, 2).latest()
    assert saved.facts["step"] == 0 and not damaged
    (folder / ".step_000000002.safetensors.0123abcd.partial").write_bytes(b"of a killed process")
    state.step = 4
    CheckpointManager(folder, 2).save(state, {})
    assert sorted(path.name for path in folder.iterdir()) == [f"step_00000000{step}.safetensors" for step in (0, 4)]


def _poisoned(how):
    """One process gets a NaN batch at step 2. Returns all tensors before it, after it, and one step later."""
    with process_group() as ranks:
        state, update = make("adamw", how, ranks)
        go(state, update, ranks, 2)
        snapshots = [{name: full_tensor(tensor).detach().clone() for name, tensor in state.tensors().items()}]
        bad = batch(2, ranks)
        if ranks.rank == 1:
            bad.pixels[0, 0, 0, 0] = torch.nan
        done = update(state, bad)
        assert not done.finite and int(state.nonfinite_steps) == 1 and state.step == 3
        snapshots.append({name: full_tensor(tensor).detach().clone() for name, tensor in state.tensors().items()})
        go(state, update, ranks, 1)
        assert int(state.nonfinite_steps) == 0
        return [*snapshots, {name: full_tensor(tensor).detach().clone() for name, tensor in state.tensors().items()}]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_nan_in_one_process_changes_the_weights_of_none(tmp_path, how):
    for before, after, later in processes.start(2, tmp_path, _poisoned, how).results():
        for name in before:
            if not name.startswith("average/"):
                assert torch.equal(before[name], after[name]), name
        assert all(tensor.isfinite().all() for tensor in later.values())
        assert any(not torch.equal(after[name], later[name]) for name in after if name.startswith("model/"))


def _refused():
    with process_group() as ranks:
        try:
            make("muon", "fsdp", ranks)
            state, update = make("muon", "fsdp", ranks)
            go(state, update, ranks, 1)
        except UserError as error:
            return str(error)
        return ""


@pytest.mark.slow
def test_muon_needs_whole_matrices(tmp_path):
    messages = processes.start(2, tmp_path, _refused).results()
    assert all("train.parallel=ddp" in message for message in messages), messages


def _broadcast_errors(folder):
    """What each process gets when the first process fails in a broadcast."""
    with process_group() as ranks:
        assert ranks.broadcast(lambda: dist.get_rank()) == 0
        assert ranks.all_reduce_max(ranks.rank, -ranks.rank) == (ranks.world_size - 1, 0)
        assert ranks.all_gather(ranks.rank) == list(range(ranks.world_size))
        errors = []
        for error in (UserError("no such folder"), ValueError("a mistake")):
            try:
                ranks.broadcast(lambda error=error: (_ for _ in ()).throw(error))
            except (UserError, ValueError, RuntimeError) as caught:
                errors.append((type(caught).__name__, str(caught), bool(getattr(caught, "reported", False))))
        return errors


@pytest.mark.slow
def test_an_error_of_the_first_process_is_raised_in_all(tmp_path):
    first, second = processes.start(2, tmp_path, _broadcast_errors, tmp_path).results()
    assert first == [("UserError", "no such folder", False), ("ValueError", "a mistake", False)]
    assert second == [
        ("UserError", "no such folder", True),
        ("RuntimeError", "the first process failed: ValueError('a mistake')", True),
    ]


def test_choose_parallel():
    two = Ranks(0, 2)
    net, fsdp = build_model(NET), TrainConfig(parallel="fsdp")
    assert choose_parallel(net, fsdp, SINGLE_PROCESS, CPU) == "none"
    assert choose_parallel(net, TrainConfig(), two, CPU) == "ddp"
    assert choose_parallel(net, fsdp, two, CPU) == "fsdp"


def test_invalid_environment_variables_are_a_user_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UserError, match="must be numbers"), process_group():
        pass
