"""Random draws that ranks share, or keep apart, without touching the user's generators."""

from __future__ import annotations

import hashlib
from collections.abc import Generator

import torch
from torch import Tensor

from .base import Answer, Broadcast, Bucket, Message, State


def generator(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own, whose numbers depend on ``key`` alone: equal keys, equal draws.

    Args:
        key: what tells this draw from others: method, seed, step, name, and the rank where ranks
            are to draw differently. Numbers and strings.
        device: generators of different kinds of device give different numbers.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def own_generator(bucket: Bucket, *key: object) -> torch.Generator:
    """Random numbers of one rank and bucket, on the bucket's device."""
    return generator(*key, next(iter(bucket), None), bucket.rank, device=bucket.flat.device)


def no_seed(bucket: Bucket) -> dict[str, Tensor]:
    """The slot ``seed`` before any exchange."""
    return {name: torch.tensor(-1, dtype=torch.int64) for name in bucket}


def agreed_seed(seed: int, state: State) -> Generator[Message, Answer, int]:
    """Rank 0's ``seed``: broadcast in a bucket's first step, then taken from the slot ``seed``.

    The commit has to put it there, with `set_scalar`. Any integer will do; a negative one comes
    out as another, from 0 up.
    """
    known = {int(tensor) for tensor in state["seed"].values()}
    if len(known) == 1 and known != {-1}:
        return known.pop()
    own = torch.tensor([seed % 2**63], dtype=torch.int64)  # -1 is no seed
    (answer,) = yield Broadcast((own,))
    return int(answer)
