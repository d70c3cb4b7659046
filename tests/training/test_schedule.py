import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.config import ScheduleConfig
from vitrail.training.schedule import learning_rate

SHAPES = ["cosine", "linear", "rsqrt", "staircase", "constant"]


def test_warm_up_starts_at_zero_and_reaches_the_base():
    config = ScheduleConfig(shape="cosine", warmup=10)
    assert learning_rate(0, 0.3, 100, config) == 0
    assert learning_rate(5, 0.3, 100, config) == pytest.approx(0.15)
    assert learning_rate(10, 0.3, 100, config) == pytest.approx(0.3)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_a_linear_warm_up(shape):
    config = ScheduleConfig(shape=shape, warmup=10, end_lr=1e-5)
    assert [learning_rate(step, 0.3, 100, config) for step in (0, 3, 10)] == [0, pytest.approx(0.09), 0.3]


def test_linear_decay_ends_where_the_paper_says():
    config = ScheduleConfig(shape="linear", warmup=10, end_lr=1e-5)
    assert learning_rate(100, 0.3, 100, config) == pytest.approx(1e-5)
    assert learning_rate(55, 0.3, 100, config) == pytest.approx((0.3 + 1e-5) / 2)


@pytest.mark.parametrize("step", [10, 30, 55, 99, 100])
def test_cosine_decay_is_the_cosine(step):
    config = ScheduleConfig(shape="cosine", warmup=10)
    expected = 0.3 * 0.5 * (1 + math.cos(math.pi * (step - 10) / 90))
    assert learning_rate(step, 0.3, 100, config) == pytest.approx(expected)
    assert learning_rate(100, 0.3, 100, config) == 0


def test_warm_up_can_be_a_fraction_of_the_steps():
    config = ScheduleConfig(shape="constant", warmup=0.25)
    assert learning_rate(10, 1.0, 80, config) == pytest.approx(0.5)
    assert learning_rate(20, 1.0, 80, config) == 1.0
    assert learning_rate(0, 1.0, 80, ScheduleConfig(shape="constant")) == 1.0


def test_warm_up_can_start_above_zero():
    """DeiT's: from 1e-6, in a line, to the base."""
    config = ScheduleConfig(shape="cosine", warmup=5, warmup_start_lr=1e-6)
    found = [learning_rate(step, 1e-3, 300, config) for step in range(6)]
    assert found == pytest.approx([1e-6 + (1e-3 - 1e-6) * step / 5 for step in range(6)])
    assert learning_rate(300, 1e-3, 300, config) == 0


def test_the_square_root_falls_by_its_timescale():
    config = ScheduleConfig(shape="rsqrt", warmup=100, timescale=50)
    assert learning_rate(50, 0.8, 1000, config) == pytest.approx(0.4)
    assert learning_rate(100, 0.8, 1000, config) == 0.8
    assert learning_rate(150, 0.8, 1000, config) == pytest.approx(0.8 / math.sqrt(2))
    assert learning_rate(1000, 0.8, 1000, config) == pytest.approx(0.8 / math.sqrt(19))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cooldown", [20, 0.2])
def test_every_shape_can_have_a_linear_cool_down(shape, cooldown):
    plain = ScheduleConfig(shape=shape, warmup=10, end_lr=0.1)
    config = plain.model_copy(update={"cooldown": cooldown})
    for step in range(101):
        factor = 1.0 if step <= 80 else (100 - step) / 20
        assert learning_rate(step, 0.3, 100, config) == pytest.approx(factor * learning_rate(step, 0.3, 100, plain))
    assert learning_rate(100, 0.3, 100, config) == 0


@pytest.mark.parametrize(
    ("supports", "drops"),
    [
        ((100, 200, 300, 400, 500), (0.4, 0.6, 0.8)),
        ((500, 3000, 6000, 9000, 10_000), (0.3, 0.6, 0.9)),
        ((500, 6000, 12_000, 18_000, 20_000), (0.3, 0.6, 0.9)),
    ],
)
def test_the_staircase_matches_bit(supports, drops):
    """Its rule in words: warm up until the first of these steps; a tenth after each of the next three; stop at the
    last. The step with the number of a drop still has the rate of before."""
    warmup, first, second, third, total = supports
    config = ScheduleConfig(shape="staircase", warmup=warmup, milestones=drops)

    def rate(step):
        return learning_rate(step, 0.003, total, config)

    assert rate(warmup // 2) == pytest.approx(0.0015)
    assert rate(warmup) == rate(first) == 0.003
    assert rate(first + 1) == rate(second) == pytest.approx(3e-4)
    assert rate(second + 1) == rate(third) == pytest.approx(3e-5)
    assert rate(third + 1) == rate(total - 1) == pytest.approx(3e-6)


@pytest.mark.parametrize("percent", range(1, 100))
def test_milestones_that_are_not_binary_fractions_drop_at_the_right_step(percent):
    config = ScheduleConfig(shape="staircase", milestones=(percent / 100,))
    assert learning_rate(percent, 1.0, 100, config) == 1
    assert learning_rate(percent + 1, 1.0, 100, config) == 0.1


lengths = st.one_of(st.integers(0, 3000), st.floats(0, 1, exclude_max=True))


@given(
    shape=st.sampled_from(SHAPES),
    total=st.integers(1, 1000),
    base=st.floats(1e-6, 10),
    warmup=lengths,
    cooldown=lengths,
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    timescale=st.integers(1, 20_000),
    data=st.data(),
)
def test_the_rate_is_never_below_zero_or_above_the_base(shape, total, base, warmup, cooldown, shares, timescale, data):
    """Also where warm-up or cool-down take longer than the run, and after its end."""
    config = ScheduleConfig(
        shape=shape,
        warmup=warmup,
        cooldown=cooldown,
        timescale=timescale,
        warmup_start_lr=shares[0] * base,
        end_lr=shares[1] * base,
    )
    step = data.draw(st.integers(0, total + 5))
    assert 0 <= learning_rate(step, base, total, config) <= base * (1 + 1e-12)
