"""The errors that mpicomp raises for reasons outside the caller's code."""


class MpicompError(RuntimeError):
    """Something in the environment is wrong: the MPI, the launch, another rank."""


class MismatchError(MpicompError):
    """Ranks disagree on the model, the compressor or the call; raised on every rank."""


class StallError(MpicompError):
    """A collective waited too long for ranks that never arrived."""
