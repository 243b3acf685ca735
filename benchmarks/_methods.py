"""One setting of every method, for benchmarks that compare them all."""

from __future__ import annotations

from mpicomp.compress import available, parse

SPECS = [
    "none",
    "fp16",
    "bf16",
    "sketch:density=0.01",
    "fetchsgd:density=0.01",
    "powersgd:rank=2",
    "acpsgd:rank=2",
    "topk:density=0.01",
    "threshold:density=0.01",
    "randomk:density=0.01",
    "dgc:density=0.01",
    "gaussiank:density=0.01",
    "sidco:density=0.01",
    "gtopk:density=0.01",
    "cltk:density=0.01",
    "deft:density=0.01",
    "micro:density=0.01",
    "exdyna:density=0.01",
    "oktopk:density=0.01",
    "int8",
    "int4",
    "qsgd",
    "terngrad",
    "natural",
    "signsgd",
    "efsign",
    "onebit",
    "thc",
]


def has_momentum(spec: str) -> bool:
    """Whether the method applies momentum itself, so that the optimizer must not."""
    return bool(parse(spec).capabilities.momentum)


def check_complete() -> None:
    """Every registered method has its row."""
    names = sorted(spec.partition(":")[0] for spec in SPECS)
    assert names == available(), set(names) ^ set(available())
