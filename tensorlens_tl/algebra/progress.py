"""Long work that somebody watches: how far it is, and where it can be stopped.

The library calls `note_progress` before each run of a model, at each of its blocks, at each stage of a chain and at
each chunk of rows. Nothing happens there unless the caller watches (`watching`): then the caller's function is called,
which may raise `CancelledError`. It is raised where the library works, never inside what cleans up after it, so that
hooks and weights are put back as after any error.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

Watcher = Callable[[str, float | None], None]
"""Called with what is being done (empty where nothing is said) and how much of it is, 0 to 1, or None."""

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


class CancelledError(BaseException):
    """Work that was stopped. It is no `Exception`, so that nothing takes it for a failure and goes on without it."""


@contextmanager
def watching(watcher: Watcher) -> Generator[None, None, None]:
    """Have a function called as work inside goes on, in this thread.

    >>> from tensorlens_tl.algebra.progress import note_progress, watching
    >>> with watching(lambda what, share: print(what, share)):
    ...     note_progress("rows", 0.5)
    rows 0.5
    """
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def is_watched() -> bool:
    """Whether this thread's work is watched."""
    return _watcher.get() is not None


def note_progress(what: str = "", share: float | None = None) -> None:
    """Tell whoever watches this thread's work; nothing where nobody does.

    Args:
        what: is being done.
        share: of it that is done, 0 to 1.
    """
    watcher = _watcher.get()
    if watcher is not None:
        watcher(what, share)
