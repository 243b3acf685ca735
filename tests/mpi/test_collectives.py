"""The calls a script makes, against what every rank can work out alone."""

from __future__ import annotations

import inspect

import pytest
import torch
from mpi4py import MPI

import mpicomp
from mpicomp import Average, Max, Min, MismatchError, Product, Sum

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
INTEGERS += [torch.uint16, torch.uint32, torch.uint64]
NUMBERS = [*FLOATS, *COMPLEX, *INTEGERS]
several = pytest.mark.skipif(SIZE == 1, reason="one rank agrees with itself")

LAYOUTS = {
    "contiguous": lambda: torch.zeros(3, 4),
    "transposed": lambda: torch.zeros(4, 3).t(),
    "every other column": lambda: torch.zeros(3, 8)[:, ::2],
    "channels last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "an offset": lambda: torch.zeros(10)[3:],
    "0-d": lambda: torch.zeros(()),
    "empty": lambda: torch.zeros(0, 3),
    "large": lambda: torch.zeros(300, 700).t(),
}


@pytest.fixture(params=LAYOUTS)
def tensor(request, world):
    """Zeros in all layouts; the values below are put in by `numbered`."""
    return LAYOUTS[request.param]()


def numbered(like, rank):
    """Element i of rank r is 1 + i % 5 + r, in row-major order whatever the strides."""
    values = torch.arange(like.numel()) % 5 + 1 + rank
    return values.view(like.shape).to(like.dtype)


def total(like):
    return sum(numbered(like, rank).double() for rank in range(SIZE)).to(like.dtype)


@pytest.fixture(autouse=True)
def still_working(world):
    """Whatever happened in a test, the next call is right."""
    yield
    assert mpicomp.allreduce(torch.tensor([RANK]), op=Sum).item() == SIZE * (SIZE - 1) // 2


# ---------------------------------------------------------------------------------- allreduce


def test_layouts(tensor):
    given = tensor.copy_(numbered(tensor, RANK)).clone()
    mean = mpicomp.allreduce(tensor)
    torch.testing.assert_close(mean, total(tensor) / SIZE)
    assert torch.equal(tensor, given)
    stride = tensor.stride()
    assert mpicomp.allreduce_(tensor, op=Sum) is tensor
    assert torch.equal(tensor, total(given))
    assert tensor.stride() == stride


def test_in_place_leaves_the_memory_between_alone(world):
    base = torch.full((3, 8), 7.0)
    mpicomp.allreduce_(base[:, ::2].fill_(1), op=Sum)
    assert (base[:, ::2] == SIZE).all()
    assert (base[:, 1::2] == 7).all()


@pytest.mark.parametrize("numel", [5, 9001])
def test_operations_and_types(numel):
    mean = Average
    ranks = torch.arange(SIZE)
    for dtype in NUMBERS:
        tensor = torch.full((numel,), RANK + 1).to(dtype)
        wanted = {Sum: int(ranks.sum()) + SIZE, Product: int((ranks + 1).prod())}
        wanted[mean] = wanted[Sum] / SIZE if dtype in FLOATS + COMPLEX else wanted[Sum] // SIZE
        if not dtype.is_complex:
            wanted |= {Min: 1, Max: SIZE}
        for op, value in wanted.items():
            got = mpicomp.allreduce(tensor, op=op)
            assert got.dtype == dtype
            torch.testing.assert_close(
                got.to(torch.complex128), torch.full((numel,), value).to(torch.complex128)
            )


def test_bool(world):
    for numel in (1, 40_000):
        first = torch.full((numel,), RANK == 0)
        for op, value in ((Sum, True), (Max, True), (Product, SIZE == 1), (Min, SIZE == 1)):
            got = mpicomp.allreduce(first, op=op)
            assert got.dtype == torch.bool
            assert (got == value).all()
        with pytest.raises(ValueError, match="bool has no mean"):
            mpicomp.allreduce(first)


def test_means_of_integers(world):
    assert mpicomp.allreduce(torch.tensor([-1 - RANK])).item() == -((SIZE + 1) * SIZE // 2 // SIZE)
    for dtype, value in ((torch.int8, 127), (torch.uint8, 255), (torch.int32, 2**31 - 1)):
        assert mpicomp.allreduce(torch.tensor([value], dtype=dtype)).item() == value
        assert mpicomp.allreduce_(torch.tensor([[value]], dtype=dtype).t()).item() == value
    with pytest.raises(ValueError, match="scale factors must be 1 for"):
        mpicomp.allreduce(torch.tensor([1]), prescale_factor=0.5)


def test_horovods_arguments(world):
    ones = torch.ones(3)
    assert mpicomp.allreduce(ones, True, "name", None, None, 2.0, 3.0).tolist() == [6] * 3
    assert mpicomp.allreduce(ones, average=False, name="name").tolist() == [SIZE] * 3
    assert (
        mpicomp.allreduce_(ones.clone(), False, "name", None, 0.5, 4.0).tolist() == [2 * SIZE] * 3
    )
    first = {
        mpicomp.allgather: ["tensor", "name"],
        mpicomp.broadcast: ["tensor", "root_rank", "name"],
        mpicomp.broadcast_: ["tensor", "root_rank", "name"],
        mpicomp.alltoall: ["tensor", "splits", "name"],
        mpicomp.reducescatter: ["tensor", "name", "compression", "op"],
        mpicomp.broadcast_object: ["obj", "root_rank", "name"],
        mpicomp.allgather_object: ["obj", "name"],
        mpicomp.broadcast_parameters: ["params", "root_rank"],
        mpicomp.broadcast_optimizer_state: ["optimizer", "root_rank", "model"],
    }
    for function, names in first.items():
        assert list(inspect.signature(function).parameters)[: len(names)] == names


@pytest.mark.parametrize("numel", [4, 50_000])
def test_a_16_bit_sum_is_scaled_before_it_is_rounded(numel):
    tensor = torch.full((numel,), 60_000.0, dtype=torch.float16)
    assert torch.equal(mpicomp.allreduce(tensor), tensor)
    for scale in ("prescale_factor", "postscale_factor"):
        assert torch.equal(mpicomp.allreduce(tensor, op=Sum, **{scale: 1 / SIZE}), tensor)
    small = torch.full((numel,), 2.0**-24, dtype=torch.float16)
    assert torch.equal(mpicomp.allreduce(small), small)  # divided first it would be zero


def test_scales_of_other_operations(world):
    tensor = torch.tensor([1.0 + RANK, -1.0 - RANK])
    got = mpicomp.allreduce(tensor, op=Max, prescale_factor=-1.0, postscale_factor=10.0)
    assert got.tolist() == [-10, 10 * SIZE]
    assert tensor.tolist() == [1 + RANK, -1 - RANK]
    assert mpicomp.allreduce(torch.ones(1), op=Product, prescale_factor=2.0).item() == 2**SIZE


def test_gradients_are_not_tracked(world):
    leaf = torch.ones(3, requires_grad=True)
    for got in (
        mpicomp.allreduce(leaf),
        mpicomp.allgather(leaf),
        mpicomp.broadcast(leaf, 0),
        mpicomp.reducescatter(leaf),
        mpicomp.alltoall(leaf.expand(SIZE, 3)),
    ):
        assert not got.requires_grad
    assert mpicomp.allreduce_(leaf, op=Sum) is leaf
    assert mpicomp.broadcast_(leaf, SIZE - 1) is leaf
    assert leaf.is_leaf
    assert leaf.tolist() == [SIZE] * 3


def test_lazily_conjugated_tensors(world):
    lazy = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert mpicomp.allreduce(lazy).tolist() == [1 - 2j, 3 + 1j]
    assert mpicomp.allreduce_(lazy.clone().conj()).tolist() == [1 + 2j, 3 - 1j]
    assert mpicomp.allgather(lazy).tolist() == [1 - 2j, 3 + 1j] * SIZE
    assert mpicomp.broadcast(lazy.imag, 0).tolist() == [-2, 1]


# -------------------------------------------------------------------------- moves between ranks


def test_allgather_of_layouts(tensor):
    tensor.copy_(numbered(tensor, RANK))
    parts = [numbered(tensor, rank) for rank in range(SIZE)]
    expected = torch.stack(parts) if tensor.ndim == 0 else torch.cat(parts)
    assert torch.equal(mpicomp.allgather(tensor), expected)


def test_allgather_of_unequal_parts(world):
    for dtype in [*NUMBERS, torch.bool, torch.float8_e4m3fn]:
        got = mpicomp.allgather(torch.full((2 * RANK, 3), RANK + 1).to(dtype), name="rows")
        rows = torch.arange(1, SIZE + 1).repeat_interleave(2 * torch.arange(SIZE))
        assert (got.dtype, got.shape) == (dtype, (SIZE * (SIZE - 1), 3))
        assert torch.equal(got, rows[:, None].expand(-1, 3).to(dtype))
    assert mpicomp.allgather(torch.zeros(RANK, 0)).shape == (SIZE * (SIZE - 1) // 2, 0)


def test_broadcast_of_layouts(tensor):
    for root in {0, SIZE - 1}:
        tensor.copy_(numbered(tensor, RANK))
        stride = tensor.stride()
        assert torch.equal(mpicomp.broadcast(tensor, root), numbered(tensor, root))
        assert torch.equal(tensor, numbered(tensor, RANK))
        assert mpicomp.broadcast_(tensor, root_rank=root) is tensor
        assert torch.equal(tensor, numbered(tensor, root))
        assert tensor.stride() == stride


def test_broadcast_of_types(world):
    for dtype in [*NUMBERS, torch.bool, torch.float8_e5m2]:
        got = mpicomp.broadcast(torch.full((4,), RANK).to(dtype), SIZE - 1)
        assert torch.equal(got, torch.full((4,), SIZE - 1).to(dtype))


def test_alltoall_of_equal_parts(world):
    for dtype in [*NUMBERS, torch.bool]:
        rows = (10 * RANK + torch.arange(SIZE)).repeat_interleave(2).to(dtype)
        got = mpicomp.alltoall(rows[:, None])
        expected = (10 * torch.arange(SIZE) + RANK).repeat_interleave(2).to(dtype)
        assert torch.equal(got, expected[:, None])
    assert mpicomp.alltoall(torch.zeros(0, 3)).shape == (0, 3)
    columns = torch.full((2, SIZE), RANK).t()
    assert mpicomp.alltoall(columns).tolist() == [[rank] * 2 for rank in range(SIZE)]


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_alltoall_of_unequal_parts(kind):
    splits = [RANK * to for to in range(SIZE)]  # none at all from rank 0
    tensor = torch.full((sum(splits), 2), RANK)
    got, received = mpicomp.alltoall(tensor, kind(splits), "parts")
    assert received.tolist() == [rank * RANK for rank in range(SIZE)]
    rows = [[rank] * 2 for rank in range(SIZE) for _ in range(rank * RANK)]
    assert got.tolist() == rows


@pytest.mark.parametrize("numel", [0, 1, 7, 12])
def test_reducescatter(numel):
    tensor = torch.arange(numel * 2.0).view(2, numel).t()
    parts = mpicomp.allgather(mpicomp.reducescatter(tensor, op=Sum))
    assert torch.equal(parts, tensor * SIZE)
    own = mpicomp.reducescatter(tensor)
    assert len(own) == numel // SIZE + (numel % SIZE > RANK)
    assert torch.equal(mpicomp.allgather(own), tensor)


def test_barrier(world):
    mpicomp.barrier()


def test_objects(world):
    for root in {0, SIZE - 1}:
        got = mpicomp.broadcast_object({"rank": RANK, "none": None}, root, name="config")
        assert got == {"rank": root, "none": None}
    assert mpicomp.broadcast_object(None) is None
    assert mpicomp.allgather_object("x" * RANK) == ["x" * rank for rank in range(SIZE)]
    big = mpicomp.broadcast_object(bytes([RANK]) * 3_000_000, SIZE - 1)
    assert big == bytes([SIZE - 1]) * 3_000_000
    lists = mpicomp.allgather_object(list(range(100_000 * RANK)))
    assert [len(each) for each in lists] == [100_000 * rank for rank in range(SIZE)]


# ------------------------------------------------------------------------------------- mistakes


def calls():
    """Pairs of calls that do not fit, and what the error must say of each."""
    x = torch.zeros(2, 3)
    yield (
        (lambda: mpicomp.allreduce(x, op=Sum), lambda: mpicomp.allreduce(x, op=Max)),
        (
            "op SUM",
            "op MAX",
        ),
    )
    yield (lambda: mpicomp.allreduce(x), lambda: mpicomp.allreduce(x[0])), ("(2, 3)", "(3,)")
    yield (
        (lambda: mpicomp.allreduce(x), lambda: mpicomp.allreduce(x.double())),
        (
            "torch.float32",
            "torch.float64",
        ),
    )
    yield (
        (lambda: mpicomp.allreduce(x, name="a"), lambda: mpicomp.allreduce_(x, name="b")),
        (
            "allreduce 'a'",
            "allreduce 'b'",
        ),
    )
    yield (
        (lambda: mpicomp.allreduce(x), lambda: mpicomp.allreduce(x, prescale_factor=2.0)),
        (
            "op AVERAGE",
            "prescale 2.0",
        ),
    )
    yield (
        (
            lambda: mpicomp.allreduce(x, postscale_factor=2.0),
            lambda: mpicomp.allreduce(x, prescale_factor=2.0),
        ),
        ("postscale 2.0", "prescale 2.0"),
    )
    yield (
        (lambda: mpicomp.broadcast(x, 0), lambda: mpicomp.broadcast(x, SIZE - 1)),
        (
            "root_rank 0",
            f"root_rank {SIZE - 1}",
        ),
    )
    yield (
        (lambda: mpicomp.broadcast_object(1, 0), lambda: mpicomp.broadcast_object(1, 1)),
        (
            "root_rank 0",
            "root_rank 1",
        ),
    )
    yield (
        (lambda: mpicomp.allgather(x), lambda: mpicomp.allgather(x[:, :2])),
        (
            "('*', 3)",
            "('*', 2)",
        ),
    )
    yield (
        (lambda: mpicomp.alltoall(x, [2] + [0] * (SIZE - 1)), lambda: mpicomp.barrier()),
        (
            "alltoall",
            "barrier",
        ),
    )
    yield (
        (lambda: mpicomp.reducescatter(x), lambda: mpicomp.allreduce(x)),
        (
            "reducescatter",
            "allreduce",
        ),
    )
    yield (
        (lambda: mpicomp.allgather(x, "x"), lambda: mpicomp.broadcast(x, 0, "x")),
        (
            "allgather 'x'",
            "broadcast 'x'",
        ),
    )
    yield (
        (
            lambda: mpicomp.broadcast_parameters({"w": x}),
            lambda: mpicomp.broadcast_parameters({"v": x}),
        ),
        ("w (2, 3)", "v (2, 3)"),
    )


@several
@pytest.mark.parametrize("odd", {0, SIZE - 1})
def test_ranks_that_differ_all_learn_who_wanted_what(odd):
    for pair, words in calls():
        with pytest.raises(MismatchError) as caught:
            pair[odd == RANK]()
        lines = str(caught.value).splitlines()
        rest = [str(rank) for rank in range(SIZE) if rank != odd]
        who = {True: f"rank {odd}: ", False: f"rank{'s' * (SIZE > 2)} {', '.join(rest)}: "}
        for is_odd, word in zip((False, True), words, strict=True):
            assert any(who[is_odd] in line and word in line for line in lines), (lines, word)
        assert mpicomp.allreduce(torch.ones(2), op=Sum).tolist() == [SIZE] * 2


@several
def test_every_rank_wants_something_else(world):
    with pytest.raises(MismatchError) as caught:
        mpicomp.allreduce(torch.zeros(1 + RANK))
    assert len(str(caught.value).splitlines()) == 1 + SIZE


def test_arguments_that_no_rank_may_give(world):
    x = torch.zeros(SIZE, 2)
    bad = [
        (lambda: mpicomp.broadcast(x, SIZE), f"root_rank must be in .* got {SIZE}"),
        (lambda: mpicomp.broadcast_(x, -1), "root_rank must be in .* got -1"),
        (lambda: mpicomp.broadcast_object(1, SIZE), f"root_rank must be in .* got {SIZE}"),
        (lambda: mpicomp.broadcast_parameters([x], SIZE), f"root_rank must be in .* got {SIZE}"),
        (lambda: mpicomp.allreduce(x, average=True, op=Sum), "op or average, not both"),
        (lambda: mpicomp.allreduce(x, op="sum"), "op must be Average"),
        (lambda: mpicomp.allreduce(x, compression="fp16"), "compression must be None"),
        (lambda: mpicomp.reducescatter(x, compression="fp16"), "compression must be None"),
        (lambda: mpicomp.reducescatter(torch.tensor(1.0)), "first dimension"),
        (lambda: mpicomp.alltoall(torch.tensor(1.0)), "first dimension"),
        (lambda: mpicomp.alltoall(torch.zeros(SIZE + 1), [1] * SIZE), "add up to"),
        (lambda: mpicomp.alltoall(x, [1] * (SIZE + 1)), "splits must be"),
        (lambda: mpicomp.alltoall(x, [SIZE + 1, -1, *[0] * (SIZE - 2)][:SIZE]), "splits must be"),
    ]
    if SIZE > 1:
        bad.append((lambda: mpicomp.alltoall(torch.zeros(SIZE + 1)), "multiple of"))
    sparse = torch.eye(3).to_sparse()
    for call in (mpicomp.allreduce, mpicomp.allreduce_, mpicomp.allgather, mpicomp.reducescatter):
        bad.append((lambda call=call: call(sparse), "must be dense"))
    bad.append((lambda: mpicomp.broadcast(sparse, 0), "must be dense"))
    for call, text in bad:
        with pytest.raises(ValueError, match=text):
            call()
    for op in (Min, Max):
        for numel in (3, 30_000):
            with pytest.raises(TypeError, match=r"got torch\.complex64"):
                mpicomp.allreduce(torch.zeros(numel, dtype=torch.complex64), op=op)
    with pytest.raises(TypeError, match=r"got torch\.float8_e4m3fn"):
        mpicomp.allreduce(torch.zeros(3, dtype=torch.float8_e4m3fn))
