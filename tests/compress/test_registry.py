from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomp.compress import (
    Capabilities,
    Compressor,
    Feedback,
    NoCompression,
    PowerSGD,
    TopK,
    available,
    parse,
    register,
    spec_of,
)


def test_available_is_sorted():
    assert available() == sorted(available())
    assert {"none", "fp16", "bf16", "topk", "powersgd"} <= set(available())


def test_values_take_the_types_of_the_fields():
    assert parse("none") == NoCompression()
    assert parse("topk") == TopK(density=0.01, error_feedback=True)
    assert parse(" topk : density = 1e-3 , error_feedback = FALSE ") == TopK(0.001, False)
    powersgd = parse("powersgd:rank=4,seed=-7,warm_start=false")
    assert powersgd == PowerSGD(rank=4, seed=-7, warm_start=False)
    assert type(powersgd.rank) is int


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topkk", "name must be one of .*, bf16, .*, got 'topkk'; did you mean 'topk'?"),
        ("PowerSGD", "did you mean 'powersgd'?"),
        ("", "name must be one of .*, got ''$"),
        ("topk:densty=0.1", "topk option must be one of density, error_feedback, union, got "
         "'densty'; did you mean 'density'?"),
        ("none:rank=2", "none option must be absent, there are none, got 'rank'"),
        ("topk:", "topk option must be one of .*, got ''"),
        ("topk:density", "topk option must be density=<value>, once, got 'density'"),
        ("topk:density=1,density=1", "must be density=<value>, once"),
        ("topk:density=a", "topk density must be a number, got 'a'"),
        ("powersgd:rank=1.5", "powersgd rank must be an integer, got '1.5'"),
        ("topk:error_feedback=ture", "must be true or false, got 'ture'; did you mean 'true'?"),
        ("topk:density=0", r"topk: density must be in \(0, 1\], got 0.0"),
        ("topk:density=nan", r"density must be in \(0, 1\], got nan"),
        ("powersgd:rank=0", "powersgd: rank must be an integer from 1 up, got 0"),
    ],
)  # fmt: skip
def test_mistakes_are_named(spec, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        parse(spec)


compressors = st.one_of(
    st.sampled_from(["none", "fp16", "bf16"]).map(parse),
    st.builds(TopK, st.floats(0, 1, exclude_min=True), st.booleans()),
    st.builds(PowerSGD, st.integers(1, 10**6), st.booleans(), st.integers(), st.booleans()),
)


@given(compressors)
def test_a_spec_says_all_there_is_to_say(compressor):
    spec = spec_of(compressor)
    again = parse(spec)
    assert again == compressor
    assert hash(again) == hash(compressor)
    assert spec_of(again) == spec


def test_specs_are_short():
    assert spec_of(TopK()) == "topk"
    assert spec_of(TopK(0.001, error_feedback=False)) == "topk:density=0.001,error_feedback=false"


def test_a_wrapper_has_no_spec():
    with pytest.raises(ValueError, match="of a registered kind, got Feedback"):
        spec_of(Feedback(TopK()))


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
