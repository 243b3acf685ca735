"""Every way a tensor can take between ranks, compared with the same sum worked out here."""

from __future__ import annotations

import logging
import random
import subprocess
import time

import pytest
import torch
from mpi4py import MPI

from mpicomp.comm import communicator as module
from mpicomp.comm import direct
from mpicomp.comm.communicator import Communicator, Op

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
HALVES = [torch.float16, torch.bfloat16]
REAL = [*HALVES, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*REAL, *COMPLEX, *SIGNED, *UNSIGNED, torch.bool]

HALF_ARENA = 32 << 10  # bytes; enough for several pieces at a few thousand elements
PATHS = {
    "one_host": {},
    "no_shared_memory": {"shared_memory": False, "max_count": 3_000},  # long ones in several calls
    "hosts_of_every_other_rank": {"host": RANK % 2},
    "hosts_of_two": {"host": RANK // 2},
    "rank_0_alone": {"host": min(RANK, 1), "max_count": 3_000},
}
ONE_ROUNDING = ["one_host", "no_shared_memory"]
NUMELS = [0, 1, 5, 5003]  # the last is "small" unless an element has 8 bytes
MANY = 20_011  # several pieces of the arena and of MPI, the last one odd
MANY_OF = [torch.bfloat16, torch.float32, torch.int64]


@pytest.fixture(scope="module")
def paths(world):
    """A communicator for each way there is, with an arena that is soon full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ARENA_BYTES", 2 * HALF_ARENA)
        patch.setattr(module, "_SMALL_BYTES", HALF_ARENA)
        patch.setattr(direct, "PIECE_BYTES", HALF_ARENA // 8)  # more of them than are under way
        made = {name: Communicator(MPI.COMM_WORLD, **how) for name, how in PATHS.items()}
        yield made
    for communicator in made.values():
        communicator.free()


@pytest.fixture(params=PATHS)
def path(request, paths):
    return paths[request.param]


def inputs(numel, dtype, seed=0):
    """What each rank brings, the same lists on all ranks; products stay small."""
    rows = []
    for rank in range(SIZE):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        if dtype.is_floating_point or dtype.is_complex:
            rows.append(torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype))
            if dtype.is_complex:
                rows[-1] *= 1 + 2j
        else:
            low = -2 if dtype.is_signed else 0
            rows.append(torch.randint(low, 4, (numel,), generator=generator).to(dtype))
    return rows


def combined(rows, op, scale=None):
    """In rank order; 16-bit floats in float32 and rounded once."""
    dtype = rows[0].dtype
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(dtype, dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        wide = torch.int64
    total = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        row = row.to(wide)
        if op is Op.SUM:
            total += row
        elif op is Op.PRODUCT:
            total *= row
        else:
            total = (torch.maximum if op is Op.MAX else torch.minimum)(total, row)
    if scale is not None:
        total *= scale
    return total.to(dtype)


def numels(dtype):
    return [*NUMELS, MANY] if dtype in MANY_OF else NUMELS


def legal(dtype, op):
    return op in (Op.SUM, Op.PRODUCT) or not dtype.is_complex


def expect(got, rows, op, scale, *, exact):
    """Bit for bit, or within the rounding of partial results of every rank."""
    expected = combined(rows, op, scale)
    if exact or not (got.dtype.is_floating_point or got.dtype.is_complex):
        assert torch.equal(got, expected), (got.dtype, op, len(got), scale)
        return
    wide = torch.complex128 if got.dtype.is_complex else torch.float64
    bound = combined([row.abs().double() for row in rows], op) * abs(scale or 1.0)
    info = torch.finfo(got.dtype)
    error = (got.to(wide) - combined([row.to(wide) for row in rows], op, scale)).abs()
    limit = 2 * SIZE * info.eps * (bound + info.tiny)
    assert (error <= limit).all(), (got.dtype, op, len(got), scale)


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("name", PATHS)
def test_every_dtype_op_and_size(paths, name, op, run, agree):
    results = []
    for dtype in DTYPES:
        if not legal(dtype, op):
            continue
        in_rank_order = (
            name == "one_host"
            and dtype not in UNSIGNED
            and not (dtype.is_complex and op is Op.PRODUCT)  # vectorised or not: other roundings
        )
        exact = (
            in_rank_order
            or (name in ONE_ROUNDING and dtype in HALVES and op is Op.SUM)
            or op in (Op.MAX, Op.MIN)
        )
        for numel in numels(dtype):
            rows = inputs(numel, dtype)
            flat = rows[RANK].clone()
            run(paths[name].reduce_(flat, op))
            expect(flat, rows, op, None, exact=exact)
            results.append(flat)
    agree(*results)


@pytest.mark.parametrize("scale", [1.0 / SIZE, -3.0])
@pytest.mark.parametrize("name", PATHS)
def test_sums_are_scaled(paths, name, scale, run, agree):
    results = []
    for dtype in REAL + COMPLEX:
        for numel in numels(dtype):
            rows = inputs(numel, dtype, seed=1)
            flat = rows[RANK].clone()
            run(paths[name].reduce_(flat, Op.SUM, scale))
            exact = name == "one_host" or (name in ONE_ROUNDING and dtype in HALVES)
            expect(flat, rows, Op.SUM, scale, exact=exact)
            results.append(flat)
    agree(*results)


def test_a_16_bit_sum_may_overflow_before_it_is_scaled(path, run):
    for numel in (3, 5003, MANY):
        flat = torch.full((numel,), 60_000.0, dtype=torch.float16)
        run(path.reduce_(flat, Op.SUM, 1.0 / SIZE))
        # Hosts add up in turn, and what they hand on is rounded: only one host is exact.
        if path.node is None or path.hosts == 1:
            assert (flat == 60_000).all()


@pytest.mark.parametrize("name", PATHS)
def test_windows(paths, name, run, agree):
    communicator = paths[name]
    results = []
    block = run(communicator.allocate(400_000))
    assert (block.dtype, block.shape, block.is_contiguous()) == (torch.uint8, (400_000,), True)
    for dtype in DTYPES:
        for numel, start in ((1, 0), (5, 64), (4_001, 128), (MANY, 8 * 1024)):
            flat = block[start : start + numel * dtype.itemsize].view(dtype)
            block.fill_(1)
            around = block.clone()
            rows = inputs(numel, dtype, seed=2)
            flat.copy_(rows[RANK])
            run(communicator.reduce_(flat))
            exact = (name == "one_host" and dtype not in UNSIGNED) or (
                name in ONE_ROUNDING and dtype in HALVES
            )
            expect(flat, rows, Op.SUM, None, exact=exact)
            results.append(flat.clone())
            flat.view(torch.uint8).fill_(1)
            assert torch.equal(block, around)  # nothing beside the tensor was touched
    communicator.release(block)
    agree(*results)


def test_windows_of_odd_length(path, run):
    for num_bytes in (1, 13, 4099):
        block = run(path.allocate(num_bytes))
        assert len(block) == num_bytes
        flat = block[: num_bytes // 4 * 4].view(torch.float32)
        flat.fill_(RANK)
        run(path.reduce_(flat))
        assert (flat == sum(range(SIZE))).all()
        path.release(block)


def test_empty_windows_are_legal(path, run):
    block = run(path.allocate(0))
    run(path.reduce_(block))
    run(path.reduce_(block.view(torch.float32), Op.SUM, 0.5))
    path.release(block)


def test_memory_is_allocated_and_released_again_and_again(path, run):
    for _ in range(5):
        blocks = [run(path.allocate(num_bytes)) for num_bytes in (256, 100_000, 4096)]
        for block in blocks:
            flat = block.view(torch.int32)
            flat.fill_(RANK + 1)
            run(path.reduce_(flat))
            assert (flat == SIZE * (SIZE + 1) // 2).all()
        for block in reversed(blocks):
            path.release(block)
            block.fill_(0)  # released memory lasts as long as its tensors
            run(path.reduce_(block.view(torch.int32)))
            assert not block.any()
        path.release(torch.empty(3))  # of somebody else: no harm


def test_a_reduction_needs_dense_memory(path, run):
    spread = torch.zeros(4, 6)
    tensors = [spread.t(), spread[:, ::2], torch.zeros(1).expand(3), torch.eye(3).to_sparse()]
    for tensor in tensors:
        with pytest.raises(ValueError, match="dense and contiguous"):
            run(path.reduce_(tensor))
    flat = torch.ones(2)
    run(path.reduce_(flat))
    assert flat.tolist() == [SIZE, SIZE]


@pytest.mark.parametrize("numel", [3, MANY])
def test_a_reduction_that_cannot_be_leaves_no_rank_behind(path, numel, run):
    bad = [(torch.ones(numel, dtype=torch.float8_e4m3fn), Op.SUM)]
    bad += [(torch.ones(numel, dtype=dtype), op) for dtype in COMPLEX for op in (Op.MAX, Op.MIN)]
    for tensor, op in bad:
        with pytest.raises(TypeError, match=f"has a {op.value}, got {tensor.dtype}"):
            run(path.reduce_(tensor, op))
        flat = torch.ones(2)
        run(path.reduce_(flat))
        assert flat.tolist() == [SIZE, SIZE]


@pytest.mark.parametrize("root", {0, SIZE - 1})
def test_broadcast(path, root, run):
    for dtype in [*DTYPES, torch.float8_e5m2]:
        for shape in [(0,), (), (5,), (3, 0), (67, 89)]:
            tensor = torch.full(shape, RANK + 1).to(dtype)
            run(path.broadcast_(tensor, root))
            assert torch.equal(tensor, torch.full(shape, root + 1).to(dtype))


def test_gather(path, run):
    for dtype in [torch.bool, torch.bfloat16, torch.float64, torch.uint16, torch.complex128]:
        for base in (0, 1, 300):
            lengths = [base * rank for rank in range(SIZE)]
            parts = run(path.gather(torch.full((base * RANK,), RANK).to(dtype), lengths))
            assert [part.dtype for part in parts] == [dtype] * SIZE
            assert [len(part) for part in parts] == lengths
            for rank, part in enumerate(parts):
                assert torch.equal(part, torch.full((base * rank,), rank).to(dtype))
    assert run(path.lengths(RANK * 2**40)) == [rank * 2**40 for rank in range(SIZE)]


def test_all_to_all(path, run):
    for dtype in [torch.bool, torch.float16, torch.int64]:
        for base in (0, 1, 9000):  # the longest take several calls
            outgoing = [torch.full((base * to,), RANK + to).to(dtype) for to in range(SIZE)]
            incoming = run(path.all_to_all(outgoing, [base * RANK] * SIZE))
            for origin, got in enumerate(incoming):
                assert torch.equal(got, torch.full((base * RANK,), origin + RANK).to(dtype))


def test_same(path, run):
    for digest in (0, 1, 2**32 - 1, 2**63 - 1):
        assert run(path.same(digest))
        assert run(path.same(digest + RANK if digest < 2**62 else digest - RANK)) == (SIZE == 1)
        one_differs = digest ^ int(RANK == SIZE - 1)
        assert run(path.same(one_differs)) == (SIZE == 1)
        assert run(path.same(digest))


def test_nobody_passes_a_barrier_before_all_have_come(path, run):
    for late in range(SIZE):
        if late == RANK:
            time.sleep(0.01)
        came = time.monotonic()  # one clock for all processes of a machine
        run(path.barrier())
        left = time.monotonic()
        assert left >= max(path.comm.allgather(came))


@pytest.mark.parametrize(("name", "turns"), [(name, 60) for name in PATHS] + [("one_host", 200)])
def test_any_order_of_operations_of_any_size(paths, name, turns, run):
    """Ranks that are early or late by chance must not read what is not yet, or no longer, there."""
    path = paths[name]
    plan = random.Random(turns)  # alike on all ranks
    dawdle = random.Random(RANK)
    block = run(path.allocate(100_000))
    total = SIZE * (SIZE + 1) // 2
    for turn in range(turns):
        kind = plan.choice(["reduce"] * 5 + ["window"] * 2 + ["same", "barrier", "move", "gather"])
        numel = plan.choice([1, 3, 64, 1000, 8192, 8193, 16_384, 16_385, 25_000])
        if dawdle.random() < 0.3:
            time.sleep(dawdle.random() * 1e-3)
        if kind in ("reduce", "window"):
            memory = block[: 4 * numel] if kind == "window" else torch.empty(4 * numel).byte()
            flat = memory[: 4 * numel].view(torch.int32)
            flat.fill_((RANK + 1) * (turn + 1))
            flat[-1] = RANK
            run(path.reduce_(flat))
            assert (flat[:-1] == total * (turn + 1)).all(), (turn, kind, numel)
            assert flat[-1] == total - SIZE, (turn, kind, numel)
        elif kind == "same":
            differ = plan.random() < 0.5
            assert run(path.same(turn + differ * RANK)) == (not differ or SIZE == 1), turn
        elif kind == "barrier":
            run(path.barrier())
        elif kind == "move":
            root = plan.randrange(SIZE)
            tensor = torch.full((numel,), RANK + turn)
            run(path.broadcast_(tensor, root))
            assert (tensor == root + turn).all(), (turn, numel)
        else:
            parts = run(path.gather(torch.tensor([RANK, turn]), [2] * SIZE))
            assert [part.tolist() for part in parts] == [[r, turn] for r in range(SIZE)]
    path.release(block)


def test_two_communicators_in_turn(paths, run):
    first, second = paths["one_host"], paths["hosts_of_every_other_rank"]
    for turn in range(15):
        for communicator in (first, second, first):
            flat = torch.full((1 + 700 * turn,), float(RANK + turn))
            run(communicator.reduce_(flat))
            assert (flat == sum(rank + turn for rank in range(SIZE))).all()


def test_tasks_of_two_communicators_side_by_side_in_any_order(paths):
    first, second = paths["one_host"], paths["hosts_of_two"]
    for turn in range(15):
        ones, twos = torch.ones(9000 + turn), torch.full((20_000,), 2.0)
        tasks = [first.reduce_(ones), second.reduce_(twos)]
        if (RANK + turn) % 2:
            tasks.reverse()
        while tasks:
            task = tasks.pop(0)
            if next(task, "done") != "done":
                tasks.append(task)
        assert (ones == SIZE).all()
        assert (twos == 2 * SIZE).all()


@pytest.fixture
def small_memory(world, tmp_path):
    """Mounts a memory file system of so many MB for all ranks, and takes it away again."""
    comm = world.communicator.comm
    path = comm.bcast(str(tmp_path))
    mounted = False

    def mount(megabytes):
        nonlocal mounted
        if RANK == 0:
            command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", path]
            mounted = subprocess.run(command, capture_output=True).returncode == 0
        if not comm.bcast(mounted):
            pytest.skip("mounting a file system is not permitted")
        return path

    yield mount
    comm.barrier()
    if mounted:
        subprocess.run(["umount", "-l", path], check=True)


def warnings(caplog):
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_without_room_for_the_arena_everything_goes_through_mpi(
    small_memory, caplog, run, monkeypatch
):
    monkeypatch.setattr(module, "ARENA_BYTES", 4 << 20)
    directory = small_memory(1)
    communicator = Communicator(MPI.COMM_WORLD, directory=directory)
    assert communicator.node is None
    block = run(communicator.allocate(100_000))
    for flat in (block.view(torch.float32), torch.empty(5), torch.empty(70_000)):
        flat.fill_(RANK)
        run(communicator.reduce_(flat))
        assert (flat == sum(range(SIZE))).all()
    assert len(warnings(caplog)) == int(RANK == 0 and SIZE > 1)
    communicator.free()


def test_without_room_for_a_window_it_goes_through_the_arena(
    small_memory, caplog, run, monkeypatch
):
    monkeypatch.setattr(module, "ARENA_BYTES", 4 << 20)
    directory = small_memory(4 * SIZE + 1)
    communicator = Communicator(MPI.COMM_WORLD, directory=directory)
    assert (communicator.node is None) == (SIZE == 1)
    assert not warnings(caplog)
    flat = run(communicator.allocate(8 << 20)).view(torch.float32)
    assert len(warnings(caplog)) == int(RANK == 0 and SIZE > 1)
    flat.fill_(RANK)
    run(communicator.reduce_(flat))
    assert (flat == sum(range(SIZE))).all()
    communicator.free()


def test_a_directory_that_is_not_there(world, caplog, run):
    communicator = Communicator(MPI.COMM_WORLD, directory="/nowhere")
    flat = torch.ones(3)
    run(communicator.reduce_(flat))
    assert flat.tolist() == [SIZE] * 3
    assert len(warnings(caplog)) == int(RANK == 0 and SIZE > 1)
    if warnings(caplog):
        assert "/nowhere" in caplog.text
    communicator.free()


def test_hosts_and_local_ranks(paths):
    pairs = paths["hosts_of_two"]
    assert (pairs.hosts, pairs.local.rank) == ((SIZE + 1) // 2, RANK % 2)
    assert pairs.local.size == min(2, SIZE - RANK // 2 * 2)
    alone = paths["rank_0_alone"]
    assert (alone.hosts, alone.local.rank) == (min(2, SIZE), max(0, RANK - 1))
