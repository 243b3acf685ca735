"""How parameters are divided among buckets."""

import pytest
import torch

from mpicomp.compress.dense import NoCompression
from mpicomp.fusion import plan

MB = 1 << 20


def sizes_in_mb(in_mb: list[float], bucket_mb: float) -> list[float]:
    """Of each bucket. The parameters are float32; each is in one bucket, and in order."""
    params = [(str(i), torch.empty(int(mb * MB) // 4, device="meta")) for i, mb in enumerate(in_mb)]
    buckets = plan(
        params, dict.fromkeys((name for name, _ in params), NoCompression()), bucket_mb * MB
    )
    assert [entry.name for b in buckets for entry in b.entries] == [name for name, _ in params]
    return [round(b.num_bytes / MB, 3) for b in buckets]


@pytest.mark.parametrize(
    ("in_mb", "bucket_mb", "expected"),
    [
        ([0.5, 0.75, 10, 10, 10], 25, [1.25, 30]),  # the first closes at 1 MB, the second at 25
        ([0.5, 0.75, 10, 20, 10], 25, [1.25, 30, 10]),
        ([0.25, 0.25, 0.25], 0.5, [0.5, 0.25]),  # smaller buckets stay smaller
        ([0.25, 0.25], 25, [0.5]),
        ([40, 0.25], 25, [40, 0.25]),
    ],
)
def test_the_first_bucket_is_small(in_mb, bucket_mb, expected):
    assert sizes_in_mb(in_mb, bucket_mb) == expected
