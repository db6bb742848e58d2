import pytest
import torch

from jagg.errors import JaggError
from jagg.schedule import check_schedule, sigma_schedule


def test_ten_steps_with_shift_three():
    expected = [1, 0.9643, 0.9231, 0.8750, 0.8182, 0.7500, 0.6667, 0.5625, 0.4286, 0.2500, 0]
    assert sigma_schedule(10, shift=3.0).tolist() == pytest.approx(expected, abs=5e-5)


def test_no_shift_is_evenly_spaced():
    assert sigma_schedule(4, shift=1.0).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, 7.3])
def test_ends_are_exact_and_dtype_is_float32(shift):
    sigmas = sigma_schedule(7, shift=shift)
    assert sigmas.dtype == torch.float32
    assert sigmas.shape == (8,)
    assert sigmas[0] == 1
    assert sigmas[-1] == 0


@pytest.mark.parametrize(
    ("steps", "shift", "name"), [(0, 1.0, "steps"), (4, 0.0, "shift"), (4, float("nan"), "shift")]
)
def test_bad_arguments_are_named(steps, shift, name):
    with pytest.raises(JaggError, match=name):
        sigma_schedule(steps, shift=shift)


@pytest.mark.parametrize("levels", [[1.0], [1.0, 1.0, 0.0], [0.9, 0.0], [1.0, 0.1]])
def test_check_refuses_levels_that_do_not_fall_from_one_to_zero(levels):
    with pytest.raises(JaggError, match="fall strictly from 1 to 0"):
        check_schedule(torch.tensor(levels), where="Sampler")
