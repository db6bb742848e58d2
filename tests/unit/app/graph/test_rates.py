import pytest

from app.graph import runs_on


@pytest.mark.parametrize(
    ("every", "total", "baseline", "ticks"),
    [
        (1, 3, False, [1, 2, 3]),
        (1, 3, True, [0, 1, 2, 3]),
        (4, 10, False, [1, 4, 8, 10]),
        (4, 10, True, [0, 4, 8, 10]),
        (50, 10, False, [1, 10]),
        (50, 10, True, [0, 10]),
        (5, 1, True, [0, 1]),
    ],
)
def test_runs_on_tick_1_multiples_and_the_last_tick(every, total, baseline, ticks):
    assert [t for t in range(total + 1) if runs_on(t, every, total, baseline=baseline)] == ticks
