"""Gradient compressors: what travels between ranks, without knowing how it travels."""

from .base import (
    AllToAll,
    Broadcast,
    Bucket,
    Capabilities,
    Compressor,
    Decoded,
    Dense,
    Entry,
    Exchange,
    Exchanged,
    Gather,
    GatherV,
    Max,
    Mean,
    Message,
    State,
    Sum,
    all_finite,
)
from .cast import BFloat16, Float16
from .dense import NoCompression
from .feedback import Feedback, with_feedback
from .gaussiank import GaussianK
from .powersgd import PowerSGD
from .randomk import RandomK
from .registry import available, parse, register, spec_of
from .rules import Compression, assign, resolve
from .sidco import SIDCo
from .simulate import Simulation, StepResult, bucket_of, simulate
from .sparse import Sparse, SparseMean
from .threshold import Threshold
from .topk import TopK

__all__ = [
    "AllToAll",
    "BFloat16",
    "Broadcast",
    "Bucket",
    "Capabilities",
    "Compression",
    "Compressor",
    "Decoded",
    "Dense",
    "Entry",
    "Exchange",
    "Exchanged",
    "Feedback",
    "Float16",
    "Gather",
    "GatherV",
    "GaussianK",
    "Max",
    "Mean",
    "Message",
    "NoCompression",
    "PowerSGD",
    "RandomK",
    "SIDCo",
    "Simulation",
    "Sparse",
    "SparseMean",
    "State",
    "StepResult",
    "Sum",
    "Threshold",
    "TopK",
    "all_finite",
    "assign",
    "available",
    "bucket_of",
    "parse",
    "register",
    "resolve",
    "simulate",
    "spec_of",
    "with_feedback",
]
