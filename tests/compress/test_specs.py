from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress import (
    Feedback,
    NoCompression,
    PowerSGD,
    StartAfter,
    TopK,
    Values,
    Warmup,
    available,
    parse,
    spec_of,
)


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
        ("adacomp", "name must be one of .*, got 'adacomp'$"),
        ("topk:densty=0.1", "topk option must be one of density, .*, residual, got 'densty'; "
         "did you mean 'density'?"),
        ("none:rank=2", "none option must be one of warmup, .*, got 'rank'"),
        ("topk:warmup=0.5/x,warmup_steps=1", "warmup must be numbers with / between them, got"),
        ("topk:warmup=0.5,0.1,warmup_steps=1", "with / between them, as in 0.5/0.1, got '0.1'"),
        ("topk:warmup=0.5", "option must be warmup and warmup_steps together, got 'warmup'"),
        ("topk:warmup=0.5/2,warmup_steps=1", r"topk: density must be in \(0, 1\], got 2.0"),
        ("topk:warmup=0.5,warmup_steps=0", "warmup: steps must be an integer from 1 up, got 0"),
        ("powersgd:warmup=0.5,warmup_steps=1", "warmup: inner must have an option density, got"),
        ("powersgd:values=int8", "values: inner must gather values and indices, as topk"),
        ("topk:values=int3", "values: dtype must be fp16, bf16 or int8, got 'int3'"),
        ("topk:start_after=0", "start_after: steps must be an integer from 1 up, got 0"),
        ("topk:residual=fp8", "residual must be one of fp32, bf16, int8, got 'fp8'"),
        ("topk:decay=1.5", r"decay must be in \[0, 1\], got 1.5"),
        ("topk:low_pass=0", r"low_pass must be in \(0, 1\], got 0.0"),
        ("fp16:decay=0.5", "must be a biased compressor, got Float16"),
        ("topk:error_feedback=false,decay=0.5", "decay, low_pass and residual need error_feedback"),
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


def test_wrappers_stand_beside_the_method():
    spec = (
        "topk:density=0.001,warmup=0.25/0.0625,warmup_steps=40,values=int8,start_after=5,decay=0.9"
    )
    topk = Warmup(TopK(0.001), (0.25, 0.0625), 40)
    assert parse(spec) == Feedback(StartAfter(Values(topk, "int8"), 5), decay=0.9)
    assert spec_of(parse(spec)) == spec
    assert spec_of(Feedback(TopK(), residual="bf16")) == "topk:residual=bf16"
    assert parse("powersgd:start_after=10") == StartAfter(PowerSGD(), 10)


@pytest.mark.parametrize(
    "build",
    [
        Feedback,
        lambda inner: StartAfter(inner, 5),
        lambda inner: Values(inner, "int8"),
        lambda inner: Warmup(inner, (0.25,), 5),
    ],
)
@pytest.mark.parametrize("inner", ["topk", TopK])
def test_wrappers_go_around_compressors_only(build, inner):
    with pytest.raises(TypeError, match=r"inner must be a compressor, .*, got .*(topk|TopK)"):
        build(inner)


@pytest.mark.parametrize("compressor", [StartAfter(Feedback(TopK()), 5), Feedback(TopK())])
def test_what_no_spec_builds_has_none(compressor):
    with pytest.raises(ValueError, match="wrappers must be in the order that a spec gives them"):
        spec_of(compressor)


def test_an_unregistered_method_has_no_spec():
    class Own(NoCompression):
        pass

    with pytest.raises(ValueError, match="of a registered kind, got"):
        spec_of(Own())


@given(st.sampled_from(available()))
def test_every_method_has_a_spec(name):
    assert parse(spec_of(parse(name))) == parse(name)


PARTS = st.sampled_from(
    [*available(), ":", ",", "=", "/", " ", "density", "rank", "bits", "warmup", "values", "0", "1",
     "-1", "1e999", "nan", "0.5", "true", "none", "int8", "\0", "é", "["]
)  # fmt: skip


@given(st.text() | st.lists(PARTS).map("".join))
@settings(max_examples=1000)
def test_any_text_is_a_compressor_or_a_mistake_of_the_caller(text):
    try:
        compressor = parse(text)
    except (ValueError, TypeError):
        return
    assert parse(spec_of(compressor)) == compressor
