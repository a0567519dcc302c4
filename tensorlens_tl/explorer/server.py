"""The explorer's page over HTTP, for the browser of this machine alone.

Safe by default: it listens on the loopback address; every question needs the random token of the page's address;
another Host or Origin is refused; bodies and waiting questions are bounded. Questions are jobs, answered one at a time;
one whose page went away, or asked something else since, is cancelled. A job that waits is dropped at once. One that
runs stops where the library next notes its progress (before a run of the model, at a block, at a stage of a chain or a
chunk of rows), so that hooks and weights are put back as after any error.
"""

import asyncio
import itertools
import json
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError as FutureCancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

from tensorlens_tl.algebra.progress import CancelledError, watching
from tensorlens_tl.drawing.page import asset
from tensorlens_tl.errors import InvalidInputError, TensorLensError
from tensorlens_tl.explorer.images import LARGEST_FILE
from tensorlens_tl.explorer.session import Session

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

    def cancel(self) -> None:
        """Drop it, or stop it where the library next notes its progress."""
        self._cancelled.set()
        self.future.cancel()

    def watch(self, what: str, share: float | None) -> None:
        """Take note of progress."""
        if self._cancelled.is_set():
            raise CancelledError
        if not what:
            return
        is_under_way = share is not None and share < 1
        self.what = what if is_under_way else ""
        self.share = share if is_under_way else None

    def describe(self) -> dict[str, Any]:
        """What the page shows of it."""
        seconds = None if self.started is None else time.perf_counter() - self.started
        return {"id": self.number, "view": self.view, "seconds": seconds, "what": self.what, "share": self.share}


class Jobs:
    """Runs jobs one at a time, in a thread of their own, so that a model is never used twice at once.

    >>> from tensorlens_tl.explorer.server import Jobs
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
        if not job.future.set_running_or_notify_cancel():
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
        """Cancel the job of this number; return whether there was one."""
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


STATIC = Path(__file__).parent / "static"
SHARED = {
    **dict.fromkeys(("base.css", "page.css", "graph.css"), "text/css"),
    **dict.fromkeys(("script.js", "graph.js"), "text/javascript"),
}
"""What the pages of results have too."""
LARGEST_BODY = 256 * 1024
"""Bytes of a question."""
PATIENCE = 0.05
"""Seconds between two looks whether a page still waits for its answer."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
"""Of every answer: nothing is loaded from elsewhere, and the token in the address goes nowhere."""


class Server:
    """Serves the page of one session on this machine until it is closed.

    Args:
        session: answers the questions.
        port: where it listens; 0 takes a free one.

    Raises:
        InvalidInputError: the port is taken.

    Attributes:
        token: what the page's address and every question carry.
        url: the page's address.
    """

    def __init__(self, session: Session, port: int = 0) -> None:
        self.session = session
        self.token = secrets.token_urlsafe(16)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("127.0.0.1", port))
            self._socket.listen()  # a page that is opened at once waits for the server
        except (OSError, OverflowError, TypeError) as error:
            raise InvalidInputError(
                f"explore: cannot listen on port {port}: {str(error).rstrip('.')}. Use --port 0."
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/?token={self.token}"
        self._hosts = {f"{host}:{self.port}" for host in ("127.0.0.1", "localhost")}
        self.jobs = Jobs()
        routes = [
            Route("/", self._page),
            Route("/api/jobs", self._list, methods=["POST"]),
            Route("/api/cancel", self._cancel, methods=["POST"]),
            Route("/api/upload", self._upload, methods=["POST"]),
            Route("/api/{view}", self._answer, methods=["POST"]),
            *(Route(f"/static/{name}", partial(_shared, name)) for name in SHARED),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        self._app = Starlette(routes=routes, exception_handlers={RefusedError: _refuse, ClientDisconnect: _refuse})
        options = {"interface": "asgi3", "lifespan": "off", "proxy_headers": False, "server_header": False}
        config = uvicorn.Config(self._guarded, log_level="warning", timeout_graceful_shutdown=2, **options)
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Serve until Ctrl-C, or until `close` is called from another thread."""
        try:
            with suppress(KeyboardInterrupt):  # uvicorn raises it once more after it has ended
                self._server.run(sockets=[self._socket])
        finally:
            self.jobs.close()

    def start(self) -> None:
        """Serve in a thread, until `close`."""
        self._thread = threading.Thread(target=self.run, name="explorer server", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def close(self) -> None:
        """Stop serving; what is being answered is cancelled."""
        self.jobs.close()
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout=5)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, for requests of this page alone, with `HEADERS` on every answer."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: the browser reads 403
        if scope["type"] != "http":
            return
        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        """Why a request is not answered; None where it is."""
        host = request.headers.get("host", "")
        origin = request.headers.get("origin")
        if host not in self._hosts or origin not in (None, *(f"http://{host}" for host in self._hosts)):
            return _error(403, "This page answers to the browser of its own machine only.")
        if request.url.path.startswith("/static/"):
            return None
        token = request.headers.get("x-token") or request.query_params.get("token") or ""
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return _error(403, "The token is missing or wrong: open the address that the command printed.")
        return None

    async def _page(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def _list(self, request: Request) -> Response:
        """The jobs that run and wait."""
        return JSONResponse({"jobs": self.jobs.describe()})

    async def _cancel(self, request: Request) -> Response:
        """Cancel one job."""
        number = (await _fields(request)).get("id")
        if type(number) is not int:
            return _error(400, "explorer: id is missing; send the number of a job.")
        return JSONResponse({"cancelled": self.jobs.cancel(number)})

    async def _upload(self, request: Request) -> Response:
        """Read an image file, decoded in its turn; answers with its name."""
        file = await _body(request, "An image file", LARGEST_FILE)
        return await self._in_turn(request, "upload", lambda: {"image": self.session.images.add(file)})

    async def _answer(self, request: Request) -> Response:
        """One view, in its turn."""
        fields = await _fields(request)
        view = request.path_params["view"]
        if view == "about":
            return await self._in_turn(request, view, self.session.about)
        return await self._in_turn(request, view, lambda: self.session.view(view, fields))

    async def _in_turn(self, request: Request, view: str, answer: Callable[[], dict[str, Any]]) -> Response:
        """What a job of this name answers; the job is cancelled where the page goes away."""
        if self.jobs.is_full:
            return _error(503, "Too many questions are waiting; ask again in a moment.")
        job = self.jobs.submit(view, partial(self._response, answer))
        answered = asyncio.wrap_future(job.future)
        answered.add_done_callback(lambda future: future.cancelled() or future.exception())
        while not job.future.done():
            await asyncio.wait([answered], timeout=PATIENCE)
            if self._server.should_exit or await request.is_disconnected():
                job.cancel()
                return _error(499, "The page went away.")
        try:
            return job.future.result()
        except (CancelledError, FutureCancelledError):
            return _error(499, "Cancelled.")

    def _response(self, answer: Callable[[], dict[str, Any]]) -> Response:
        """One answer, or why there is none; a fault of ours is told to the page and printed with its traceback."""
        start = time.perf_counter()
        try:
            return JSONResponse(answer() | {"seconds": time.perf_counter() - start})
        except TensorLensError as error:
            return _error(400, str(error))
        except Exception as error:  # one question must not end the page
            traceback.print_exc(file=sys.stderr)
            return _error(500, f"{type(error).__name__}: {error}")


class RefusedError(Exception):
    """A request that is answered with a status and why; it ends the function that reads it."""


async def _refuse(request: Request, error: Exception) -> Response:
    """The answer to a request that was refused, or whose page went away meanwhile."""
    return _error(*error.args) if isinstance(error, RefusedError) else _error(499, "The page went away.")


async def _fields(request: Request) -> dict[str, Any]:
    """The JSON object that was sent; raises `RefusedError`."""
    try:
        fields = json.loads(await _body(request, "A question", LARGEST_BODY) or b"{}")
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise RefusedError(400, "A question is a JSON object.")
    return fields


async def _body(request: Request, what: str, most: int) -> bytes:
    """The bytes that were sent; raises `RefusedError` as soon as they are too many."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise RefusedError(413, f"{what} has at most {most} bytes.")
    return bytes(body)


async def _shared(name: str, request: Request) -> Response:
    return Response(asset(name), media_type=SHARED[name])


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)
