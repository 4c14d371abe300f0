"""The orchestrators behind a proxy: which are alive, which is least busy, and calls that move on to the next one.

A request may go to any of them. One that is refused before it was accepted (starting, draining, dead, queue full) is
tried at the next; an accepted request stays where it is. With several upstreams their load is asked for twice a second;
with a single one there is nothing to choose, and nothing is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc

from protos import preheat_pb2
from protos.orchestrator_pb2 import DecodeRequest, DecodeResponse
from server.client import AsyncClient, DecodeCall
from server.errors import QueueFull, ServerError, TimedOut, Unavailable

if TYPE_CHECKING:
    from protos.preheat_pb2_grpc import PreheatAsyncStub

Request = TypeVar("Request")
Response = TypeVar("Response")

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
STATE_TIMEOUT = 5.0  # seconds that an orchestrator may take to tell its state
RETRY_UNREACHABLE = 1.0  # seconds after which a client may try again
Metadata = Sequence[tuple[str, str]]
_Item = tuple[int, DecodeResponse | BaseException | None]  # index of the prompt; None: its call has ended


@dataclasses.dataclass
class Upstream:
    """One orchestrator as this proxy sees it."""

    client: AsyncClient
    state: str = "connecting"  # what it last said; "connecting" before that, "unreachable" when it no longer answers
    running: int = 0
    waiting: int = 0
    slots: int = 1
    reason: str = ""
    calls: int = 0  # of this proxy, in progress

    @property
    def load(self) -> float:
        """Sequences per slot, as well as this proxy knows."""
        return max(self.calls, self.running + self.waiting) / max(self.slots, 1)

    @property
    def alive(self) -> bool:
        """It serves, or it may still come up."""
        return self.state not in ("failed", "unreachable")

    async def ask_state(self) -> str:
        """Asks for its state, and remembers it."""
        try:
            answer = await self.client.call(lambda preheat: preheat.State, preheat_pb2.StateRequest(), timeout=STATE_TIMEOUT)
        except TimedOut:
            # Busy compiling, with nothing left for this. Ready servers answer in time.
            self.state = self.state if self.state in ("connecting", "loading", "warming") else "unreachable"
        except ServerError as error:
            self.state = "connecting" if self.state == "connecting" else "unreachable"
            self.reason = error.message
        else:
            self.state, self.reason = answer.state, answer.reason
            self.running, self.waiting, self.slots = answer.running, answer.waiting, answer.slots
        return self.state


class Upstreams:
    """The orchestrators of a proxy. `start` and `stop` run in its event loop, as does everything else."""

    def __init__(self, addresses: Sequence[str], ca: Path | None = None):
        self._addresses = tuple(addresses)
        self._ca = ca
        self._poll: asyncio.Task[None] | None = None
        self._invalid = 0  # requests refused here and not yet reported
        self.all: list[Upstream] = []

    async def start(self) -> None:
        self.all = [Upstream(AsyncClient(address, ca=self._ca)) for address in self._addresses]
        self._poll = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._poll is not None:
            self._poll.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poll
        await asyncio.gather(*(upstream.client.close() for upstream in self.all))

    async def ask_states(self) -> list[str]:
        return list(await asyncio.gather(*(upstream.ask_state() for upstream in self.all)))

    def by_preference(self) -> list[Upstream]:
        """Ready ones first, the least busy of them first; then those of which nothing is known; the dead last."""
        rank = {"ready": 0, "connecting": 1, "loading": 2, "warming": 2, "draining": 3}
        return sorted(self.all, key=lambda upstream: (rank.get(upstream.state, 4), upstream.load))

    async def start_decode(self, request: DecodeRequest, metadata: Metadata) -> tuple[Upstream, DecodeCall]:
        """Has a request accepted by the best upstream that takes it; raises what the best of them said if none does."""
        refusal: ServerError | None = None
        for upstream in self.by_preference():
            upstream.calls += 1
            try:
                call = await upstream.client.start(request, metadata=metadata)
                upstream.state = "ready"
                return upstream, call
            except (Unavailable, QueueFull) as error:
                upstream.calls -= 1
                refusal = refusal or error
            except BaseException:
                upstream.calls -= 1
                raise
        assert refusal is not None
        raise _with_retry(refusal)

    async def call(
        self,
        method: Callable[[PreheatAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        metadata: Metadata = (),
    ) -> Response:
        """Calls a method of the Preheat service, at the best upstream that answers."""
        refusal: ServerError | None = None
        for upstream in self.by_preference():
            try:
                return await upstream.client.call(method, request, metadata=metadata)
            except Unavailable as error:
                refusal = refusal or error
        assert refusal is not None
        raise _with_retry(refusal)

    def count_invalid(self) -> None:
        """A request for an answer was refused here; it is reported to an orchestrator's metrics."""
        self._invalid += 1

    async def report_invalid(self) -> None:
        count, self._invalid = self._invalid, 0
        if count:
            try:
                await self.call(lambda preheat: preheat.CountInvalid, preheat_pb2.CountInvalidRequest(count=count))
            except ServerError:
                self._invalid += count  # kept until an orchestrator is there

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.report_invalid()
            if len(self.all) > 1:
                await self.ask_states()


def _with_retry(error: ServerError) -> ServerError:
    if error.retry_after is None:
        error.retry_after = RETRY_UNREACHABLE
    return error


class Generation:
    """The calls of one HTTP request, one per prompt, and their messages as they come.

    Whoever has opened one must `close` it, so that no call is left running.
    """

    def __init__(self, upstreams: Upstreams, requests: Sequence[DecodeRequest], metadata: Metadata):
        self._upstreams = upstreams
        self._requests = requests
        self._metadata = metadata
        self._calls: list[tuple[Upstream, DecodeCall]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        return len(self._requests)

    async def open(self) -> Generation:
        """Returns itself once all prompts are accepted; if one is refused, none runs."""
        try:
            for request in self._requests:
                self._calls.append(await self._upstreams.start_decode(request, self._metadata))
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Cancels what still runs."""
        for task in self._tasks:
            task.cancel()
        calls, self._calls = self._calls, []
        for upstream, call in calls:
            upstream.calls -= 1
            call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def messages(self) -> AsyncIterator[tuple[int, DecodeResponse]]:
        """(index of the prompt, message), in the order of arrival. Raises what any of the calls fails with."""
        if len(self._calls) == 1:
            async for message in self._calls[0][1]:
                yield 0, message
            return
        # Bounded, so that a client that reads slowly slows the calls, whose messages then get fewer and bigger.
        queue: asyncio.Queue[_Item] = asyncio.Queue(len(self._calls))
        self._tasks = [asyncio.create_task(_forward(index, call, queue)) for index, (_, call) in enumerate(self._calls)]
        left = len(self._tasks)
        while left:
            index, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item


async def _forward(index: int, call: DecodeCall, queue: asyncio.Queue[_Item]) -> None:
    try:
        async for message in call:
            await queue.put((index, message))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))
