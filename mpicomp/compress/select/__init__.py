"""Which elements of a flat tensor are the largest: the costly half of every top-k method."""

from .exact import largest, largest_by_sort
from .threshold import above, above_at_most, blocks

__all__ = ["above", "above_at_most", "blocks", "largest", "largest_by_sort"]
