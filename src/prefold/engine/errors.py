"""What the engine raises when it cannot go on."""

from __future__ import annotations


class EngineDeadError(RuntimeError):
    """A worker has failed; the engine cannot go on. The message says which, and how."""


class EngineFailedElsewhere(EngineDeadError):
    """The engine has failed in another process, which says so itself."""


class EngineRestartingError(EngineDeadError):
    """The engine has failed, and a new one is being started: try again soon."""


class QueueFullError(RuntimeError):
    """As many requests wait as may."""
