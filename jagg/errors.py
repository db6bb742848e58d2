"""Errors of the algorithm library; every message says where, what, expected and got, and what to do."""


class JaggError(ValueError):
    """Base of the errors that this library raises for bad input."""


class ShapeError(JaggError):
    """A tensor has another shape than its place requires."""


class StaleRolloutError(JaggError):
    """A rollout, reward or retained graph belongs to other weights or another rollout than the one in use."""


class NonFiniteError(JaggError):
    """A value that training depends on is NaN or infinite where it must not be."""


class ParityError(JaggError):
    """Rollout and training forward disagree by more than the parity gate allows."""
