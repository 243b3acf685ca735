"""Which elements of a flat tensor are the largest: the costly half of every top-k method."""

from .exact import largest

__all__ = ["largest"]
