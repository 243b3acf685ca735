"""A compressor played against itself asks for what it asks for among real ranks."""

import pytest
import torch

from mpicomp.compress import Simulation, available, parse
from mpicomp.compress.rules import assign
from mpicomp.fusion import plan
from mpicomp.predict.methods import Collective, collectives_of, measure

PARAMS = {"w": torch.randn(96, 80), "v": torch.randn(64, 64), "b": torch.randn(11)}
WITHOUT_MOMENTUM = [n for n in available() if not parse(n).capabilities.momentum]


def plans_of(spec, params=PARAMS):
    methods = assign(spec, [(n, tuple(p.shape), p.dtype) for n, p in params.items()])
    return plan(list(params.items()), methods, float("inf"))


@pytest.mark.parametrize("size", [2, 3, 8, 64, 1000])
@pytest.mark.parametrize("name", available())
def test_every_method_at_any_number_of_ranks(name, size):
    for each in plans_of(name):
        cost = measure(each, PARAMS, size, repeats=1)
        assert cost.num_bytes > 0
        assert cost.collectives
        assert min(cost.accumulate_seconds, cost.encode_seconds, cost.decode_seconds) >= 0


# Their messages are as long as the data want: in tests/compress they are counted.
DATA_DECIDES = {"threshold", "gaussiank", "sidco", "oktopk", "deft", "micro", "exdyna"}
LED = {"cltk", "deft"}  # one rank says what all are to do, another in each step


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", sorted(set(available()) - DATA_DECIDES))
def test_bytes_are_those_of_real_ranks(name, size):
    """Up to scales, of which there are fewer in the row that methods with ``chunks`` are given."""
    matrix = {"w": torch.randn(256, 256)}
    sent = []
    simulation = Simulation(
        name, matrix, size=size, tap=lambda rank, m: sent.append(m.num_bytes) if rank == 0 else None
    )
    for _ in range(2):
        sent.clear()
        simulation.step([{"w": matrix["w"].clone()} for _ in range(size)])
    (each,) = plans_of(name, matrix)
    cost = measure(each, matrix, size, repeats=1)
    chunks = each.compressor.capabilities.chunks
    assert cost.num_bytes == pytest.approx(sum(sent), rel=0.25 if chunks else 1e-9)


def test_collectives_of_known_methods():
    assert plans_of("none")[0].numel == 96 * 80 + 64 * 64 + 11
    (dense,) = plans_of("none")
    assert measure(dense, PARAMS, 4).collectives == (Collective("all-reduce", 4 * dense.numel),)
    matrix = {"w": torch.randn(1000, 100)}
    (topk,) = plans_of("topk:density=0.01", matrix)
    # 1000 values of four bytes and as many indices
    assert measure(topk, matrix, 4).collectives == (Collective("all-gather", 8000),)
    (powersgd,) = plans_of("powersgd:rank=2", matrix)
    # P is 1000 x 2, Q is 100 x 2
    assert [c.num_bytes for c in measure(powersgd, matrix, 4).collectives] == [8000, 800]


def test_messages_of_two_types_are_two_reductions():
    from mpicomp.compress import Mean

    message = Mean((torch.zeros(3), torch.zeros(2), torch.zeros(5, dtype=torch.int64)))
    assert collectives_of(message, 4) == (
        Collective("all-reduce", 20),
        Collective("all-reduce", 40),
    )


def test_topk_goes_dense_where_ranks_are_many():
    matrix = {"w": torch.randn(1000, 100)}
    (topk,) = plans_of("topk:density=0.01", matrix)
    assert measure(topk, matrix, 32).collectives[0].kind == "all-gather"
    assert measure(topk, matrix, 512).collectives == (Collective("all-reduce", 400_000),)


@pytest.mark.parametrize("name", sorted(LED))
def test_methods_with_a_leader_are_played_by_it(name):
    """It chooses a hundredth; what ranks that wait hand over in its place tells nothing."""
    matrix = {"w": torch.randn(512, 512)}
    (each,) = plans_of(name, matrix)
    assert measure(each, matrix, 4, repeats=3).num_bytes < 0.1 * 4 * 512 * 512


def test_pairs_that_swap_send_one_message():
    (each,) = plans_of("gtopk", {"w": torch.randn(512, 512)})
    kinds = [c.kind for c in measure(each, {"w": torch.randn(512, 512)}, 64).collectives]
    assert kinds.count("message") == kinds.count("all-to-all")  # the latter tell lengths
