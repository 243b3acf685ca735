"""Numbers on command lines; argparse says which option has a wrong one."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def quantity(text: str) -> float:
    """A finite number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number from 0 on, got {text!r}")
    return value


def megabytes(text: str) -> float:
    """A size that is at least 1 KB."""
    value = quantity(text)
    if value < 0.001:
        raise argparse.ArgumentTypeError(f"must be at least 0.001, got {text!r}")
    return value
