"""Gradient compressors: what travels between ranks, without knowing how it travels."""

from .acpsgd import ACPSGD
from .base import (
    AllToAll,
    Broadcast,
    Bucket,
    Capabilities,
    Coded,
    Commit,
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
from .cltk import CLTK
from .deft import DEFT
from .dense import NoCompression
from .dgc import DGC
from .efsign import EFSign
from .exdyna import ExDyna
from .feedback import Feedback, with_feedback
from .fetchsgd import FetchSGD
from .gaussiank import GaussianK
from .gtopk import GTopK
from .integers import Int4, Int8
from .micro import MiCRO
from .natural import Natural
from .oktopk import OkTopk
from .onebit import OneBit
from .powersgd import PowerSGD
from .qsgd import QSGD
from .randomk import RandomK
from .registry import available, register
from .rules import Compression, assign, resolve
from .sidco import SIDCo
from .signsgd import SignSGD
from .simulate import Simulation, StepResult, bucket_of, simulate
from .sketch import Sketch
from .sparse import Sparse, SparseMean
from .specs import parse, spec_of
from .start_after import StartAfter
from .terngrad import TernGrad
from .thc import THC
from .threshold import Threshold
from .topk import TopK
from .values import Values
from .warmup import Warmup

__all__ = [
    "ACPSGD",
    "CLTK",
    "DEFT",
    "DGC",
    "QSGD",
    "THC",
    "AllToAll",
    "BFloat16",
    "Broadcast",
    "Bucket",
    "Capabilities",
    "Coded",
    "Commit",
    "Compression",
    "Compressor",
    "Decoded",
    "Dense",
    "EFSign",
    "Entry",
    "ExDyna",
    "Exchange",
    "Exchanged",
    "Feedback",
    "FetchSGD",
    "Float16",
    "GTopK",
    "Gather",
    "GatherV",
    "GaussianK",
    "Int4",
    "Int8",
    "Max",
    "Mean",
    "Message",
    "MiCRO",
    "Natural",
    "NoCompression",
    "OkTopk",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "SIDCo",
    "SignSGD",
    "Simulation",
    "Sketch",
    "Sparse",
    "SparseMean",
    "StartAfter",
    "State",
    "StepResult",
    "Sum",
    "TernGrad",
    "Threshold",
    "TopK",
    "Values",
    "Warmup",
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
