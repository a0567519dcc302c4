"""Progress reports of long work, and cancelling it.

The library calls `note_progress` before each run of a model, at each of its blocks, at each stage of a chain and at
each chunk of rows. This calls the function passed to `watching`, if there is one, which may raise `CancelledError`. The
error is only raised during the work itself, never during clean-up: hooks and weights are restored as after any error.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

Watcher = Callable[[str, float | None], None]
"""Called with a description of the current work (may be empty) and the share that is done, 0 to 1, or None."""

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


class CancelledError(BaseException):
    """Work was cancelled. Not an `Exception`, so that no handler takes it for a failure and carries on."""


@contextmanager
def watching(watcher: Watcher) -> Generator[None, None, None]:
    """Call a function at each progress report in this thread while the context is open.

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
    """Return whether this thread's progress is watched."""
    return _watcher.get() is not None


def note_progress(what: str = "", share: float | None = None) -> None:
    """Report progress to the function that watches this thread, if there is one.

    Args:
        what: the current work.
        share: the share of it that is done, 0 to 1.
    """
    watcher = _watcher.get()
    if watcher is not None:
        watcher(what, share)
