"""The calls of one HTTP request, and which of them are made again elsewhere.

A request is sent to the upstream that the policy chooses. Each upstream gets it at most once:

* Refused with a reason (draining, starting, queue full, an adapter that is not there), or no connection at all: the next one.
* *Lost*, that is, sent and then the connection broke, or it was neither accepted nor refused in time: the next one, at most
  ``--retries`` times, for a request may be what brought the upstream down.
* Lost after it was accepted, before the first message: the same. Whoever reads has heard nothing, so nothing is said twice.
* After the first message, or with a fault of the upstream's own as the answer: no second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from protos.orchestrator_pb2 import DecodeRequest, DecodeResponse
from server.client import DecodeCall
from server.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    ServerError,
    Unavailable,
    Unreachable,
)
from server.proxy.policy import Assignment
from server.proxy.upstreams import Metadata, Upstream, Upstreams, nobody, with_retry

_Item = tuple[int, DecodeResponse | BaseException | None]  # index of the prompt; None: its call has ended


class PromptCall:
    """One prompt's call, wherever it runs. `open`, then `messages`; `close` in any case."""

    def __init__(self, upstreams: Upstreams, request: DecodeRequest, metadata: Metadata):
        self._upstreams = upstreams
        self._request = request
        self._metadata = metadata
        self._prompt = upstreams.describe(request)
        self._tried: set[Upstream] = set()
        self._lost = 0
        self._lost_at: list[Upstream] = []  # since it was last accepted
        self._upstream: Upstream | None = None
        self._assignment: Assignment | None = None
        self._call: DecodeCall | None = None

    async def open(self, refusal: ServerError | None = None) -> None:
        """Has the best upstream accept it that does.

        Raises:
            ServerError: ``refusal``, or what the first of them said, if none does.
        """
        while self._lost <= self._upstreams.balancing.retries:
            upstream = await self._upstreams.next_upstream(self._prompt, self._tried)
            if upstream is None:
                break
            self._assignment = Assignment(upstream, self._prompt)
            try:
                self._call = await upstream.accept(self._request, self._metadata)
            except Exception as error:
                self.close()
                if not self._move_on(upstream, error):
                    raise
                assert isinstance(error, ServerError)
                refusal = refusal or error
            except BaseException:
                self.close()
                raise
            else:
                self._upstream = upstream
                for lost in self._lost_at:
                    lost.retries += 1
                self._lost_at = []
                upstream.prompt_tokens += self._prompt.tokens
                upstream.matched_tokens += self._assignment.cached
                return
        raise with_retry(refusal or nobody())

    def _move_on(self, upstream: Upstream, error: Exception) -> bool:
        """Whether another upstream may be asked, after one that did not accept."""
        if isinstance(error, Unreachable):
            self._missed(upstream, error)
            return True
        if isinstance(error, ModelNotFound) or (isinstance(error, InvalidRequest) and error.param == "lora_adapter_id"):
            upstream.answered()
            return bool(self._prompt.adapter)  # adapters need not be everywhere
        if isinstance(error, Unavailable):
            upstream.probe()  # its state is no longer what it was
            return True
        if isinstance(error, InternalError):
            upstream.failed("fault")
        elif isinstance(error, ServerError):
            upstream.answered()
        return isinstance(error, QueueFull)

    def _missed(self, upstream: Upstream, error: ServerError) -> None:
        """Notes that a call came to nothing."""
        reason = error.reason if isinstance(error, Unreachable) else "lost"
        upstream.failed(reason)
        upstream.probe()
        if reason != "unreachable":
            self._lost += 1
            self._lost_at.append(upstream)

    async def messages(self) -> AsyncIterator[DecodeResponse]:
        """Its messages, as they come.

        Raises:
            ServerError: what it fails with.
        """
        messages, message = await self._first()
        upstream, assignment = self._upstream, self._assignment
        assert upstream is not None and assignment is not None
        upstream.answered()
        assignment.answered()
        try:
            while message is not None:
                yield message
                message = await anext(messages, None)
        except (Unreachable, InternalError, Cancelled) as error:
            self._failed(upstream, error)
            raise
        assignment.end()

    async def _first(self) -> tuple[AsyncIterator[DecodeResponse], DecodeResponse | None]:
        """The stream of messages behind the first, and the first, from whichever upstream lives to send it."""
        while True:
            assert self._call is not None and self._upstream is not None
            messages, upstream = aiter(self._call), self._upstream
            seconds = self._upstreams.balancing.first_token_timeout
            try:
                async with asyncio.timeout(seconds):
                    return messages, await anext(messages, None)
            except TimeoutError:
                message = f"{upstream.address} accepted the request and sent no token within {seconds:g} s"
                error: ServerError = Unreachable(message, reason="silent")
            except (Unavailable, Cancelled) as caught:  # cancelled by the upstream: whoever cancels here has left
                error = caught
            except InternalError as caught:
                self._failed(upstream, caught)
                raise
            self._missed(upstream, error)
            self.close()
            await self.open(error)

    def _failed(self, upstream: Upstream, error: ServerError) -> None:
        """Notes an answer that ended in a failure of the upstream's."""
        upstream.failed("fault" if isinstance(error, InternalError) else "lost")
        upstream.probe()

    def close(self) -> None:
        """Cancels it, if it is not over."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._assignment is not None:
            self._assignment.end()
            self._assignment = None


class Generation:
    """The calls of one HTTP request, one per prompt, and their messages as they come.

    Whoever has opened one must `close` it, so that no call is left running.
    """

    def __init__(self, upstreams: Upstreams, requests: Sequence[DecodeRequest], metadata: Metadata):
        self._calls = [PromptCall(upstreams, request, metadata) for request in requests]
        self._tasks: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        return len(self._calls)

    async def open(self) -> Generation:
        """Returns itself once all prompts are accepted; if one is refused, none runs."""
        try:
            for call in self._calls:
                await call.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Cancels what still runs."""
        for task in self._tasks:
            task.cancel()
        for call in self._calls:
            call.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def messages(self) -> AsyncIterator[tuple[int, DecodeResponse]]:
        """(index of the prompt, message), in the order of arrival. Raises what any of the calls fails with."""
        if len(self._calls) == 1:
            async for message in self._calls[0].messages():
                yield 0, message
            return
        # Bounded, so that a client that reads slowly slows the calls, whose messages then get fewer and bigger.
        queue: asyncio.Queue[_Item] = asyncio.Queue(len(self._calls))
        self._tasks = [asyncio.create_task(_forward(index, call, queue)) for index, call in enumerate(self._calls)]
        left = len(self._tasks)
        while left:
            index, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item


async def _forward(index: int, call: PromptCall, queue: asyncio.Queue[_Item]) -> None:
    try:
        async for message in call.messages():
            await queue.put((index, message))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))
