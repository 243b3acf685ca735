"""Flat vectors seen as rows that each have a scale of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from torch import Tensor

Tiles: TypeAlias = tuple[tuple[int, int], ...]  # (rows, columns) of matrices, one after another


def block_tiles(numel: int, block: int) -> Tiles:
    """Rows of ``block`` elements; the last one may be shorter."""
    whole, rest = divmod(numel, block)
    return merged([(whole, block), (1, rest)])


def merged(tiles: Iterable[tuple[int, int]]) -> Tiles:
    """The same rows in as few matrices as possible, none of them empty."""
    result: list[tuple[int, int]] = []
    for rows, columns in tiles:
        if rows * columns == 0:
            continue
        if result and result[-1][1] == columns:
            rows += result.pop()[0]
        result.append((rows, columns))
    return tuple(result)


def num_rows(tiles: Tiles) -> int:
    """How many rows there are, which is how many scales."""
    return sum(rows for rows, _ in tiles)


def views(flat: Tensor, tiles: Tiles) -> list[Tensor]:
    """The matrices (rows, columns) that ``flat`` consists of."""
    parts = flat.split([rows * columns for rows, columns in tiles])
    return [part.view(shape) for part, shape in zip(parts, tiles, strict=True)]


def columns(scales: Tensor, tiles: Tiles) -> list[Tensor]:
    """The part of ``scales`` (k,) that belongs to each matrix, as (rows, 1)."""
    return list(scales.unsqueeze(1).split([rows for rows, _ in tiles]))


def split(tiles: Tiles, bounds: Sequence[int]) -> list[Tiles]:
    """Cut at the positions ``bounds``, from 0 to the end: the tiles of each chunk between two.

    A row that lies across a bound becomes two rows.
    """
    chunks: list[list[tuple[int, int]]] = [[] for _ in bounds[1:]]
    position, chunk = 0, 0
    for rows, width in tiles:
        start, stop = position, position + rows * width
        while position < stop:
            while bounds[chunk + 1] <= position:
                chunk += 1
            room = min(stop, bounds[chunk + 1]) - position
            begun = (position - start) % width
            if begun or room < width:
                chunks[chunk].append((1, min(width - begun, room)))
            else:
                chunks[chunk].append((room // width, width))
            last_rows, last_width = chunks[chunk][-1]
            position += last_rows * last_width
    return [merged(chunk) for chunk in chunks]
