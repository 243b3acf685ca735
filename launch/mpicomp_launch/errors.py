"""What goes wrong before a job starts."""


class LaunchError(Exception):
    """A mistake of the caller or of the environment; the text says what to do about it."""
