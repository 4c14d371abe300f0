"""Requests over HTTP (server-sent events) and gRPC, as they come and with a clock on every message.

A `Door` sends one request and returns an `Answer`. `closed_loop` keeps so many clients busy; `poisson` lets requests
arrive at a rate, however slow the answers are. `Summary` is what people want to know of the answers. The HTTP client
reads the stream from its socket itself: a general client would use more CPU time than the server, and on the same
cores.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from server.client import AsyncClient, decode_request
from server.errors import ServerError

TIMEOUT = 600.0  # seconds of one request
Prompt = str | Sequence[int]  # text, or token ids


@dataclasses.dataclass
class Answer:
    """One request. Times are seconds of `time.perf_counter`."""

    began: float  # when it should have been sent
    times: list[float] = dataclasses.field(default_factory=list)  # of each message with text or tokens
    tokens: int = 0  # generated
    error: str = ""


class Door(Protocol):
    """A way into a server."""

    async def send(self, prompt: Prompt, new_tokens: int) -> Answer:
        """Asks for so many tokens, greedy, whatever they are, and reads them all. Failures are in the answer."""

    async def close(self) -> None: ...


class HttpDoor:
    """``/v1/completions`` of an OpenAI-like server, streamed; a connection for each request."""

    def __init__(self, url: str, *, api_key: str | None = None):
        parts = urllib.parse.urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = parts.scheme == "https"
        self._path = parts.path.rstrip("/") + "/v1/completions"
        self._headers = f"authorization: Bearer {api_key}\r\n" if api_key else ""

    async def send(self, prompt: Prompt, new_tokens: int) -> Answer:
        body = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        answer = Answer(time.perf_counter())
        try:
            async with asyncio.timeout(TIMEOUT):
                await self._stream(json.dumps(body).encode(), answer)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    async def _stream(self, body: bytes, answer: Answer) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls or None, limit=2**20)
        try:
            writer.write(
                f"POST {self._path} HTTP/1.1\r\nhost: {self._host}\r\nconnection: close\r\n{self._headers}"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            status = await reader.readline()
            headers = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b" 200 " not in status:
                answer.error = f"{status.decode().strip()}: {(await reader.read(2000)).decode(errors='replace')[:200]}"
                return
            lines = _chunked_lines(reader) if b"transfer-encoding: chunked" in headers else reader
            events = 0
            async for line in lines:
                if line.startswith(b"data: {"):
                    events += self._event(json.loads(line[6:]), answer)
            answer.tokens = answer.tokens or events
        finally:
            writer.close()

    def _event(self, event: dict[str, Any], answer: Answer) -> bool:
        """Whether it brought something of the answer."""
        if "error" in event:
            answer.error = str(event["error"])[:200]
        if (usage := event.get("usage")) is not None:
            answer.tokens = usage["completion_tokens"]
        if not event.get("choices"):
            return False
        answer.times.append(time.perf_counter())
        return True

    async def close(self) -> None:
        pass


async def _chunked_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines of a body in HTTP/1.1's chunked coding (RFC 9112, 7.1)."""
    rest = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        data = rest + (await reader.readexactly(size + 2))[:-2]
        *lines, rest = data.split(b"\n")
        for line in lines:
            yield line


class GrpcDoor:
    """``Decode`` of the gRPC port; made in the event loop that uses it."""

    def __init__(self, address: str, *, api_key: str | None = None):
        self._client = AsyncClient(address, api_key=api_key, timeout=TIMEOUT)

    async def send(self, prompt: Prompt, new_tokens: int) -> Answer:
        answer = Answer(time.perf_counter())
        try:
            request = decode_request(prompt, max_tokens=new_tokens, ignore_eos=True)
            async for message in self._client.decode(request):
                count = sum(len(sample.token_ids) for sample in message.stream_content.samples)
                if count:
                    answer.times.append(time.perf_counter())
                    answer.tokens += count
        except ServerError as error:
            answer.error = f"{type(error).__name__}: {error.message}"
        return answer

    async def close(self) -> None:
        await self._client.close()


async def closed_loop(door: Door, prompts: Iterable[Prompt], new_tokens: int, clients: int) -> list[Answer]:
    """So many clients, each of which sends its next request when it has its answer, until there are no prompts left."""
    waiting, answers = iter(prompts), []

    async def client() -> None:
        for prompt in waiting:
            answers.append(await door.send(prompt, new_tokens))  # noqa: PERF401 (other clients append too)

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def poisson(door: Door, prompts: Iterable[Prompt], new_tokens: int, rate: float, seed: int = 0) -> list[Answer]:
    """Requests arrive at random, ``rate`` a second on average; none waits for another's answer."""
    draw = random.Random(seed)
    arrival, tasks = time.perf_counter(), []
    for prompt in prompts:
        arrival += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
        tasks.append(asyncio.create_task(door.send(prompt, new_tokens)))
    return list(await asyncio.gather(*tasks))


@dataclasses.dataclass(frozen=True)
class Summary:
    """Seconds, unless it says otherwise. Of the answers without an error."""

    requests: int
    errors: int
    requests_per_second: float
    tokens_per_second: float
    first_token: np.ndarray  # of each request: time to first token
    per_token: np.ndarray  # of each request: time per output token after the first
    gaps: np.ndarray  # between messages of a stream

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Summary:
        good = [answer for answer in answers if not answer.error and answer.times]
        if not good:
            raise SystemExit(f"no request was answered: {answers[0].error if answers else 'there were none'}")
        span = max(answer.times[-1] for answer in good) - min(answer.began for answer in good)
        return cls(
            requests=len(answers),
            errors=len(answers) - len(good),
            requests_per_second=len(good) / span,
            tokens_per_second=sum(answer.tokens for answer in good) / span,
            first_token=np.array([answer.times[0] - answer.began for answer in good]),
            per_token=np.array([
                (answer.times[-1] - answer.times[0]) / (answer.tokens - 1) for answer in good if answer.tokens > 1
            ]),
            gaps=np.concatenate([np.diff(answer.times) for answer in good]),
        )  # fmt: skip


def steady_tokens_per_second(answers: Sequence[Answer]) -> float:
    """Tokens per second while all streams run: from the last one's first token to the first one's last."""
    begin, end = max(answer.times[0] for answer in answers), min(answer.times[-1] for answer in answers)
    if any(answer.error for answer in answers) or end <= begin:
        raise SystemExit("the streams did not run side by side, or failed; ask for more tokens")
    share = [
        answer.tokens / len(answer.times) * sum(begin < moment <= end for moment in answer.times) for answer in answers
    ]
    return sum(share) / (end - begin)


def synthetic_prompts(count: int, tokens: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Random token ids; no two prompts begin alike, so that no prefix cache helps."""
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab) for _ in range(tokens)] for _ in range(count)]


def file_prompts(path: Path, count: int) -> list[str]:
    """Prompts of a file, from the beginning again if there are fewer: one in each line, as text, or as a JSON string or
    an object with ``prompt`` in files that end with .jsonl."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise SystemExit(f"{path}: there are no prompts in it")
    if path.suffix == ".jsonl":
        values = [json.loads(line) for line in lines]
        lines = [value["prompt"] if isinstance(value, dict) else value for value in values]
    return [lines[index % len(lines)] for index in range(count)]


def milliseconds(times: np.ndarray, percentile: float) -> float | None:
    return 1e3 * float(np.percentile(times, percentile)) if len(times) else None
