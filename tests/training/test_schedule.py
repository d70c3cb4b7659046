import math

import pytest

from vitrail.config import ScheduleConfig
from vitrail.training.schedule import learning_rate


def test_warm_up_starts_at_zero_and_reaches_the_base():
    config = ScheduleConfig(shape="cosine", warmup=10)
    assert learning_rate(0, 0.3, 100, config) == 0
    assert learning_rate(5, 0.3, 100, config) == pytest.approx(0.15)
    assert learning_rate(10, 0.3, 100, config) == pytest.approx(0.3)


def test_linear_decay_ends_where_the_paper_says():
    config = ScheduleConfig(shape="linear", warmup=10, end=1e-5)
    assert learning_rate(100, 0.3, 100, config) == pytest.approx(1e-5)
    assert learning_rate(55, 0.3, 100, config) == pytest.approx((0.3 + 1e-5) / 2)


@pytest.mark.parametrize("step", [10, 30, 55, 99, 100])
def test_cosine_decay_is_the_cosine(step):
    config = ScheduleConfig(shape="cosine", warmup=10)
    expected = 0.3 * 0.5 * (1 + math.cos(math.pi * (step - 10) / 90))
    assert learning_rate(step, 0.3, 100, config) == pytest.approx(expected)


def test_a_share_of_the_steps_can_be_warm_up():
    config = ScheduleConfig(shape="constant", warmup=0.25)
    assert learning_rate(10, 1.0, 80, config) == pytest.approx(0.5)
    assert learning_rate(20, 1.0, 80, config) == 1.0
    assert learning_rate(0, 1.0, 80, ScheduleConfig(shape="constant")) == 1.0
