from __future__ import annotations

import pytest
import torch

from mpicomp.compress import Simulation


def one_step(spec, *values, dtype=torch.float32, scale=1.0):
    grads = [{"w": torch.tensor([value], dtype=dtype)} for value in values]
    result = Simulation(spec, grads[0], size=len(values)).step(grads, scale=scale)
    return result.means[0]["w"], result


@pytest.mark.parametrize(("spec", "unit"), [("fp16", 2**-10), ("bf16", 2**-7)])
def test_two_bytes_an_element_and_the_precision_of_the_type(spec, unit):
    mean, result = one_step(spec, 1 + unit, 1 + unit / 4)
    # the second value rounds to 1; the mean 1 + unit / 2 is a tie and goes to the even number
    assert (mean.item(), mean.dtype, result.bytes_sent) == (1.0, torch.float32, [2, 2])


def test_the_mean_is_scaled_before_it_is_rounded():
    assert one_step("fp16", 40000.0, 40000.0)[0].item() == 40000.0  # the sum is out of range
    tiny = 2.0**-24  # the smallest number of fp16: half of it would round to zero
    assert one_step("fp16", tiny, tiny)[0].item() == tiny


def test_overflow_is_seen_by_the_caller():
    mean, result = one_step("fp16", 70000.0, 1.0)
    assert mean.isinf().all()
    assert not result.good
    assert one_step("bf16", 70000.0, 70000.0)[0].isfinite().all()


def test_16_bit_gradients_travel_as_they_are():
    mean, result = one_step("fp16", 1e30, 1e30, dtype=torch.bfloat16)
    assert mean.isfinite().all()
    assert result.bytes_sent == [2, 2]


def test_unscaled_before_it_is_cast():
    assert one_step("fp16", 2.0**20, 2.0**20, scale=2.0**16)[0].item() == 16.0
