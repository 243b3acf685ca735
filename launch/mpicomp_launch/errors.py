"""What goes wrong with a job."""


class LaunchError(Exception):
    """A mistake of the caller or of the environment; the text says what to do about it."""


class RankError(LaunchError):
    """A rank of `run` has failed.

    Attributes:
        rank: Which one.
        host: Where it ran.
        text: How it failed, and its traceback.
    """

    def __init__(self, rank: int, host: str, text: str) -> None:
        super().__init__(rank, host, text)
        self.rank = rank
        self.host = host
        self.text = text

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.text}"
