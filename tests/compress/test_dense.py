from __future__ import annotations

import torch

from mpicomp.compress import NoCompression, Simulation


def test_the_mean_in_fp32_of_low_precision_gradients():
    grads = [{"w": torch.tensor([x], dtype=torch.bfloat16)} for x in (256.0, 1.0, 1.0, 2.0)]
    result = Simulation("none", grads[0], size=4).step(grads)
    assert result.means[3]["w"].item() == 65.0  # adding up in bf16 loses both ones: 64.5
    assert result.bytes_sent == [2] * 4


def test_memory_is_not_needed():
    assert NoCompression().init(None) == {}
    assert not NoCompression().capabilities.stateful


def test_complex_and_double_gradients_keep_their_precision():
    for value, dtype in ((1 + 2j, torch.complex64), (1 + 1e-12, torch.float64)):
        grads = [{"w": torch.full((3,), value, dtype=dtype)}] * 2
        result = Simulation("none", grads[0], size=2).step(grads)
        assert torch.equal(result.means[1]["w"], grads[0]["w"])
