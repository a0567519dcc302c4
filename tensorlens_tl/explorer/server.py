"""The explorer's page over HTTP, for the browser of this machine alone.

Safe by default: it listens on the loopback address; every question needs the random token of the page's address;
another Host or Origin is refused; bodies and waiting questions are bounded. Questions are answered one at a time
(`tensorlens_tl.explorer.jobs`); one whose page went away, or asked something else since, is cancelled.
"""

import asyncio
import json
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError as FutureCancelledError
from contextlib import suppress
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

from tensorlens_tl.algebra.progress import CancelledError
from tensorlens_tl.drawing.page import asset
from tensorlens_tl.errors import InvalidInputError, TensorLensError
from tensorlens_tl.explorer.images import LARGEST_FILE
from tensorlens_tl.explorer.jobs import Jobs
from tensorlens_tl.explorer.session import Session

STATIC = Path(__file__).parent / "static"
SHARED = ("base.css", "page.css")
"""Style sheets that reports have too."""
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
        except OSError as error:
            raise InvalidInputError(f"explore: cannot listen on port {port}: {error}. Use --port 0.") from error
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
        self._app = Starlette(routes=routes)
        options = {"interface": "asgi3", "lifespan": "off", "proxy_headers": False, "server_header": False}
        config = uvicorn.Config(self._guarded, log_level="warning", timeout_graceful_shutdown=2, **options)
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ running

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

    # ------------------------------------------------------------------ requests

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
        fields = await _fields(request)
        if isinstance(fields, Response):
            return fields
        number = fields.get("id")
        if type(number) is not int:
            return _error(400, "explorer: id is missing; send the number of a job.")
        return JSONResponse({"cancelled": self.jobs.cancel(number)})

    async def _upload(self, request: Request) -> Response:
        """Read an image file, decoded in its turn; answers with its name."""
        try:
            file = await _body(request, LARGEST_FILE)
        except ClientDisconnect:
            return _error(499, "The page went away.")
        if file is None:
            return _error(413, f"An image file has at most {LARGEST_FILE} bytes.")
        return await self._in_turn(request, "upload", lambda: {"image": self.session.images.add(file)})

    async def _answer(self, request: Request) -> Response:
        """One view, in its turn."""
        fields = await _fields(request)
        if isinstance(fields, Response):
            return fields
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


async def _fields(request: Request) -> dict[str, Any] | Response:
    """The JSON object that was sent, or why it is refused."""
    try:
        body = await _body(request)
        if body is None:
            return _error(413, f"A question has at most {LARGEST_BODY} bytes.")
        fields = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        fields = None
    except ClientDisconnect:
        return _error(499, "The page went away.")
    if not isinstance(fields, dict):
        return _error(400, "A question is a JSON object.")
    return fields


async def _body(request: Request, most: int = LARGEST_BODY) -> bytes | None:
    """What was sent; None as soon as it is more than so many bytes."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            return None
    return bytes(body)


async def _shared(name: str, request: Request) -> Response:
    return Response(asset(name), media_type="text/css")


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)
