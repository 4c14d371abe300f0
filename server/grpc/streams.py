"""From the detokenize thread to one gRPC stream: `StreamSink` collects what a request produces until its stream can
take it.

The detokenize thread calls `delta`; it never waits for a client. The stream's coroutine awaits `ready` and takes all
that has come since, as one message. A client that reads slowly so gets fewer, bigger messages, and what waits for a
client that never reads is at most the request's own output, which ``max_tokens`` bounds. The streams of a step are
woken together, by the `Waker` of their event loop; if the loop itself falls behind, for want of the interpreter lock,
the detokenize thread waits for it, or all streams would get their tokens in bursts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading

from protos.orchestrator_pb2 import DecodeResponse
from protos.orchestrator_pb2 import TokenLogprob as WireLogprob
from server.errors import ServerError
from server.orchestrator.request import Delta, FinishReason, GenerateRequest, TokenLogprob, Usage
from server.text.tokenizers import Detokenizer, Tokenizer

MERGED_TOKENS = 4  # in one message before the detokenize thread looks whether the event loop is behind
TURN_SECONDS = 0.1  # the longest wait for one turn of the event loop
LOGPROBS_PER_MESSAGE = 1024  # tokens with log-probs in one message, so that none nears the message limit


@dataclasses.dataclass
class _Pending:
    """What one sample has produced and the stream has not taken."""

    texts: list[str] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Waker:
    """Wakes streams of an event loop from another thread.

    A call into a loop costs a system call and a turn of the loop. So only the first stream makes one, and those that
    follow until the loop comes to it are woken by the same.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._lock = threading.Lock()
        self._sinks: list[StreamSink] = []
        self._turned = threading.Event()  # the streams that were woken have had their turn
        self._turned.set()

    def wake(self, sink: StreamSink) -> None:
        """From any thread; a sink is woken again only once it has taken."""
        with self._lock:
            self._sinks.append(sink)
            if len(self._sinks) > 1:
                return
            self._turned.clear()
        try:
            self._loop.call_soon_threadsafe(self._wake_all)
        except RuntimeError:  # the loop is closed: the server has stopped and nobody reads this any more
            pass

    def _wake_all(self) -> None:
        with self._lock:
            sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.changed.set()
        self._loop.call_soon(self._turn)  # behind the streams

    def _turn(self) -> None:
        with self._lock:
            if not self._sinks:
                self._turned.set()

    def wait(self) -> None:
        """From another thread: until the streams that were woken have had their turn. Not for longer than a turn should
        take, and only once if it does."""
        if not self._turned.wait(TURN_SECONDS):
            self._turned.set()


class StreamSink:
    """The `server.orchestrator.request.Sink` of a gRPC stream."""

    def __init__(self, waker: Waker, samples: int):
        self.changed = asyncio.Event()  # set in the event loop, by the waker
        self._waker = waker
        self._lock = threading.Lock()
        self._pending = [_Pending() for _ in range(samples)]
        self._woken = False
        self._waited = False
        self._prompt: tuple[TokenLogprob | None, ...] | None = None
        self._usage: Usage | None = None
        self._error: ServerError | None = None

    # Called from the detokenize thread.

    def prompt_logprobs(self, logprobs: tuple[TokenLogprob | None, ...]) -> None:
        with self._lock:
            self._prompt = logprobs
            self._wake()

    def delta(self, delta: Delta) -> None:
        with self._lock:
            pending = self._pending[delta.sample]
            pending.texts.append(delta.text)
            pending.tokens += delta.tokens
            pending.logprobs += delta.logprobs
            if delta.finish_reason is not None:
                pending.finish_reason = delta.finish_reason
                pending.stop_reason = delta.stop_reason
            self._wake()
            behind = len(pending.tokens) >= MERGED_TOKENS and not self._waited
            self._waited |= behind
        if behind:
            self._waker.wait()

    def finish(self, usage: Usage) -> None:
        with self._lock:
            self._usage = usage
            self._wake()

    def fail(self, error: ServerError) -> None:
        with self._lock:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._waker.wake(self)

    # Called in the event loop.

    async def ready(self) -> None:
        """Waits until there is something to take."""
        await self.changed.wait()

    def take(self) -> tuple[tuple[TokenLogprob | None, ...] | None, list[_Pending], Usage | None, ServerError | None]:
        """All that has come: prompt log-probs, what is new of each sample, and how it ended (`None` while it goes
        on)."""
        with self._lock:
            taken = self._prompt, self._pending, self._usage, self._error
            self._prompt, self._pending = None, [_Pending() for _ in self._pending]
            self._woken = self._waited = False
            self.changed.clear()
            return taken


class TextOffsets:
    """Where each token begins in a text that begins at ``start``, in characters."""

    def __init__(self, detokenizer: Detokenizer, start: int = 0):
        self._detokenizer = detokenizer
        self._next = start

    def next(self, token: int) -> int:
        offset = self._next
        self._next += len(self._detokenizer.push(token))
        return offset


class PromptOffsets:
    """Where each token of a prompt begins in the text that it was made of, in characters.

    Tokens do not spell a text exactly: BOS was added, a space put before a word, space beside a control token dropped,
    a character composed. So each is looked for where the one before it ended, or a little behind that.
    """

    NEAR = 32  # characters

    def __init__(self, tokenizer: Tokenizer, text: str):
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._text = text
        self._next = 0

    def next(self, token: int) -> int:
        text, place = self._text, self._next
        if self._tokenizer.is_special(token):
            spelling = self._tokenizer.token_bytes(token).decode("utf-8", "replace")
            found = text.find(spelling, place, place + self.NEAR)
            if found >= 0:
                place, self._next = found, found + len(spelling)
            return place
        piece = self._detokenizer.push(token)
        if not text.startswith(piece, place):
            if piece.startswith(" ") and text.startswith(piece[1:], place):
                piece = piece[1:]
            else:
                found = text.find(piece, place, place + self.NEAR + len(piece))
                place = found if found >= 0 else place
        self._next = min(place + len(piece), len(text))
        return place


class MessageWriter:
    """Makes the messages of one stream.

    Args:
        echoed: the text that is sent back before that of each sample.
        prompt: what the prompt's tokens were made of; `None`: they were given.
        text: text is wanted, not token ids only.
        logprobs, prompt_logprobs: alternatives per token; `None`: no log-probs.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: GenerateRequest,
        *,
        echoed: str,
        prompt: str | None = None,
        text: bool,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ):
        self._tokenizer = tokenizer
        self._samples = len(request.sampling)
        self._prompt = prompt
        self._shown = request.shown_special
        self._text = text
        continues = any(not tokenizer.is_special(token) for token in request.prompt)
        self._offsets = [
            TextOffsets(tokenizer.detokenizer(continues=continues, shown=request.shown_special), len(echoed))
            for _ in range(self._samples)
        ]
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs

    def prompt(
        self, ids: tuple[int, ...], text: str | None, logprobs: tuple[TokenLogprob | None, ...] | None
    ) -> list[DecodeResponse]:
        """The messages that bring the prompt back."""
        messages = []
        offsets: TextOffsets | PromptOffsets
        if self._prompt is not None:
            offsets = PromptOffsets(self._tokenizer, self._prompt)
        else:
            offsets = TextOffsets(self._tokenizer.detokenizer(shown=self._shown))
        for start in range(0, len(ids), LOGPROBS_PER_MESSAGE):
            message = self._message([_Pending() for _ in range(self._samples)])
            part = slice(start, start + LOGPROBS_PER_MESSAGE)
            message.prompt.token_ids.extend(ids[part])
            if text is not None and start == 0:
                message.prompt.text = text
            if logprobs is not None:
                message.prompt.logprobs.extend(
                    self._logprob(token, entry, self._prompt_logprobs or 0, offsets)
                    for token, entry in zip(ids[part], logprobs[part], strict=True)
                )
            messages.append(message)
        return messages

    def deltas(self, pending: list[_Pending], usage: Usage | None) -> list[DecodeResponse]:
        """The messages for what is new; none where nothing is."""
        messages = []
        while self._logprobs is not None and sum(len(sample.logprobs) for sample in pending) > LOGPROBS_PER_MESSAGE:
            first = next(sample for sample in pending if sample.logprobs)
            part = dataclasses.replace(
                first,
                texts=[],
                tokens=first.tokens[:LOGPROBS_PER_MESSAGE],
                logprobs=first.logprobs[:LOGPROBS_PER_MESSAGE],
                finish_reason=None,
                stop_reason=None,
            )
            first.tokens, first.logprobs = first.tokens[LOGPROBS_PER_MESSAGE:], first.logprobs[LOGPROBS_PER_MESSAGE:]
            messages.append(self._message([part if sample is first else _Pending() for sample in pending]))
        if usage is not None or any(sample.texts or sample.finish_reason for sample in pending):
            messages.append(self._message(pending))
        if usage is not None:
            messages[-1].usage.prompt_tokens = usage.prompt_tokens
            messages[-1].usage.completion_tokens = usage.completion_tokens
            messages[-1].usage.cached_tokens = usage.cached_tokens
        return messages

    def _message(self, pending: list[_Pending]) -> DecodeResponse:
        # Filled in place: half the time of building the parts and copying them in.
        message = DecodeResponse()
        samples = message.stream_content.samples
        for index, one in enumerate(pending):
            sample = samples.add()
            if self._text:
                sample.text = one.texts[0] if len(one.texts) == 1 else "".join(one.texts)
            sample.token_ids.extend(one.tokens)
            if one.finish_reason is not None:
                sample.finish_reason = one.finish_reason
            if isinstance(one.stop_reason, str):
                sample.stop_string = one.stop_reason
            elif one.stop_reason is not None:
                sample.stop_token_id = one.stop_reason
            if self._logprobs is not None:
                sample.logprobs.extend(
                    self._logprob(entry.token, entry, self._logprobs, self._offsets[index]) for entry in one.logprobs
                )
        return message

    def _logprob(
        self, token: int, entry: TokenLogprob | None, alternatives: int, offsets: TextOffsets | PromptOffsets
    ) -> WireLogprob:
        text, raw = self._tokenizer.token_text, self._tokenizer.token_bytes
        wire = WireLogprob(
            token_id=token,
            text=text(token),
            raw=raw(token),
            special=self._tokenizer.is_special(token),
            text_offset=offsets.next(token),
        )
        if entry is not None:
            wire.logprob = entry.logprob
            wire.alternatives.extend(
                WireLogprob.Alternative(token_id=other, logprob=logprob, text=text(other), raw=raw(other))
                for other, logprob in entry.top[:alternatives]
            )
        return wire
