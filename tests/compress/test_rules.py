from __future__ import annotations

import pytest
import torch

from mpicomp.compress import Feedback, Float16, NoCompression, PowerSGD, TopK, assign, resolve

MODEL = [
    ("embed.weight", (100, 16), torch.float32),
    ("fc.weight", (64, 32), torch.float32),
    ("fc.bias", (64,), torch.float32),
]


@pytest.mark.parametrize("nothing", [None, "none", NoCompression()])
def test_no_compression(nothing):
    assert assign(nothing, MODEL) == {name: NoCompression() for name, _, _ in MODEL}
    assert assign(nothing, []) == {}


@pytest.mark.parametrize("topk", ["topk:density=0.1", TopK(0.1), Feedback(TopK(0.1))])
def test_one_method_for_all_it_helps(topk):
    assert assign(topk, MODEL) == {
        "embed.weight": Feedback(TopK(0.1)),
        "fc.weight": Feedback(TopK(0.1)),
        "fc.bias": NoCompression(),
    }


def test_the_first_match_wins():
    rules = {"embed*": None, "*.bias": "fp16", "*": PowerSGD(rank=3, error_feedback=False)}
    assert assign(rules, MODEL) == {
        "embed.weight": NoCompression(),
        "fc.weight": PowerSGD(rank=3, error_feedback=False),
        "fc.bias": Float16(),
    }


def test_equal_settings_share_a_bucket():
    chosen = assign({"embed*": "topk", "*": TopK()}, MODEL)
    assert len({chosen["embed.weight"], chosen["fc.weight"]}) == 1


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_only_real_floating_point_numbers_are_compressed(dtype):
    assert assign("fp16", [("w", (64, 64), dtype)]) == {"w": NoCompression()}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"embd*": "none", "*": "topk"}, "must match a parameter, got 'embd\\*'; .*'embed.weight'"),
        ({"embed*": "none"}, "must match a pattern, got 'fc.weight'; add a last pattern '\\*'"),
        ({}, "must match a pattern, got 'embed.weight'"),
        ({"*": "topk", "embed*": "none"}, "before '\\*', got 'embed\\*' after it"),
        ({"*": "topk:k=3"}, "topk option must be one of"),
    ],
)
def test_mistakes_in_rules_are_named(rules, message):
    with pytest.raises(ValueError, match=message):
        assign(rules, MODEL)


@pytest.mark.parametrize("odd", [3, TopK, {"*": 3}])
def test_other_types_are_refused(odd):
    with pytest.raises(TypeError, match="argument must be None, a spec string"):
        resolve(odd)


def test_a_model_without_parameters_is_legal():
    assert assign({"embed*": "none", "*": "topk"}, []) == {}


@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        (TopK(error_feedback="false"), r"TopK\.error_feedback must be true or false, got 'false'"),
        (Feedback(PowerSGD(warm_start=1)), r"PowerSGD\.warm_start must be true or false, got 1"),
        (PowerSGD(seed="a"), r"PowerSGD\.seed must be an integer, got 'a'"),
    ],
)
def test_options_of_the_wrong_type_are_named(compressor, message):
    with pytest.raises(TypeError, match=message):
        resolve(compressor)
    assert resolve(TopK(density=1))  # an integer is a number
