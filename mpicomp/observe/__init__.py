"""Looking on while training goes: a time line, scalars for TensorBoard, and Prometheus."""

from __future__ import annotations

from mpicomp.observe.tensorboard import TensorBoard as TensorBoard

__all__ = ["TensorBoard"]
