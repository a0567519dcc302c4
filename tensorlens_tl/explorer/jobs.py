"""Questions as jobs: one is answered at a time, its progress can be seen, and each can be cancelled.

A job that waits is dropped at once. One that runs stops where the library next notes its progress (before a run of the
model, at a block, at a stage of a chain or a chunk of rows), so that hooks and weights are put back as after any error.
"""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tensorlens_tl.algebra.progress import CancelledError, watching

MOST_JOBS = 16
"""Jobs that wait or run; further ones are refused."""


@dataclass(eq=False)
class Job:
    """One question on its way.

    Attributes:
        number: names it.
        view: the view that it computes.
        started: when it began to run, by `time.perf_counter`; None while it waits.
        what, share: what the library does, and how much of it is done, 0 to 1; None where it does not say.
        future: its answer.
    """

    number: int
    view: str
    started: float | None = None
    what: str = ""
    share: float | None = None
    future: Future[Any] = field(default_factory=Future[Any])
    _cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody wants its answer any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Drop it, or stop it where the library next notes its progress."""
        self._cancelled.set()
        self.future.cancel()

    def watch(self, what: str, share: float | None) -> None:
        """Take note of progress.

        Raises:
            CancelledError: it was cancelled.
        """
        if self._cancelled.is_set():
            raise CancelledError
        if not what:
            return
        is_under_way = share is not None and share < 1
        self.what = what if is_under_way else ""
        self.share = share if is_under_way else None

    def describe(self) -> dict[str, Any]:
        """What the page shows of it."""
        seconds = None
        if self.started is not None:
            seconds = time.perf_counter() - self.started
        return {"id": self.number, "view": self.view, "seconds": seconds, "what": self.what, "share": self.share}


class Jobs:
    """Runs jobs one at a time, in a thread of their own, so that a model is never used twice at once.

    >>> from tensorlens_tl.explorer.jobs import Jobs
    >>> jobs = Jobs()
    >>> jobs.submit("sum", lambda: 1 + 1).future.result()
    2
    >>> jobs.close()
    """

    def __init__(self, most: int = MOST_JOBS) -> None:
        self._most = most
        self._numbers = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._closed = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="explorer")

    @property
    def is_full(self) -> bool:
        """Whether as many jobs wait or run as may."""
        return len(self._jobs) >= self._most

    def submit(self, view: str, work: Callable[[], Any]) -> Job:
        """Put a job at the end of the queue; after `close` it is cancelled at once."""
        job = Job(next(self._numbers), view)
        self._jobs[job.number] = job
        job.future.add_done_callback(lambda _: self._jobs.pop(job.number, None))
        if self._closed:
            job.cancel()
        else:
            self._worker.submit(self._run, job, work)
        return job

    def _run(self, job: Job, work: Callable[[], Any]) -> None:
        if job.is_cancelled or not job.future.set_running_or_notify_cancel():
            return
        job.started = time.perf_counter()
        try:
            with watching(job.watch):
                answer = work()
        except BaseException as error:
            job.future.set_exception(error)
        else:
            job.future.set_result(answer)

    def cancel(self, number: int) -> bool:
        """Cancel a job.

        Args:
            number: its `Job.number`.

        Returns:
            Whether there was such a job.
        """
        job = self._jobs.get(number)
        if job is not None:
            job.cancel()
        return job is not None

    def describe(self) -> list[dict[str, Any]]:
        """All jobs that run or wait, in their order."""
        return [job.describe() for job in list(self._jobs.values())]

    def close(self) -> None:
        """Cancel every job, and take no more."""
        self._closed = True
        for job in list(self._jobs.values()):
            job.cancel()
        self._worker.shutdown(wait=False, cancel_futures=True)
