"""The laws every compressor keeps, for every registered name; a newcomer adds a row to CASES."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor

from mpicomp.compress import (
    Bucket,
    Feedback,
    Message,
    Simulation,
    available,
    bucket_of,
    parse,
    simulate,
    with_feedback,
)
from mpicomp.compress.base import PRIVATE_SLOTS

CASES = {
    "none": ["none"],
    "fp16": ["fp16"],
    "bf16": ["bf16"],
    # sketching
    "sketch": [
        "sketch:density=0.02,rows=3",
        "sketch:density=0.05,rows=1,candidates=1,momentum=0",
        "sketch:density=0.02,rows=3,warmup=1/0.05,warmup_steps=1",
        "sketch",  # too small a bucket to pay
    ],
    "fetchsgd": [
        "fetchsgd:density=0.02,rows=3",
        "fetchsgd:density=0.1,rows=1,width=0.3,momentum=0",
        "fetchsgd:density=0.02,rows=3,warmup=0.5/0.1,warmup_steps=1",
    ],
    # low rank
    "powersgd": [
        "powersgd:rank=1",
        "powersgd:rank=2",
        "powersgd:rank=2,warm_start=false",
        "powersgd:rank=3,error_feedback=false",
        "powersgd:local_residual=true,min_compression_rate=0",
        "powersgd:rank=1,iterations=2",
    ],
    "acpsgd": [
        "acpsgd",
        "acpsgd:rank=1,min_compression_rate=0",
        "acpsgd:rank=2,error_feedback=false",
    ],
    # local selection
    "dgc": [
        "dgc:density=0.05",
        "dgc:density=0.1,momentum=0.5,nesterov=true,clip=1.0",
        "dgc:density=0.6",
        "dgc:density=0.1,momentum=0.0,values=int8",
        "dgc:density=0.1,values=int8,warmup=0.4/0.2,warmup_steps=1",
    ],
    "gtopk": [
        "gtopk:density=0.1",
        "gtopk:density=0.1,complete=false",
        "gtopk:density=0.2,error_feedback=false",
        "gtopk:density=0.6",
    ],
    "topk": [
        "topk:density=0.1",
        "topk:density=0.1,error_feedback=false",
        "topk:density=0.6",
        "topk:density=0.1,union=true",
        "topk:density=0.1,values=int8",
        "topk:density=0.1,warmup=0.4/0.2,warmup_steps=1,decay=0.5",
        "topk:density=0.1,residual=bf16,low_pass=0.5",
        "topk:density=0.1,start_after=2,residual=int8",
    ],
    "threshold": [
        "threshold:density=0.1",
        "threshold:density=0.1,value=1.5,error_feedback=false",
        "threshold:density=0.05,value=1e-6,headroom=1.5",
    ],
    "randomk": [
        "randomk:density=0.1",
        "randomk:density=0.4,seed=7",
        "randomk:density=0.1,error_feedback=false",
        "randomk:density=0.1,error_feedback=false,rescale=true",
    ],
    "gaussiank": [
        "gaussiank:density=0.1",
        "gaussiank:density=0.05,error_feedback=false,corrections=0",
        "gaussiank:density=0.1,values=int8",
    ],
    "sidco": [
        "sidco:density=0.1,values=fp16",
        "sidco:density=0.05,fit=gamma,error_feedback=false",
        "sidco:density=0.05,fit=pareto,max_stages=2,values=bf16",
    ],
    # selection without build-up
    "cltk": [
        "cltk:density=0.1",
        "cltk:density=0.1,error_feedback=false",
        "cltk:density=0.1,low_pass=0.3,start_after=1",
    ],
    "deft": [
        "deft:density=0.1",
        "deft:density=0.1,warmup=0.4/0.2,warmup_steps=1",
        "deft:density=0.3,error_feedback=false",
    ],
    "oktopk": [
        "oktopk:density=0.1",
        "oktopk:density=0.1,error_feedback=false",
        "oktopk:density=0.05,reselect=1,repartition=2",
        "oktopk:density=0.6",
    ],
    "micro": [
        "micro:density=0.1",
        "micro:density=0.1,error_feedback=false,initial=paper",
        "micro:density=0.1,adapt=false,symmetric=false",
    ],
    "exdyna": [
        "exdyna:density=0.1",
        "exdyna:density=0.1,error_feedback=false,initial=paper",
        "exdyna:density=0.1,adapt=false,symmetric=false",
    ],
    # quantisation
    "natural": ["natural", "natural:seed=7"],
    "qsgd": ["qsgd", "qsgd:bits=2,block=64", "qsgd:bits=8,block=100,norm=max"],
    "terngrad": ["terngrad", "terngrad:clip=0"],
    "thc": ["thc", "thc:bits=8,block=64", "thc:bits=2,block=16,seed=3"],
    "int8": ["int8", "int8:block=16,error_feedback=false", "int8:stochastic=true"],
    "int4": ["int4", "int4:block=7", "int4:block=24,stochastic=true"],
    "signsgd": ["signsgd", "signsgd:scale=one,per=row"],
    "efsign": ["efsign", "efsign:per=row", "efsign:error_feedback=false"],
    "onebit": ["onebit", "onebit:per=parameter"],
}
EXACT = [
    "none",
    "sketch:density=1",
    "fetchsgd:width=1",
    "dgc:density=1",
    "gtopk:density=1",
    "oktopk:density=1",
    "topk:density=1",
    "powersgd:rank=1000",
    "powersgd:rank=1000,iterations=2",
    "gaussiank:density=1",
    "randomk:density=1",
    "sidco:density=1",
    "threshold:density=1",
    "cltk:density=1",
    "deft:density=1",
    "exdyna:density=1",
    "micro:density=1",
]
SPECS = list(itertools.chain(*CASES.values()))
SIZES = [1, 2, 3, 5]
LAYOUTS = {
    "matrix": {"w": torch.empty(24, 16)},
    "conv": {"w": torch.empty(8, 6, 3, 3).to(memory_format=torch.channels_last)},
    "transposed": {"w": torch.empty(16, 24).T, "v": torch.empty(6, 5, 4).transpose(0, 1)},
    "tiny": {"a": torch.empty(1, 1), "b": torch.empty(2, 2), "c": torch.empty(1, 9)},
    "empty": {"e": torch.empty(0, 5), "f": torch.empty(4, 0), "g": torch.empty(0)},
    "scalar": {"s": torch.empty(())},
    "nothing": {},
}
LAYOUTS["mixed"] = {f"{k}.{n}": t for k, params in LAYOUTS.items() for n, t in params.items()}
MATRICES = ["matrix", "conv", "transposed"]


def gradients(params: dict[str, Tensor], size: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {n: torch.randn(p.shape, generator=generator).to(p.dtype) for n, p in params.items()}
        for _ in range(size)
    ]


def typed(layout: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: param.to(dtype) for name, param in LAYOUTS[layout].items()}


def averaged(dicts: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([d[name].double() for d in dicts]).mean(0)


def decoded(decoded, bucket: Bucket) -> Bucket:
    out = bucket.like()
    decoded.store_(out)
    return out


def memory(simulation: Simulation) -> list[Tensor]:
    states = [state for group in simulation.groups for state in group.states]
    slots = [slot for state in states for slot in state.values()]
    return [tensor.clone() for slot in slots for tensor in slot.values()]


def loaded(spec: str, layout: str, size: int, dtype: torch.dtype, fill=None):
    """Compressor, buckets and states of one bucket that holds everything, past the rules."""
    compressor = parse(spec)
    params = typed(layout, dtype)
    dtype = compressor.bucket_dtype(dtype)
    buckets = [bucket_of(params, dtype, rank=rank, size=size) for rank in range(size)]
    states = [compressor.init(bucket) for bucket in buckets]
    for bucket, grads in zip(buckets, gradients(params, size, 0), strict=True):
        for name, view in bucket.items():
            view.copy_(grads[name] if fill is None else fill(grads[name]))
    return compressor, buckets, states


def capabilities(spec: str):
    return with_feedback(parse(spec)).capabilities


def fed_back(spec: str) -> bool:
    return isinstance(with_feedback(parse(spec)), Feedback)


def test_every_registered_name_has_a_row():
    assert sorted(CASES) == available()
    assert all(spec.split(":")[0] == name for name, specs in CASES.items() for spec in specs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", SPECS)
def test_law_1_ranks_agree_bit_for_bit(spec, layout, size):
    simulation = Simulation(spec, LAYOUTS[layout], size=size)
    for step in range(3):
        means = simulation.step(gradients(LAYOUTS[layout], size, step)).means
        for name, first in means[0].items():
            assert first.isfinite().all()
            assert all(torch.equal(first, mean[name]) for mean in means)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", MATRICES)
@pytest.mark.parametrize("spec", [s for s in SPECS if capabilities(s).mean_of_sent])
def test_law_2_the_mean_is_the_mean_of_what_was_sent(spec, layout, size):
    compressor, buckets, states = loaded(spec, layout, size, torch.float64)
    before = [bucket.flat.clone() for bucket in buckets]
    outcomes = simulate(compressor, buckets, states)
    sent = torch.stack([decoded(o.sent, b).flat for o, b in zip(outcomes, buckets, strict=True)])
    mean = decoded(outcomes[0].mean, buckets[0]).flat
    torch.testing.assert_close(sent.mean(0), mean, rtol=1e-12, atol=1e-12)
    for row, outcome, bucket, flat in zip(sent, outcomes, buckets, before, strict=True):
        if compressor.capabilities.biased:
            assert torch.equal(bucket.flat, flat)  # feedback reads it again
        rest = bucket.like()
        rest.flat.copy_(flat)
        outcome.sent.subtract_(rest)
        torch.testing.assert_close(rest.flat, flat - row, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [s for s in SPECS if fed_back(s) and capabilities(s).conserves])
def test_law_3_feedback_loses_nothing(spec, dtype, size):
    params = typed("mixed", dtype)
    simulation = Simulation(spec, params, size=size)
    means, given = [], []
    for step, scale in enumerate([1.0, 65536.0, 128.0, 128.0]):
        grads = gradients(params, size, step)
        given += grads
        scaled = [{n: g * scale for n, g in rank.items()} for rank in grads]
        means.append(simulation.step(scaled, scale=scale).means[0])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}[dtype]
    for group in simulation.groups:
        assert ("residual" in group.states[0]) == isinstance(group.compressor, Feedback)
        if not isinstance(group.compressor, Feedback):
            continue  # vectors, and what the method does not help
        for name in group.buckets[0]:
            total = 4 * averaged(means, name) + averaged(
                [state["residual"] for state in group.states], name
            )
            torch.testing.assert_close(
                total, 4 * averaged(given, name), rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_ranks_share_all_memory_but_what_is_private(spec, size):
    params = LAYOUTS["mixed"]
    simulation = Simulation(spec, params, size=size)
    for step in range(3):
        simulation.step(gradients(params, size, step))
    for group in simulation.groups:
        for slot in group.states[0].keys() - PRIVATE_SLOTS:
            for name, first in group.states[0][slot].items():
                assert all(torch.equal(first, state[slot][name]) for state in group.states)
        for state in group.states:
            assert all(slot.keys() <= set(params) for slot in state.values())


@pytest.mark.parametrize("spec", SPECS)
def test_settings_say_what_happens(spec):
    """A method with memory says so, and rounds are as declared."""
    compressor, buckets, states = loaded(spec, "matrix", 3, torch.float32)
    assert bool(states[0]) == compressor.capabilities.stateful
    rounds = []
    for _ in range(3):
        messages: list[Message] = []
        outcomes = simulate(compressor, buckets, states, tap=lambda r, m: messages.append(m))  # noqa: B023
        for outcome in outcomes:
            outcome.commit(frozenset())
        rounds.append(len(messages) / 3)
    declared = compressor.capabilities.rounds
    assert declared is None or max(rounds[1:]) <= declared


@pytest.mark.parametrize("spec", SPECS)
def test_law_4_messages_do_not_depend_on_values(spec):
    params = LAYOUTS["mixed"]

    def messages(*changes) -> list[tuple[object, ...]]:
        """What is sent until a step is bad, after which all is as it was before that step."""
        seen: list[tuple[object, ...]] = []

        def tap(rank: int, message: Message) -> None:
            seen.append((rank, type(message), [(t.dtype, t.dim()) for t in message.tensors]))

        simulation = Simulation(spec, params, size=3, tap=tap)
        for step, change in enumerate(changes):
            grads = gradients(params, 3, step)
            result = simulation.step([{n: change(g) for n, g in rank.items()} for rank in grads])
            if not result.good:
                break
        return seen

    def same(grad: Tensor) -> Tensor:
        return grad

    usual = messages(same, same)
    assert usual
    for change in (torch.zeros_like, torch.ones_like, lambda g: g * 1e30, lambda g: g / 0):
        twice = messages(change, change)
        assert twice
        assert twice == usual[: len(twice)]
        assert messages(same, change) == usual


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", [*MATRICES, "tiny"])
@pytest.mark.parametrize("spec", EXACT)
def test_law_5_everything_kept_is_the_plain_mean(spec, layout, size, dtype):
    compressor, buckets, states = loaded(spec, layout, size, dtype)
    expected = torch.stack([bucket.flat.clone() for bucket in buckets]).double().mean(0)
    outcome = simulate(compressor, buckets, states)[-1]
    mean = decoded(outcome.mean, buckets[0]).flat.double()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(mean, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_law_5_one_rank_gets_its_own_gradient(name):
    simulation = Simulation(name, LAYOUTS["mixed"], size=1)
    grads = gradients(LAYOUTS["mixed"], 1, 0)
    for key, mean in simulation.step(grads).means[0].items():
        rounding = {"none": 0.0, "fp16": 2**-11, "bf16": 2**-8}[name]
        torch.testing.assert_close(mean, grads[0][key], rtol=rounding, atol=1e-7 * (name != "none"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [*MATRICES, "tiny", "nothing"])
@pytest.mark.parametrize("spec", SPECS + EXACT)
def test_law_6_odd_inputs_are_legal(spec, layout, dtype):
    for fill in (torch.zeros_like, torch.ones_like):
        compressor, buckets, states = loaded(spec, layout, 2, dtype, fill)
        for _ in range(3):
            outcomes = simulate(compressor, buckets, states)
            for outcome, bucket in zip(outcomes, buckets, strict=True):
                outcome.commit(frozenset())
                mean = decoded(outcome.mean, bucket)
                bucket.flat.fill_(float("nan"))  # the contents are no longer needed
                for name, view in bucket.items():
                    view.copy_(fill(view))
                    assert mean[name].isfinite().all()
                    assert fill is torch.ones_like or not mean[name].any()


def test_law_6_an_empty_bucket_of_matrices_is_legal():
    for spec in SPECS + EXACT:
        compressor, buckets, states = loaded(spec, "empty", 3, torch.float32)
        for outcome in simulate(compressor, buckets, states):
            outcome.commit(frozenset())
            assert decoded(outcome.mean, buckets[0]).flat.numel() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("spec", SPECS)
def test_law_7_non_finite_input_never_reaches_a_state(spec, bad):
    params = LAYOUTS["mixed"]
    simulation = Simulation(spec, params, size=3)
    simulation.step(gradients(params, 3, 0))
    twin, before = copy.deepcopy(simulation), memory(simulation)
    grads = gradients(params, 3, 1)
    for name in params:
        grads[1][name].view(-1)[-1:] = bad
    result = simulation.step(grads)
    assert not result.good
    for name, param in params.items():
        if param.numel():
            assert not any(mean[name].isfinite().all() for mean in result.means)
    assert all(torch.equal(a, b) for a, b in zip(before, memory(simulation), strict=True))
    after, expected = (s.step(gradients(params, 3, 2)).means for s in (simulation, twin))
    assert all(torch.equal(after[0][name], expected[0][name]) for name in params)


def test_law_7_a_non_finite_bias_leaves_the_memory_of_the_weights_alone():
    params = {"w": torch.empty(8, 8), "b": torch.empty(8)}
    simulation = Simulation("topk:density=0.1", params, size=2)
    before = memory(simulation)
    grads = gradients(params, 2, 0)
    grads[0]["b"][3] = float("inf")
    assert not simulation.step(grads).good
    assert all(torch.equal(a, b) for a, b in zip(before, memory(simulation), strict=True))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_law_7_a_mean_too_large_for_its_bucket_makes_a_bad_step(spec, size):
    """A quantiser may overshoot, and only fp32 has room for what is then above 65504."""
    params = {"w": torch.empty(32, 32, dtype=torch.float16)}
    simulation = Simulation(spec, params, size=size)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        grads = [torch.randn(32, 32, generator=generator).mul(12000).half() for _ in range(size)]
        good = simulation.step([{"w": grad.clamp(-65000, 65000)} for grad in grads]).good
        assert all(b.flat.isfinite().all() == good for g in simulation.groups for b in g.buckets)


@pytest.mark.parametrize("spec", ["topk:density=0.1", "powersgd:rank=1"])
def test_law_7_a_bad_step_reaches_no_message_of_a_method_with_memory(spec):
    finite = []

    def tap(rank: int, message: Message) -> None:
        finite.extend(bool(t.isfinite().all()) for t in message.tensors)

    simulation = Simulation(spec, {"w": torch.empty(8, 8)}, size=2, tap=tap)
    simulation.step([{"w": torch.full((8, 8), float("nan"))}, {"w": torch.ones(8, 8)}])
    assert finite
    assert all(finite)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_law_8_bytes_are_those_of_the_messages(spec, size):
    sent = [0] * size

    def tap(rank: int, message: Message) -> None:
        sent[rank] += sum(t.nbytes for t in message.tensors)

    params = LAYOUTS["mixed"]
    result = Simulation(spec, params, size=size, tap=tap).step(gradients(params, size, 0))
    assert result.bytes_sent == sent
    assert sent[0] > 0


@pytest.mark.parametrize("spec", SPECS)
def test_the_generator_of_the_user_is_left_alone(spec):
    before = torch.get_rng_state()
    simulation = Simulation(spec, LAYOUTS["mixed"], size=2)
    zeros = {name: torch.zeros(p.shape) for name, p in LAYOUTS["mixed"].items()}
    simulation.step([zeros, zeros])
    assert torch.equal(torch.get_rng_state(), before)
