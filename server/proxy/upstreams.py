"""The orchestrators behind a proxy: which there are, how they are, and calls that move on to the next one.

``policy`` says which of them gets a request and ``ejection`` which of them is left out; this module tells them what it sees.
Several upstreams are asked for their state twice a second (active check); with a single one there is nothing to choose, and
nothing is asked. How their answers end is the passive check. What a call is that came to nothing, and when another upstream
may be asked instead, is in ``generation``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from protos import preheat_pb2
from protos.orchestrator_pb2 import DecodeRequest
from server.client import AsyncClient, DecodeCall
from server.errors import ModelNotFound, ServerError, TimedOut, Unavailable, Unreachable
from server.proxy.addresses import Address, AddressBook, Resolve, resolve
from server.proxy.policy import Policy, Prompt, Replica, Standing, describe

if TYPE_CHECKING:
    from protos.preheat_pb2_grpc import PreheatAsyncStub

Request = TypeVar("Request")
Response = TypeVar("Response")

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
STATE_TIMEOUT = 5.0  # seconds that an orchestrator may take to tell its state
PATIENCE = 0.8  # seconds that /health and /ready wait for states, where several upstreams are asked all the time anyway
CARD_SECONDS = 2.0  # for which an upstream's list of adapters is believed
REPORT_TIMEOUT = 2.0  # seconds for reports that can wait
RETRY_UNREACHABLE = 1.0  # seconds after which a client may try again
STATES = ("connecting", "loading", "warming", "ready", "draining", "failed", "unreachable", "ejected")
REASONS = ("unreachable", "lost", "silent", "fault")  # of failures
Metadata = Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Balancing:
    """How requests are spread; the options of ``preheat proxy`` by the same names. Times are seconds."""

    upstream_file: Path | None = None
    upstream_refresh: float = 5.0
    connect_timeout: float = 5.0
    accept_timeout: float = 30.0
    first_token_timeout: float | None = None
    eject_after: int = 3
    retries: int = 2


class Upstream(Replica):
    """One orchestrator as this proxy sees it."""

    def __init__(self, address: Address, client: AsyncClient, balancing: Balancing):
        super().__init__(address.target, eject_after=balancing.eject_after)
        self.client = client
        self.reason = ""
        self.requests = 0  # accepted there
        self.retries = 0  # that went on to another one because this one was lost
        self.failures: collections.Counter[str] = collections.Counter()  # by reason
        self.prompt_tokens = 0  # of requests sent there, estimated where they are text
        self.matched_tokens = 0  # of these, what it had been sent before
        self._balancing = balancing
        self._card_read = -1e9
        self._probe: asyncio.Task[None] | None = None
        self._closed = False
        self._unaccepted: set[asyncio.Timeout] = set()  # of requests that it has neither accepted nor refused

    @property
    def alive(self) -> bool:
        """It serves, or it may still come up."""
        return self.state not in ("failed", "unreachable")

    def described_state(self, now: float) -> str:
        """One of `STATES`."""
        if self.state == "ready" and self.standing(now) == Standing.OUT:
            return "ejected"
        return self.state if self.state in STATES else "failed"

    def probe(self) -> asyncio.Task[None]:
        """Asks for its state, unless that is being done."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._ask_state())
        return self._probe

    async def ask_state(self) -> None:
        """Its state from now on: an answer to what was asked before may be of before."""
        if self._probe is not None and not self._probe.done():
            await asyncio.wait([self._probe])  # which is not only this caller's: whoever is cancelled leaves it alone
        if not self._closed:
            await asyncio.wait([self.probe()])

    async def close(self) -> None:
        self._closed = True
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait([self._probe])
        await self.client.close()

    async def _ask_state(self) -> None:
        before, silent = self.state, False
        try:
            answer = await self.client.call(lambda preheat: preheat.State, preheat_pb2.StateRequest(), timeout=STATE_TIMEOUT)
        except TimedOut:
            # Busy compiling, with nothing left for this. Ready servers answer in time.
            silent = self.state not in ("connecting", "loading", "warming")
            self.state = "unreachable" if silent else self.state
        except ServerError as error:
            self.state = "connecting" if self.state == "connecting" else "unreachable"
            self.reason = error.message
        else:
            self.state, self.reason = answer.state, answer.reason
            self.heard(answer.running, answer.waiting, answer.slots, answer.kv_pages)
        if self.state == before:
            return
        logger.info("upstream %s is %s%s", self.address, self.state, f": {self.reason}" if self.reason else "")
        if self.state == "unreachable":
            self.forget()
            now = time.monotonic()
            if before != "draining" and not self.ejection.out(now):  # one that was about to leave has not failed
                self.failures["silent" if silent else "unreachable"] += 1
                self.ejection.eject(now)
            if silent:  # what it has not accepted need not wait for it any longer
                for limit in self._unaccepted:
                    limit.reschedule(asyncio.get_running_loop().time())

    async def accept(self, request: DecodeRequest, metadata: Metadata) -> DecodeCall:
        """Has it accept a request.

        Raises:
            Unreachable: it did not answer.
            ServerError: what it refuses the request with.
        """
        connected = await self.client.connect(self._balancing.connect_timeout)
        limit = asyncio.timeout(self._balancing.accept_timeout)
        try:
            async with limit:
                self._unaccepted.add(limit)
                call = await self.client.start(request, metadata=metadata)
        except TimeoutError:
            seconds = self._balancing.accept_timeout
            message = f"{self.address} neither accepted nor refused the request within {seconds:g} s"
            raise Unreachable(message, reason="silent") from None
        except Unreachable as error:
            error.reason = error.reason if connected else "unreachable"
            raise
        finally:
            self._unaccepted.discard(limit)
        self.state = "ready"
        self.requests += 1
        return call

    def failed(self, reason: str) -> None:
        """A call came to nothing: ``unreachable``, ``lost``, ``silent`` or ``fault``."""
        self.failures[reason] += 1
        if self.state != "draining" and self.ejection.failed(time.monotonic()):
            logger.warning("upstream %s is ejected: %d failures in a row, the last one: %s", self.address, self.ejection.after, reason)
            self.forget()

    def answered(self) -> None:
        self.ejection.answered(time.monotonic())

    async def read_card(self, metadata: Metadata) -> preheat_pb2.ModelCardResponse:
        """What it serves, as it answers a client of that key."""
        card = await self.client.call(
            lambda preheat: preheat.ModelCard, preheat_pb2.ModelCardRequest(), timeout=STATE_TIMEOUT, metadata=metadata
        )
        self.adapters, self._card_read = frozenset(card.adapters), time.monotonic()
        return card

    async def refresh_card(self, metadata: Metadata) -> None:
        """Reads it again if that is long ago; keeps what is known if it does not answer."""
        if self.state == "ready" and time.monotonic() - self._card_read > CARD_SECONDS:
            with contextlib.suppress(ServerError):  # its state tells
                await self.read_card(metadata)


class Upstreams:
    """The orchestrators of a proxy. `start` and `stop` run in its event loop, as does everything else.

    Args:
        addresses: ``host:port``, ``unix:path``, or ``dns:host:port`` for all addresses of a name.
        ca: certificates that verify their TLS; `None`: no TLS.
        balancing: see there.
        resolve: asks DNS.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        ca: Path | None = None,
        balancing: Balancing | None = None,
        resolve: Resolve = resolve,
    ):
        self.balancing = balancing or Balancing()
        self.all: list[Upstream] = []
        self._book = AddressBook(addresses, self.balancing.upstream_file, resolve)
        self._ca = ca
        self._policy = Policy()
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: list[Upstream] = []  # no longer on the list, with calls in progress
        self._invalid = 0  # requests refused here and not yet reported

    @property
    def several(self) -> bool:
        """There is a choice, or there may be one later."""
        return len(self.all) > 1 or self._book.changes

    async def start(self) -> None:
        await self._read_list()
        self._tasks = [asyncio.create_task(work()) for work in self._duties()]

    def _duties(self) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
        yield self._report
        if self.several:
            yield self._watch
        if self._book.changes:
            yield self._follow_list

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(upstream.close() for upstream in (*self.all, *self._leaving)))

    # What there is, and how it is.

    async def _read_list(self) -> None:
        """Brings `all` up to date. An upstream that is gone from the list gets nothing new; its calls go on."""
        addresses = await self._book.look()
        there = {upstream.address: upstream for upstream in self.all}
        listed = {address.target: address for address in addresses}
        for target in there.keys() - listed.keys():
            logger.info("upstream %s is no longer on the list", target)
            self._leaving.append(there.pop(target))
        for target in listed.keys() - there.keys():
            address = listed[target]
            client = AsyncClient(target, ca=self._ca, server_name=address.server_name if self._ca else None)
            there[target] = Upstream(address, client, self.balancing)
        self.all = [there[target] for target in listed]
        ended = [upstream for upstream in self._leaving if upstream.sequences == 0]
        self._leaving = [upstream for upstream in self._leaving if upstream.sequences]
        for upstream in ended:
            await upstream.close()

    async def _follow_list(self) -> None:
        while True:
            await asyncio.sleep(self.balancing.upstream_refresh)
            try:
                await self._read_list()
            except Exception:  # a fault of ours, or the certificates can no longer be read: what is there goes on
                logger.exception("the list of upstreams stays as it is")

    async def _watch(self) -> None:
        while True:
            for upstream in self.all:
                upstream.probe()  # one that does not answer holds up nobody
            await asyncio.sleep(POLL_SECONDS)

    async def ask_states(self) -> list[str]:
        """The state of each, asked for now; where they are asked all the time, slow ones are not waited for."""
        asked = [asyncio.create_task(upstream.ask_state()) for upstream in self.all]
        await asyncio.wait(asked, timeout=PATIENCE if self.several else None)
        return [upstream.state for upstream in self.all]

    def by_preference(self) -> list[Upstream]:
        """Ready ones first, the least busy of them first; then those of which nothing is known; the dead and leaving last."""
        now = time.monotonic()
        return sorted(self.all, key=lambda upstream: (upstream.standing(now), upstream.load))

    # Requests.

    def describe(self, request: DecodeRequest) -> Prompt:
        """What the choice for a request depends on."""
        adapter = request.lora_adapter_id
        if not adapter and request.model and any(request.model in (upstream.adapters or ()) for upstream in self.all):
            adapter = request.model
        text = request.WhichOneof("content") == "text_content"
        # With one upstream there is no choice, and nothing to look at.
        prompt = request.text_content.text if text else request.token_content.token_ids
        return describe(prompt if self.several else (), adapter, max(1, request.num_samples))

    async def next_upstream(self, prompt: Prompt, tried: set[Upstream]) -> Upstream | None:
        """The best upstream that was not tried; puts it among the tried. One that is leaving is asked first whether it still
        is, since another process may have taken its place."""
        while True:
            upstream = self._policy.choose(self.all, prompt, time.monotonic(), tried)
            if upstream is None:
                return None
            assert isinstance(upstream, Upstream)
            tried.add(upstream)
            if self.several and upstream.state == "draining":
                await upstream.ask_state()
                if upstream.state == "draining":
                    continue
            return upstream

    async def call(
        self,
        method: Callable[[PreheatAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        metadata: Metadata = (),
        timeout: float | None = None,
    ) -> Response:
        """Calls a method of the Preheat service, at the best upstream that answers. These may be asked twice."""
        return await self._ask(
            lambda upstream: upstream.client.call(
                method, request, metadata=metadata, timeout=timeout or self.balancing.accept_timeout
            )
        )

    async def model_card(self, metadata: Metadata) -> preheat_pb2.ModelCardResponse:
        """The served model, with the adapters of all upstreams."""
        card = await self._ask(lambda upstream: upstream.read_card(metadata))
        if self.several:
            await asyncio.wait([asyncio.ensure_future(upstream.refresh_card(metadata)) for upstream in self.all], timeout=PATIENCE)
            more = {name for upstream in self.all for name in upstream.adapters or ()} - set(card.adapters)
            card.adapters.extend(sorted(more))
        return card

    async def _ask(self, ask: Callable[[Upstream], Coroutine[Any, Any, Response]]) -> Response:
        refusal: ServerError | None = None
        tried: set[Upstream] = set()
        while (upstream := await self.next_upstream(Prompt(), tried)) is not None:
            try:
                return await ask(upstream)
            except (Unavailable, TimedOut) as error:
                if isinstance(error, Unreachable | TimedOut):
                    upstream.failed(error.reason if isinstance(error, Unreachable) else "silent")
                refusal = refusal or error
        raise with_retry(refusal or nobody())

    # Reports.

    def count_invalid(self) -> None:
        """A request for an answer was refused here; it is reported to an orchestrator's metrics."""
        self._invalid += 1

    async def report_invalid(self) -> None:
        count, self._invalid = self._invalid, 0
        if count:
            try:
                await self.call(
                    lambda preheat: preheat.CountInvalid, preheat_pb2.CountInvalidRequest(count=count), timeout=REPORT_TIMEOUT
                )
            except ServerError:
                self._invalid += count  # kept until an orchestrator is there

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.report_invalid()

    async def metrics(self) -> dict[str, str]:
        """The metrics of those that answer, by address.

        Raises:
            ServerError: the only one does not.
        """
        async def ask(upstream: Upstream) -> str | ServerError:
            try:
                request = preheat_pb2.MetricsRequest()
                timeout = REPORT_TIMEOUT if self.several else 2 * STATE_TIMEOUT
                return (await upstream.client.call(lambda preheat: preheat.Metrics, request, timeout=timeout)).text
            except ServerError as error:
                return error

        # Who does not answer otherwise would only hold up those who do.
        upstreams = [upstream for upstream in self.all if not self.several or upstream.state not in ("connecting", "unreachable")]
        answers = await asyncio.gather(*(ask(upstream) for upstream in upstreams))
        if not self.several and isinstance(answers[0], ServerError):
            raise answers[0]
        pairs = zip(upstreams, answers, strict=True)
        return {upstream.address: answer for upstream, answer in pairs if isinstance(answer, str)}


def nobody() -> Unavailable:
    return Unavailable("no orchestrator takes requests: all of them are draining")


def with_retry(error: ServerError) -> ServerError:
    if error.retry_after is None and not isinstance(error, ModelNotFound):
        error.retry_after = RETRY_UNREACHABLE
    return error
