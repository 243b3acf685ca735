"""Steps worked by hand: what is hidden, what is not, and which compressor is chosen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomp.predict.choose import DENSE, Model
from mpicomp.predict.collectives import ALGORITHMS
from mpicomp.predict.events import Load, run
from mpicomp.predict.methods import Collective, Cost
from mpicomp.predict.network import Link, Network
from mpicomp.predict.timeline import Timeline

TIMELINE = Timeline(outside_seconds=10.0, backward_seconds=8.0, arrivals={"b": 4.0, "a": 8.0})


def network(beta):
    links = dict.fromkeys(ALGORITHMS, Link(0.0, beta))
    return Network(2, 1, {}, links)


def load(ready, *, wire=0.0, encode=0.0, decode=0.0, accumulate=0.0):
    """With a second for each MB on the wire between two hosts."""
    collectives = (Collective("all-gather", 1e6 * wire),) if wire else ()
    return Load(ready, Cost(accumulate, encode, decode, collectives, wire))


def seconds(*buckets, contention=0.0, beta=1e-6):
    step = run(TIMELINE, buckets, network(beta), contention=contention)
    ballot = network(beta).seconds("all-reduce", 1024)
    return pytest.approx(step.seconds - ballot)


def test_nothing_to_exchange():
    assert seconds() == 18.0


def test_a_bucket_that_is_hidden():
    assert seconds(load(4.0, wire=4.0)) == 18.0


def test_a_bucket_that_is_not():
    assert seconds(load(4.0, wire=5.0)) == 19.0


def test_buckets_wait_for_each_other():
    """The first leaves at 4 and is done at 9, one second late; the second takes two more."""
    assert seconds(load(4.0, wire=5.0), load(8.0, wire=2.0)) == 10 + 8 + 3


def test_encoding_and_decoding_are_on_the_way():
    assert seconds(load(8.0, wire=2.0, encode=1.0, decode=0.5)) == 18 + 3.5


def test_accumulating_is_never_hidden():
    assert seconds(load(4.0, accumulate=1.0), load(8.0, accumulate=1.0)) == 20.0


def test_a_core_that_is_shared():
    """Three seconds of encoding behind a backward pass that has four to go lengthen it by three."""
    bucket = load(4.0, encode=3.0)
    assert seconds(bucket, contention=0.0) == 18.0
    assert seconds(bucket, contention=1.0) == 21.0
    assert seconds(bucket, contention=0.5) == 19.5


@given(
    wires=st.lists(st.floats(0, 10), min_size=1, max_size=5),
    contention=st.floats(0, 1),
    more=st.floats(0, 5),
)
def test_more_to_send_never_ends_sooner(wires, contention, more):
    buckets = [load(min(8.0, 2.0 * i), wire=w, encode=0.1) for i, w in enumerate(wires)]
    longer = [*buckets[:-1], load(buckets[-1].ready_seconds, wire=wires[-1] + more, encode=0.1)]
    after, before = (
        run(TIMELINE, each, network(1e-6), contention=contention).seconds
        for each in (longer, buckets)
    )
    assert after >= before - 1e-9


# Choices.


def choose(options, *, beta=1e-6):
    return Model(TIMELINE, network(beta), contention=0.0).choose(options)


def test_a_hidden_bucket_stays_as_it_is():
    """The first bucket is hidden whatever it is; the second leaves when the pass is over."""
    options = [
        {DENSE: [load(4.0, wire=3.0)], "small": [load(4.0, wire=0.1, encode=0.1)]},
        {DENSE: [load(8.0, wire=6.0)], "small": [load(8.0, wire=0.1, encode=0.1)]},
    ]
    assert choose(options).methods == (DENSE, "small")


def test_none_pays():
    options = [{DENSE: [load(8.0, wire=1.0)], "slow": [load(8.0, wire=0.1, encode=2.0)]}]
    assert choose(options).methods == (DENSE,)


def test_a_gain_that_is_too_small():
    """A hundredth of a step: nobody should give up exact gradients for that."""
    options = [{DENSE: [load(8.0, wire=1.0)], "bit": [load(8.0, wire=0.8)]}]
    assert choose(options).methods == (DENSE,)


def test_each_bucket_has_what_is_best_for_it():
    options = [
        {DENSE: [load(4.0, wire=90.0)], "x": [load(4.0, wire=1.0)], "y": [load(4.0, wire=9.0)]},
        {DENSE: [load(8.0, wire=90.0)], "x": [load(8.0, wire=9.0)], "y": [load(8.0, wire=1.0)]},
    ]
    assert choose(options).methods == ("x", "y")


def test_nothing_is_trained():
    assert choose([]).methods == ()
