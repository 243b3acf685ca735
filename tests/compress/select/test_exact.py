from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomp.compress.select import exact, gpu, host, largest, search

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAN, INF = math.nan, math.inf


def collect_on_host(bits, floor, found, count):
    """What the kernel does: indices in no order, no more than fit, and the count of all."""
    passed = np.flatnonzero(search.magnitudes(bits, np) > floor)[::-1]
    found[: len(passed)] = passed[: len(found)]
    count[0] = len(passed)


DEVICE = gpu.Device(np, collect_on_host)


@pytest.fixture(autouse=True)
def small_numbers_are_searched_too(monkeypatch):
    """Samples and chunks so small that a handful of elements takes every path."""
    monkeypatch.setattr(exact, "SMALL", 7)
    monkeypatch.setattr(search, "SAMPLES", 8)
    monkeypatch.setattr(host, "CHUNK_BYTES", 48)


def check(flat, k):
    """The same magnitudes as by sorting, NaN largest, and nothing chosen twice."""
    before = flat.clone()
    indices = largest(flat, k)
    assert indices.dtype == torch.int64
    assert indices.shape == (k,)
    assert len(set(indices.tolist())) == k
    expected = flat.abs().sort(descending=True).values[:k]  # NaN first
    chosen = flat.abs()[indices].sort(descending=True).values
    assert torch.equal(chosen.nan_to_num(-1.0), expected.nan_to_num(-1.0))
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    assert torch.equal(flat.view(integers), before.view(integers))


special = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 2.5, 1e30, -1e30, 5e-324, 1e-45, -1e-40, 6e-8, INF, -INF, NAN]
)
numbers = st.one_of(special, st.floats(width=16), st.integers(-4, 4).map(float))


@settings(max_examples=300, deadline=None)
@given(st.lists(numbers, max_size=120), st.sampled_from(DTYPES), st.data())
def test_the_same_magnitudes_as_by_sorting(values, dtype, data):
    check(torch.tensor(values, dtype=dtype), data.draw(st.integers(0, len(values))))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(numbers, min_size=8, max_size=120), st.sampled_from(["=i2", "=i4", "=i8"]), st.data()
)
def test_the_algorithm_of_the_device_chooses_as_that_of_the_host(values, kind, data):
    k = data.draw(st.integers(1, len(values)))
    with np.errstate(over="ignore"):
        bits = np.array(values).astype(kind.replace("i", "f")).view(kind)
    on_host, on_device = search.search(bits, k, host), search.search(bits, k, DEVICE)
    assert on_host.dtype == on_device.dtype == np.int64
    assert on_host.tolist() == on_device.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "values",
    [
        [3.0] * 50,
        [-3.0] * 50,
        [0.0] * 50,
        [float(i) for i in range(50)],
        [-float(i) for i in range(50, 0, -1)],
        [1e-3] * 49 + [6e4],
        [0.0] * 47 + [1.0, -2.0, 3.0],  # fewer than k that are not zero
        [1.0] * 25 + [2.0] * 25,
        [INF, -INF, 1.0, NAN, -NAN] * 10,
        [NAN] * 50,
        [6e-8 * (i % 3) for i in range(50)],  # denormal in fp16
        [9.0 if i % 5 == 0 else 0.1 for i in range(50)],  # a pattern
    ],
)
def test_named_inputs_at_every_k(values, dtype):
    for k in range(len(values) + 1):
        check(torch.tensor(values, dtype=dtype), k)


@pytest.mark.parametrize("numel", [0, 1, 2, 7, 8, 9, 16, 17])
def test_few_elements(numel):
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    for k in range(numel + 1):
        check(flat, k)


def test_any_stride_and_a_graph_are_fine():
    matrix = torch.randn(60, 3, requires_grad=True)
    assert sorted(largest(matrix[:, 1], 9).tolist()) == sorted(
        torch.topk(matrix[:, 1].abs(), 9).indices.tolist()
    )
    assert not largest(matrix[:, 1], 9).requires_grad


@pytest.mark.parametrize(
    ("flat", "k", "message"),
    [
        (torch.zeros(4), 5, r"k must be between 0 and 4, got 5"),
        (torch.zeros(4), -1, r"k must be between 0 and 4, got -1"),
        (torch.zeros(2, 2), 1, r"flat must be 1-d, .* got 2-d, torch.float32"),
        (torch.zeros(4, dtype=torch.int32), 1, r"flat must be 1-d, .* got 1-d, torch.int32"),
    ],
)
def test_what_is_refused(flat, k, message):
    with pytest.raises(ValueError, match=message):
        largest(flat, k)


def bits_of(name, numel):
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(numel, dtype=np.float32)
    made = {
        "gaussian": normal,
        "heavy-tailed": normal**7,
        "zero": np.zeros_like(normal),
        "nearly all zero": np.where(rng.random(numel) < 1e-4, normal, np.float32(0)),
        "few values": np.round(normal),
        "sorted": np.sort(normal),
        "columns": np.where(np.arange(numel) % 64 == 3, normal * 100, normal),
        "one layer": np.where(np.arange(numel) < numel // 50, normal * 100, normal),
    }[name]
    return made.astype(np.float32).view(np.int32)


@pytest.mark.parametrize("density", [1e-5, 1e-3, 0.02, 0.1, 0.4])
@pytest.mark.parametrize(
    "name",
    ["gaussian", "heavy-tailed", "zero", "nearly all zero", "few values", "sorted", "columns",
     "one layer"],
)  # fmt: skip
def test_the_guess_spares_the_partition_of_everything(monkeypatch, name, density):
    monkeypatch.undo()  # real samples and chunks
    bits = bits_of(name, 300_000)
    k = int(density * len(bits))
    partitioned = []
    partition = np.partition
    monkeypatch.setattr(
        np, "partition", lambda a, kth: (partitioned.append(len(a)), partition(a, kth))[1]
    )
    for passes in (host, DEVICE):
        found = search.search(bits, k, passes)
        values = search.magnitudes(bits, np)
        assert len(np.unique(found)) == k
        assert np.array_equal(np.sort(values[found]), np.sort(values)[-k:])
    assert max(partitioned) < len(bits) // 2 + search.SAMPLES


@pytest.mark.parametrize("numel", [9, 64, 100_003])
def test_a_wrong_guess_costs_time_only(monkeypatch, numel):
    """Samples that are all too large, or all too small."""
    bits = np.random.default_rng(1).standard_normal(numel, dtype=np.float32).view(np.int32)
    values = search.magnitudes(bits, np)
    for wrong in (0, np.iinfo(np.int32).max, int(values.max())):
        monkeypatch.setattr(search, "sample", lambda b, xp, v=wrong: np.full(8, v, b.dtype))
        for k in (1, 3, numel // 2, numel - 1):
            for passes in (host, DEVICE):
                found = search.search(bits, k, passes)
                assert len(set(found.tolist())) == k
                assert np.array_equal(np.sort(values[found]), np.sort(values)[-k:])


def test_samples_come_from_all_over_and_stay_the_same():
    numel = 1000 * search.SAMPLES + 7
    bits = np.arange(numel, dtype=np.int32)
    drawn = search.sample(bits, np)
    edges = [numel * i // search.SAMPLES for i in range(search.SAMPLES + 1)]
    assert all(a <= b < c for a, b, c in zip(edges[:-1], drawn, edges[1:], strict=True))
    assert np.array_equal(drawn, search.sample(bits, np))


def test_samples_are_not_fooled_by_a_pattern(monkeypatch):
    monkeypatch.undo()
    for period in (2, 8, 64, 100, 128, 768, 1000, 1024):
        bits = (np.arange(1000 * search.SAMPLES, dtype=np.int64) % period == 1).astype(np.int32)
        share = search.sample(bits, np).mean() * period
        assert share == pytest.approx(1, abs=5 * (period / search.SAMPLES) ** 0.5)
