"""The Walsh-Hadamard transform of many blocks at once.

It spreads every element over its whole block: after a change of random signs, all coefficients of
a block are about equally large.

Reference: N. Ailon and B. Chazelle, "The Fast Johnson-Lindenstrauss Transform and Approximate
Nearest Neighbors", SIAM Journal on Computing, 2009, section 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(blocks: Tensor) -> Tensor:
    """The orthonormal transform of each row of ``blocks`` (b, size); its own inverse.

    The matrix of size r c is the Kronecker product of those of sizes r and c, so two products with
    small matrices do: faster than log2(size) passes of additions. The result is in fresh memory.

    Args:
        blocks: floating point, ``size`` a power of two.
    """
    size = blocks.shape[1]
    columns = 1 << (size.bit_length() // 2)
    rows = size // columns
    scaled = _matrix(columns, blocks) * size**-0.5  # first, so that sums do not overflow
    inner = blocks.reshape(-1, columns) @ scaled
    both: Tensor = _matrix(rows, blocks) @ inner.view(-1, rows, columns)
    return both.view(blocks.shape)


def _matrix(size: int, like: Tensor) -> Tensor:
    """Sylvester's matrix (size, size) of 1 and -1, in the type and place of ``like``."""
    matrix = like.new_ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([matrix.repeat(1, 2), torch.cat([matrix, -matrix], dim=1)])
    return matrix
