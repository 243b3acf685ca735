"""The public names and where they live, for type checkers and editors."""

from mpicomp import compress as compress
from mpicomp import observe as observe
from mpicomp.auto import (
    Auto as Auto,
)
from mpicomp.collectives import (
    Average as Average,
)
from mpicomp.collectives import (
    Max as Max,
)
from mpicomp.collectives import (
    Min as Min,
)
from mpicomp.collectives import (
    Product as Product,
)
from mpicomp.collectives import (
    Sum as Sum,
)
from mpicomp.collectives import (
    allgather as allgather,
)
from mpicomp.collectives import (
    allreduce as allreduce,
)
from mpicomp.collectives import (
    allreduce_ as allreduce_,
)
from mpicomp.collectives import (
    alltoall as alltoall,
)
from mpicomp.collectives import (
    barrier as barrier,
)
from mpicomp.collectives import (
    broadcast as broadcast,
)
from mpicomp.collectives import (
    broadcast_ as broadcast_,
)
from mpicomp.collectives import (
    reducescatter as reducescatter,
)
from mpicomp.compress import (
    ACPSGD as ACPSGD,
)
from mpicomp.compress import (
    CLTK as CLTK,
)
from mpicomp.compress import (
    DEFT as DEFT,
)
from mpicomp.compress import (
    DGC as DGC,
)
from mpicomp.compress import (
    QSGD as QSGD,
)
from mpicomp.compress import (
    THC as THC,
)
from mpicomp.compress import (
    BFloat16 as BFloat16,
)
from mpicomp.compress import (
    EFSign as EFSign,
)
from mpicomp.compress import (
    ExDyna as ExDyna,
)
from mpicomp.compress import (
    FetchSGD as FetchSGD,
)
from mpicomp.compress import (
    Float16 as Float16,
)
from mpicomp.compress import (
    GaussianK as GaussianK,
)
from mpicomp.compress import (
    GTopK as GTopK,
)
from mpicomp.compress import (
    Int4 as Int4,
)
from mpicomp.compress import (
    Int8 as Int8,
)
from mpicomp.compress import (
    MiCRO as MiCRO,
)
from mpicomp.compress import (
    Natural as Natural,
)
from mpicomp.compress import (
    NoCompression as NoCompression,
)
from mpicomp.compress import (
    OkTopk as OkTopk,
)
from mpicomp.compress import (
    OneBit as OneBit,
)
from mpicomp.compress import (
    PowerSGD as PowerSGD,
)
from mpicomp.compress import (
    RandomK as RandomK,
)
from mpicomp.compress import (
    SIDCo as SIDCo,
)
from mpicomp.compress import (
    SignSGD as SignSGD,
)
from mpicomp.compress import (
    Sketch as Sketch,
)
from mpicomp.compress import (
    TernGrad as TernGrad,
)
from mpicomp.compress import (
    Threshold as Threshold,
)
from mpicomp.compress import (
    TopK as TopK,
)
from mpicomp.errors import (
    MismatchError as MismatchError,
)
from mpicomp.errors import (
    MpicompError as MpicompError,
)
from mpicomp.errors import (
    StallError as StallError,
)
from mpicomp.optimizer import (
    DistributedOptimizer as DistributedOptimizer,
)
from mpicomp.replicate import (
    allgather_object as allgather_object,
)
from mpicomp.replicate import (
    broadcast_object as broadcast_object,
)
from mpicomp.replicate import (
    broadcast_optimizer_state as broadcast_optimizer_state,
)
from mpicomp.replicate import (
    broadcast_parameters as broadcast_parameters,
)
from mpicomp.world import (
    init as init,
)
from mpicomp.world import (
    is_initialized as is_initialized,
)
from mpicomp.world import (
    local_rank as local_rank,
)
from mpicomp.world import (
    local_size as local_size,
)
from mpicomp.world import (
    rank as rank,
)
from mpicomp.world import (
    shutdown as shutdown,
)
from mpicomp.world import (
    size as size,
)
from mpicomp.world import (
    stats as stats,
)

__version__: str
