"""Mixed traffic for a long time, and what must be true afterwards.

``python -m benchmarks.soak [--seconds 1200] [--model M] [options of preheat serve]`` starts a server, has 4 x slots
clients use it all the time and prints a report; the exit code is 1 if anything in it is wrong.

What clients do, drawn at random from a fixed seed: whole and streamed answers over HTTP and gRPC, greedy and seeded,
short and long prompts, prompts with a shared beginning, several samples; requests that are wrong; leaving while
queued, in prefill and in the middle of a stream; reading slowly, or never; and every now and then a burst that
overflows the queue.

What must be true: every answer that was read to its end equals the one its request got alone, before the traffic;
each request has one outcome; afterwards all gauges are 0 and there are as many threads and file descriptors as before
(two threads more at most: pools fill late); nothing was compiled; memory does not grow. The slope of the resident
memory is a least-squares fit over the second half of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.server_process import BenchServer
from benchmarks.soak_report import GAUGES, Report, judge, read_process
from protos import preheat_pb2
from server.client import AsyncClient, decode_request
from server.errors import InvalidRequest, QueueFull, ServerError

NEAR_TIE = 1e-3  # nats between the first two tokens, below which batches of other sizes may choose otherwise
SETTLE_SECONDS = 30.0  # for what is left of the traffic when the clients have gone
TIMEOUT = 300.0  # seconds of one request; on a small machine a full queue takes its time


@dataclasses.dataclass(frozen=True)
class Case:
    """A request and the answer it got alone."""

    prompt: tuple[int, ...]
    options: dict[str, Any]
    text: str = ""
    tokens: tuple[int, ...] = ()


class Soak:
    """One run against one server.

    Args:
        http, grpc: base URL and ``host:port`` of the server.
        processes: name -> pid, whose memory, threads and file descriptors are watched.
        vocab: token ids of prompts are below this.
    """

    def __init__(self, http: str, grpc: str, processes: dict[str, int], *, vocab: int, seed: int = 0):
        self._http_url = http
        self._grpc_address = grpc
        self._processes = processes
        self._vocab = vocab
        self._random = random.Random(seed)
        self._cases: list[Case] = []

    async def run(self, seconds: float, clients: int | None = None) -> Report:
        """Traffic for ``seconds``, from 4 x slots clients unless ``clients`` are given."""
        report = self._report = Report(seconds)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with (
            httpx.AsyncClient(base_url=self._http_url, timeout=TIMEOUT, limits=limits) as self._http,
            AsyncClient(self._grpc_address) as self._grpc,
        ):
            await self._settled()
            state = await self._grpc.call(lambda preheat: preheat.State, preheat_pb2.StateRequest())
            card = await self._grpc.call(lambda preheat: preheat.ModelCard, preheat_pb2.ModelCardRequest())
            self._slots, self._capacity, self._max_len = state.slots, state.capacity, card.max_len
            await self._make_cases()
            await self._warm_up()
            before = await self._metrics()
            report.readings = {name: [read_process(pid)] for name, pid in self._processes.items()}
            self._end = time.monotonic() + seconds
            watch = asyncio.create_task(self._watch(max(0.25, seconds / 240)))
            await asyncio.gather(*(self._client() for _ in range(clients or 4 * self._slots)), self._bursts(seconds))
            watch.cancel()
        async with httpx.AsyncClient(base_url=self._http_url, timeout=TIMEOUT) as self._http:
            await self._settled()
            after = await self._metrics()
        await self._rested()
        judge(report, before, after)
        return report

    # Before the traffic

    async def _make_cases(self) -> None:
        """Requests of all kinds with the answers they get alone; greedy ones with near ties are left out."""
        draw = self._random
        shared = self._prompt(self._max_len // 2)
        lengths = [1, 5, 17, 33, self._max_len // 3, self._max_len - 40, 3 * self._max_len // 4]
        prompts = [self._prompt(max(1, length)) for length in lengths]
        prompts += [(*shared, *self._prompt(length)) for length in (3, 9, 20, 30)]
        for index, prompt in enumerate(prompts):
            tokens = min(24, self._max_len - len(prompt))
            for options in (
                {"ignore_eos": True},
                {"temperature": 0.9, "seed": draw.getrandbits(63), "top_p": 0.95},
                {"temperature": 1.0, "seed": index, "presence_penalty": 0.5, "repetition_penalty": 1.1, "top_k": 40},
            ):
                options = {"max_tokens": draw.randint(1, tokens), **options}
                case = await self._alone(Case(prompt, options))
                if case is not None:
                    self._cases.append(case)

    async def _warm_up(self) -> None:
        """Every client's connection once, so that what the first readings see is a server at work, not a new one."""
        short = min(self._cases, key=lambda case: len(case.prompt))
        bodies = [self._body(short, stream=index % 2 == 1) for index in range(4 * self._slots)]
        await asyncio.gather(
            *(self._http.post("/v1/completions", json=body) for body in bodies), *(self._alone(short) for _ in bodies),
            return_exceptions=True,
        )  # fmt: skip
        await self._settled()

    async def _alone(self, case: Case) -> Case | None:
        text = ""
        tokens: list[int] = []
        async for message in self._grpc.decode(decode_request(case.prompt, logprobs=2, **case.options)):
            for sample in message.stream_content.samples:
                text += sample.text
                tokens += sample.token_ids
                for entry in sample.logprobs if "temperature" not in case.options else ():
                    if entry.alternatives[0].logprob - entry.alternatives[1].logprob < NEAR_TIE:
                        return None
        return dataclasses.replace(case, text=text, tokens=tuple(tokens))

    def _prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._vocab) for _ in range(length))

    # The traffic

    async def _client(self) -> None:
        actions = {
            self._whole: 20, self._streamed: 20, self._over_grpc: 20, self._samples: 4, self._slowly: 3, self._never: 2,
            self._leave_stream: 8, self._leave_whole: 6, self._leave_grpc: 8, self._wrong: 6, self._wrong_grpc: 3,
        }  # fmt: skip
        while time.monotonic() < self._end:
            (action,) = self._random.choices(list(actions), list(actions.values()))
            try:
                await action(self._random.choice(self._cases))
            except (ServerError, httpx.HTTPError, OSError) as error:
                self._report.problem(f"{action.__name__.strip('_')}: {type(error).__name__}: {error}")

    async def _bursts(self, seconds: float) -> None:
        """Twice what the server can hold, at once, about five times a run and at least every 20 seconds."""
        pause = min(20.0, seconds / 6)
        short = min(self._cases, key=lambda case: len(case.prompt))
        while time.monotonic() + pause < self._end:
            await asyncio.sleep(pause)
            await asyncio.gather(*(self._over_grpc(short) for _ in range(2 * self._capacity)))

    def _body(self, case: Case, **more: object) -> dict[str, object]:
        return {"prompt": list(case.prompt), "temperature": 0, **case.options, **more}

    async def _whole(self, case: Case) -> None:
        self._report.sent += 1
        answer = await self._http.post("/v1/completions", json=self._body(case))
        if self._answered(answer):
            self._compare(case, answer.json()["choices"][0]["text"])

    async def _streamed(self, case: Case, pause: float = 0.0) -> None:
        self._report.sent += 1
        async with self._http.stream("POST", "/v1/completions", json=self._body(case, stream=True)) as answer:
            text, done = "", False
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self._report.problem(f"error in a stream: {event['error']}")
                    text += "".join(choice["text"] for choice in event.get("choices", ()))
                if pause:
                    await asyncio.sleep(pause)
            if self._answered(answer):
                self._compare(case, text if done else text + " (no [DONE])")

    async def _slowly(self, case: Case) -> None:
        await self._streamed(case, pause=0.1)

    async def _over_grpc(self, case: Case) -> None:
        self._report.sent += 1
        tokens: list[int] = []
        try:
            async for piece in self._grpc.stream(case.prompt, **case.options):
                tokens += piece.token_ids
        except QueueFull as error:
            self._report.seen["rejected"] += 1
            if not error.retry_after or error.retry_after < 1:
                self._report.problem(f"a full queue without a useful Retry-After: {error.retry_after}")
            await asyncio.sleep(0.05)
            return
        self._report.seen["ok"] += 1
        self._compare(case, tuple(tokens))

    async def _samples(self, case: Case) -> None:
        self._report.sent += 1
        answer = await self._http.post("/v1/completions", json=self._body(case, n=2))
        if self._answered(answer):
            self._compare(case, answer.json()["choices"][0]["text"])

    async def _leave_stream(self, case: Case) -> None:
        self._report.sent += 1
        body = self._body(case, stream=True, max_tokens=self._max_len - len(case.prompt), ignore_eos=True)
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self._answered(answer)
                return
            left = self._random.randrange(10)
            async for _ in answer.aiter_lines():
                left -= 1
                if left < 0:
                    break

    async def _leave_whole(self, case: Case) -> None:
        self._report.sent += 1
        self._report.unsure += 1
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(
                self._http.post("/v1/completions", json=self._body(case)), self._random.expovariate(1 / 0.3)
            )

    async def _leave_grpc(self, case: Case) -> None:
        self._report.sent += 1
        self._report.unsure += 1
        call = self._grpc.orchestrator.Decode(decode_request(case.prompt, **case.options))
        await asyncio.sleep(self._random.expovariate(1 / 0.3))
        call.cancel()

    async def _never(self, case: Case) -> None:
        """Asks for a stream and reads nothing of it."""
        self._report.sent += 1
        self._report.unsure += 1
        url = httpx.URL(self._http_url)
        body = json.dumps(self._body(case, stream=True, logprobs=5, n=2)).encode()
        _, writer = await asyncio.open_connection(url.host, url.port, limit=2)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await asyncio.sleep(self._random.uniform(0.1, 2.0))
        writer.transport.abort()

    async def _wrong(self, case: Case) -> None:
        self._report.sent += 1
        path, content = self._random.choice(
            [
                ("/v1/completions", b"{"),
                ("/v1/completions", json.dumps({"prompt": [self._vocab * 1000]}).encode()),
                ("/v1/completions", json.dumps(self._body(case, temperature=-1)).encode()),
                ("/v1/completions", json.dumps(self._body(case, max_tokens=10 * self._max_len)).encode()),
                ("/v1/chat/completions", b'{"messages": 3}'),
                ("/generate", b'{"prompt": "\xff"}'),
                ("/generate", b'{"max_tokens": 3}'),
            ]
        )
        answer = await self._http.post(path, content=content)
        if answer.status_code == 400:
            self._report.seen["invalid"] += 1
        else:
            self._report.problem(f"{content[:60]!r} got {answer.status_code}")

    async def _wrong_grpc(self, case: Case) -> None:
        self._report.sent += 1
        try:
            await self._grpc.generate(case.prompt, max_tokens=5, top_p=7.0)
            self._report.problem("top_p 7 was accepted")
        except InvalidRequest:
            self._report.seen["invalid"] += 1

    def _answered(self, answer: httpx.Response) -> bool:
        """Notes the outcome; True: an answer has come."""
        if answer.status_code == 200:
            self._report.seen["ok"] += 1
            return True
        if answer.status_code == 429 and int(answer.headers.get("retry-after", 0)) >= 1:
            self._report.seen["rejected"] += 1
        else:
            self._report.problem(f"status {answer.status_code}: {answer.text[:200]}")
        return False

    def _compare(self, case: Case, answer: str | tuple[int, ...]) -> None:
        expected = case.text if isinstance(answer, str) else case.tokens
        self._report.compared += 1
        if answer != expected:
            self._report.problem(f"{case.options} on {len(case.prompt)} tokens: {answer!r} instead of {expected!r}")

    # Watching

    async def _watch(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            for name, pid in self._processes.items():
                self._report.readings[name].append(read_process(pid))

    async def _metrics(self) -> dict[str, float]:
        lines = (await self._http.get("/metrics")).raise_for_status().text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    async def _settled(self) -> None:
        """Waits until nothing runs; gives up after a while, for `judge` to say so."""
        end = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < end:
            values = await self._metrics()
            if not any(values[name] for name in GAUGES):
                return
            await asyncio.sleep(0.1)

    async def _rested(self) -> None:
        """The last readings: as soon as there are no more threads and files than before, or after a while."""
        end = time.monotonic() + SETTLE_SECONDS
        for name, pid in self._processes.items():
            first = self._report.readings[name][0]
            while (last := read_process(pid)).files > first.files or last.threads > first.threads:
                if time.monotonic() > end:
                    break
                await asyncio.sleep(0.1)
            self._report.readings[name].append(last)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200.0, help="of traffic (default 1200)")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=256, help="token ids of prompts are below this")
    parser.add_argument("--seed", type=int, default=0)
    parsed, more = parser.parse_known_args(arguments)
    options = ("--slots", str(parsed.slots), "--max-len", str(parsed.max_len), *more)
    with BenchServer(parsed.model, *options) as server:
        soak = Soak(server.http, server.grpc, server.pids(), vocab=parsed.vocab, seed=parsed.seed)
        report = asyncio.run(soak.run(parsed.seconds))
        print(report.text(), flush=True)
        code = server.stop()
        print(f"exit code after SIGTERM: {code}")
    return 1 if report.problems or code else 0


if __name__ == "__main__":
    sys.exit(main())
