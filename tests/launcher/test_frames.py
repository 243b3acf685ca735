"""Frames survive any cutting of the stream, and nothing else is taken for one."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomp_launch.frames import MAX_FRAME, MAX_PAYLOAD, Decoder, Frame, encode, encode_long

RANKS = st.integers(0, 10**9 - 1)
# Bytes that mean something are as frequent as all others together.
SPECIAL = st.sampled_from([b"\n", b"\x1d", b"\x1e", b"\x1dn", b"\x1e0 o "])
BYTES = st.lists(st.one_of(st.binary(min_size=1, max_size=8), SPECIAL)).map(b"".join)
PAYLOADS = BYTES.filter(lambda payload: len(payload) <= MAX_PAYLOAD)
FRAMES = st.builds(Frame, RANKS, st.sampled_from("oeOEsfFx"), PAYLOADS)
PLAIN = st.binary(min_size=1).filter(lambda line: not set(line) & set(b"\n\x1e"))


def decode(stream, cuts=()):
    decoder = Decoder()
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    items = [
        item
        for start, end in itertools.pairwise(places)
        for item in decoder.feed(stream[start:end])
    ]
    return [*items, *decoder.flush()]


@given(items=st.lists(st.one_of(FRAMES, PLAIN)), cuts=st.lists(st.integers(0, 10**6)))
def test_round_trip_at_any_cut(items, cuts):
    stream = b"".join(encode(*item) if isinstance(item, Frame) else item + b"\n" for item in items)
    assert decode(stream, cuts) == items


@given(rank=RANKS, payload=st.binary(max_size=MAX_PAYLOAD))
def test_a_frame_is_one_short_line(rank, payload):
    for worst in (payload, b"\n" * MAX_PAYLOAD):
        encoded = encode(rank, "o", worst)
        assert encoded.index(b"\n") == len(encoded) - 1 < MAX_FRAME
        assert encoded.rindex(b"\x1e") == 0


@pytest.mark.parametrize(
    "length", [0, 1, *(n * MAX_PAYLOAD + k for n in (1, 2) for k in (-1, 0, 1))]
)
def test_long_payloads(length):
    payload = bytes(n % 251 for n in range(length))
    found = decode(b"".join(encode_long(3, "f", payload)))
    assert b"".join(frame.payload for frame in found) == payload
    assert [frame.kind for frame in found] == ["F"] * (len(found) - 1) + ["f"]
    assert len(found) == max(1, -(-length // MAX_PAYLOAD))


@given(stream=BYTES, cuts=st.lists(st.integers(0, 10**6)))
def test_garbage_never_raises_nor_depends_on_cuts(stream, cuts):
    found = decode(stream, cuts)
    assert found == decode(stream)
    if b"\x1e" not in stream:
        assert b"\n".join(found) == stream.removesuffix(b"\n")


@pytest.mark.parametrize(
    ("line", "items"),
    [
        (b"text\x1e0 o hi", [b"text", Frame(0, "o", b"hi")]),
        (b"\x1e0 o cut off\x1e1 x {}", [b"\x1e0 o cut off", Frame(1, "x", b"{}")]),
        (b"\x1e0 q hi", [b"\x1e0 q hi"]),
        (b"\x1e", [b"\x1e"]),
        (b"\x1e9999999999 o hi", [b"\x1e9999999999 o hi"]),
        (b"\x1e-1 o hi", [b"\x1e-1 o hi"]),
        (b"", [b""]),
    ],
)
def test_lines_by_hand(line, items):
    assert decode(line + b"\n") == items


def test_a_line_waits_for_its_end():
    decoder = Decoder()
    assert list(decoder.feed(b"\x1e0 o h")) == []
    assert list(decoder.feed(b"i\nrest")) == [Frame(0, "o", b"hi")]
    assert list(decoder.flush()) == [b"rest"]
    assert list(decoder.flush()) == []
