"""signSGD with majority vote: every rank votes for the sign of every element.

References: J. Bernstein, Y.-X. Wang, K. Azizzadenesheli and A. Anandkumar, "signSGD: Compressed
Optimisation for Non-Convex Problems", ICML 2018, algorithm 3; J. Bernstein, J. Zhao, K.
Azizzadenesheli and A. Anandkumar, "signSGD with Majority Vote is Communication Efficient and Fault
Tolerant", ICLR 2019, algorithm 1. Their momentum is left to the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Bucket, Capabilities, Compressor, Exchange, State
from .codecs import Grid, Signs, check_per, rows_of, signs_help
from .registry import register
from .tiles import Tiles
from .two_sided import average_codes


@register("signsgd")
@dataclass(frozen=True)
class SignSGD(Compressor):
    """The sign that most ranks have, 0 for a tie; a zero votes as positive.

    A row of zeros abstains. Votes take one bit; the result, which may be 0, takes two.

    Args:
        scale: the magnitude of the result; ``mean`` is the mean magnitude of the ranks' gradients,
            ``one`` is 1, as in the papers.
        per: what has a magnitude of its own, a whole ``parameter`` or each ``row`` of its matrix.
    """

    scale: str = "mean"
    per: str = "parameter"

    capabilities: ClassVar[Capabilities] = Capabilities(
        biased=True,
        stateful=False,
        linear=False,
        rounds=2,
        min_ndim=2,
        chunks=True,
        mean_of_sent=False,
        conserves=False,
    )

    def __post_init__(self) -> None:
        if self.scale not in ("mean", "one"):
            raise ValueError(f"signsgd: scale must be one of mean, one, got {self.scale!r}")
        check_per("signsgd", self.per)

    def helps(self, shape: tuple[int, ...]) -> bool:
        return super().helps(shape) and signs_help(shape, self.per, scale_bytes=4)

    def exchange(self, bucket: Bucket, state: State) -> Exchange:
        unit = self.scale == "one"
        return (
            yield from average_codes(
                bucket,
                rows_of(bucket, self.per),
                align=8,
                codec=UnitSigns() if unit else Signs(),
                back=Grid(bits=2),
                combine=vote if unit else scaled_vote,
            )
        )


class UnitSigns(Signs):
    """As `Signs`, with 1 for the mean magnitude of a row that is not zero."""

    def encode(self, tiles: Tiles, x: Tensor) -> tuple[Tensor, Tensor]:
        scales, codes = super().encode(tiles, x)
        return torch.where(scales == 0, scales, scales / scales), codes  # NaN for infinity


def vote(parts: Sequence[Tensor]) -> Tensor:
    """The sign of most of ``parts``, which are 1, 0 or -1; 0 for a tie."""
    total = parts[0]
    for part in parts[1:]:
        total.add_(part)
    return total.div_(total.abs().clamp_(min=1))  # unlike a sign it keeps NaN


def scaled_vote(parts: Sequence[Tensor]) -> Tensor:
    """The sign of most of ``parts`` times their mean magnitude."""
    signs, size = torch.zeros_like(parts[0]), torch.zeros_like(parts[0])
    for part in parts:
        signs.add_(part.sign())
        size.add_(part.abs())
    return size.div_(len(parts)).mul_(signs.sign_())
