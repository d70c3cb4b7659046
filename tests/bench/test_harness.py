"""The benchmark harness, on candidates of known speed with a simulated clock."""

from __future__ import annotations

import gc
import json
import time

import pytest
from rich.console import Console

from bench.harness import Candidate, Comparison, Effort, Spread, compare, order, plan, processor_clock, wall_clock
from bench.record import machine_facts, table, write_results

EFFORT = Effort(seconds=100.0, min_rounds=5, max_rounds=12, turn_seconds=0.0, warmup=2)


class Machine:
    """Simulated clock: time advances with the work done, multiplied by the load of other programs."""

    def __init__(self):
        self.now = 0.0
        self.load = 1.0
        self.done: list[str] = []

    def candidate(self, name: str, seconds: float) -> Candidate:
        def work() -> None:
            self.done.append(name)
            self.now += seconds * self.load

        return Candidate(name, work)

    def clock(self, work, repeats: int) -> float:
        start = self.now
        for _ in range(repeats):
            work()
        return self.now - start


@pytest.fixture(autouse=True)
def _few_objects():
    """Exclude imported objects from the garbage collection after every round."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def machine():
    return Machine()


def test_ratios_match_the_work(machine):
    speeds = {"ours": 1.0, "equal": 1.0, "double": 2.0, "half": 0.5}
    result = compare([machine.candidate(name, seconds) for name, seconds in speeds.items()], EFFORT, machine.clock)
    assert result.first == "ours"
    for name, seconds in speeds.items():
        assert result.ratio(name) == Spread(seconds, seconds, seconds)
    assert [result.verdict(name) for name in speeds] == ["even", "even", "ahead", "behind"]


def test_varying_load_cancels(machine):
    """Rounds with ten times the load would shift a mean of times, but not the ratios per round."""
    candidates = [machine.candidate("ours", 1.0), machine.candidate("other", 1.25)]

    def clock(work, repeats: int) -> float:
        turns = len(machine.done) // 2
        machine.load = 10.0 if turns % 3 == 0 else 1.0
        return machine.clock(work, repeats)

    result = compare(candidates, EFFORT, clock)
    assert len(set(result.seconds["ours"])) > 1
    assert result.ratio("other") == Spread(1.25, 1.25, 1.25)


def test_every_round_has_every_candidate_once_in_a_changing_order(machine):
    candidates = [machine.candidate(name, 1.0) for name in "abc"]
    compare(candidates, EFFORT, machine.clock)
    warm = 3 * (EFFORT.warmup + 1)
    assert machine.done[:warm] == ["a", "a", "b", "b", "c", "c", "a", "b", "c"]
    turns = "".join(machine.done[warm:])
    rounds = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert len(rounds) == EFFORT.max_rounds
    assert rounds[:6] == ["abc", "bca", "cab", "cba", "acb", "bac"]
    assert {"".join(c.name for c in order(candidates, number)) for number in range(6)} == set(rounds)


def test_plan_fits_the_time_limit():
    effort = Effort(seconds=10.0, min_rounds=5, max_rounds=60, turn_seconds=0.5)
    assert plan([0.1, 0.1], effort) == (5, 10)  # turns of 5 x 0.1 s, two candidates
    assert plan([4.0, 4.0], effort) == (1, 5)  # slow work still gets its rounds
    assert plan([0.0, 0.0], effort)[1] == 60  # a clock too coarse for one call is no error
    assert plan([1e-3, 1e-3], Effort(seconds=1e6, max_rounds=60)) == (50, 60)


def test_seconds_are_per_call(machine):
    effort = Effort(seconds=20.0, min_rounds=1, max_rounds=3, turn_seconds=4.0)
    result = compare([machine.candidate("ours", 1.0)], effort, machine.clock)
    assert result.seconds == {"ours": [1.0, 1.0, 1.0]}
    assert len(machine.done) == effort.warmup + 1 + 3 * 4


@pytest.mark.parametrize(
    ("wins", "losses", "verdict"),
    [
        (5, 0, "even"),
        (6, 0, "ahead"),
        (0, 6, "behind"),
        (6, 1, "even"),
        (9, 1, "ahead"),
        (1, 9, "behind"),
        (0, 0, "even"),
    ],
)
def test_verdict_needs_significance(wins, losses, verdict):
    other = [1.1] * wins + [0.9] * losses + [1.0] * (wins + losses == 0)
    assert Comparison({"ours": [1.0] * len(other), "other": other}).verdict("other") == verdict


def test_garbage_collection_is_off_while_timing(machine):
    seen = []
    compare([Candidate("ours", lambda: seen.append(gc.isenabled()))], EFFORT, machine.clock)
    assert seen
    assert not any(seen)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        compare([Candidate("broken", lambda: 1 / 0)], EFFORT, machine.clock)
    assert gc.isenabled()


@pytest.mark.parametrize(("clock", "now"), [(wall_clock, time.perf_counter), (processor_clock, time.process_time)])
def test_real_clocks_measure_the_work(clock, now):
    calls = []

    def work() -> None:
        start = now()
        while now() - start < 0.004:
            pass
        calls.append(now() - start)

    start = now()
    took = clock(work, 3)
    assert len(calls) == 3
    assert sum(calls) <= took <= now() - start


def test_processor_time_excludes_other_processes():
    assert wall_clock(lambda: time.sleep(0.05), 2) >= 0.1 > 2 * processor_clock(lambda: time.sleep(0.05), 2)


def test_table_and_json_agree(tmp_path):
    result = Comparison({"ours": [1.0, 1.0, 1.0], "other": [1.5, 1.5, 1.5]})
    console = Console(width=100, record=True, quiet=False, file=(tmp_path / "console.txt").open("w"))
    console.print(table("network", ["model", "batch"], [(["Ti/16", "8"], result)]))
    text = console.export_text()
    assert "Ti/16" in text
    assert "1.50 (1.50–1.50)" in text
    path = write_results(tmp_path / "results", "network-cpu", {"machine": machine_facts("cpu"), **result.summary()})
    kept = json.loads(path.read_text())
    assert path.name == "network-cpu.json"
    assert kept["rounds"] == 3
    assert kept["contestants"]["other"]["ratio"] == {"median": 1.5, "low": 1.5, "high": 1.5}
    assert kept["contestants"]["other"]["ours"] == "even"  # three rounds are too few
    assert {"date", "cpu", "cores", "threads", "python", "packages"} <= kept["machine"].keys()
    assert "torch" in kept["machine"]["packages"]


def test_missing_candidate_leaves_an_empty_cell():
    rows = [(["a"], Comparison({"ours": [1.0], "other": [2.0]})), (["b"], Comparison({"ours": [1.0]}))]
    result = table("t", ["case"], rows)
    assert [column.header for column in result.columns] == ["case", "other"]
    assert list(result.columns[1].cells)[1] == "-"
