from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from mpicomp.compress import Capabilities, Compressor, NoCompression, TopK, available, register


def test_available_is_sorted():
    assert available() == sorted(available())
    assert {"none", "fp16", "bf16", "topk", "powersgd"} <= set(available())


def test_names_are_taken_once():
    with pytest.raises(ValueError, match="name must be new, got 'topk'"):
        register("topk")(TopK)


def test_options_need_a_default_and_a_plain_type():
    @dataclass(frozen=True)
    class Odd(Compressor):
        layers: tuple[int, ...] = ()

        capabilities: ClassVar[Capabilities] = NoCompression.capabilities

        def exchange(self, bucket, state):
            raise NotImplementedError

    with pytest.raises(TypeError, match=r"odd\.layers must have a default and be a bool"):
        register("odd")(Odd)
    assert "odd" not in available()
