"""Two ranks add numbers, and rank 0 prints how long that took: what `--check` runs as a job."""

import array
import json
import time

from mpi4py import MPI

SMALL_BYTES = 1 << 10
STEPS_BYTES = (1 << 20, 1 << 26)  # the larger one only where the smaller one was quick
QUICK_SECONDS = 0.05


def seconds(num_bytes: int, repeats: int) -> float:
    """The median time of a sum over all ranks, in place; its result is checked."""
    times = []
    for _ in range(repeats):
        numbers = array.array("f", [1.0]) * (num_bytes // 4)
        world.Barrier()
        start = time.perf_counter()
        world.Allreduce(MPI.IN_PLACE, numbers)
        times.append(time.perf_counter() - start)
        assert numbers[0] == numbers[-1] == world.size
    median: float = world.bcast(sorted(times)[len(times) // 2])
    return median


world = MPI.COMM_WORLD
seconds(SMALL_BYTES, 5)
latency = seconds(SMALL_BYTES, 51)
for size in STEPS_BYTES:
    took = seconds(size, 5)
    rate = size / took
    if took > QUICK_SECONDS:
        break
if world.rank == 0:
    print(json.dumps({"size": world.size, "microseconds": 1e6 * latency, "bytes_per_second": rate}))
