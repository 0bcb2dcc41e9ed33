"""Bounds on request bodies: time to arrive, and bytes of all requests together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aiohttp import hdrs, web

from afd_gateway.errors import GatewayError
from afd_gateway.settings import GatewaySettings

_CHECK_S = 0.1


@dataclass(eq=False)
class _Upload:
    """A body that is still arriving. began, moved: clock seconds of its start and last bytes."""

    request: web.Request
    began: float
    moved: float
    size: int = 0


def is_too_slow(
    *, elapsed_s: float, silent_s: float, size: int, timeout_s: float, min_bytes_per_s: float
) -> bool:
    """Whether to give up a body of which ``size`` bytes have arrived after ``elapsed_s``.

    silent_s: time since its last bytes. timeout_s: bounds the silence, and is allowed on top of
    what ``min_bytes_per_s`` allows for the bytes so far.
    """
    return silent_s >= timeout_s or elapsed_s >= timeout_s + size / min_bytes_per_s


class Bodies:
    """The bodies of all running requests. Call it on the event loop.

    refused: called with the reason: "bodies" or "body_timeout".
    """

    def __init__(self, settings: GatewaySettings, refused: Callable[[str], None]) -> None:
        self._settings = settings
        self._refused = refused
        self._uploads: set[_Upload] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.held = 0  # bytes that arrived, of all requests

    @contextlib.contextmanager
    def hold(self, request: web.Request) -> Iterator[None]:
        """Watches the body of ``request`` while the block runs; counts its bytes until the end.

        Raises GatewayError 503 if there is no room for it. Inside the block, reading the body
        raises GatewayError 408 (too slow) or 503 (no room left).
        """
        if not request.body_exists:
            yield
            return
        declared = request.content_length or 0
        allowed = declared <= self._settings.max_body_bytes  # else: 413 by its reader
        if allowed and self.held + declared > self._settings.max_total_body_bytes:
            raise self._no_room()
        now = asyncio.get_running_loop().time()
        upload = _Upload(request, now, now)
        self._update(upload, now)
        if not request.content.is_eof():
            self._uploads.add(upload)
            self._start()
        try:
            yield
        finally:
            self._uploads.discard(upload)
            self.held -= upload.size

    def _no_room(self) -> GatewayError:
        self._refused("bodies")
        return GatewayError(
            503,
            "the requests that the gateway handles are too large together; try again later",
            {"Retry-After": str(self._settings.retry_after_s), hdrs.CONNECTION: "close"},
        )

    def _start(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check)

    def _update(self, upload: _Upload, now: float) -> None:
        size = upload.request.content.total_bytes
        if size != upload.size:
            self.held += size - upload.size
            upload.size, upload.moved = size, now

    def _check(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for upload in tuple(self._uploads):
            self._update(upload, now)
            if upload.request.content.is_eof():
                self._uploads.discard(upload)
        for upload in sorted(self._uploads, key=lambda upload: -upload.began):
            if self.held > self._settings.max_total_body_bytes:  # the latest ones first
                self._give_up(upload, self._no_room())
            elif is_too_slow(
                elapsed_s=now - upload.began,
                silent_s=now - upload.moved,
                size=upload.size,
                timeout_s=self._settings.body_timeout_s,
                min_bytes_per_s=self._settings.min_body_bytes_per_s,
            ):
                self._refused("body_timeout")
                words = "the request body did not arrive in time"
                self._give_up(upload, GatewayError(408, words, {hdrs.CONNECTION: "close"}))
        if self._uploads:
            self._start()

    def _give_up(self, upload: _Upload, error: GatewayError) -> None:
        self._uploads.discard(upload)
        self.held -= upload.size
        upload.size = 0
        upload.request.content.set_exception(error)  # raised by the reader
