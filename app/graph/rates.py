"""When nodes of the ticking region run."""


def runs_on(tick: int, every: int, total: int, *, baseline: bool = False) -> bool:
    """Whether a ticking node with the widget `every` runs at a tick of a run of `total` ticks.

    It runs on tick 1, on multiples of `every` and on the last tick. With `baseline` it runs at tick 0, the state before
    training, and then tick 1 is no exception any more: a value from before it exists already.
    """
    if tick == 0:
        return baseline
    return tick % every == 0 or tick == total or (tick == 1 and not baseline)
