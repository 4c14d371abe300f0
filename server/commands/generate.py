"""``preheat generate``: prompts in, text out, through the same engine.
"""

from __future__ import annotations

import logging
import queue
import secrets

from server.commands.arguments import GenerateOptions
from server.config.commands import ServeConfig
from server.errors import ServerError, StartError
from server.orchestrator import validation
from server.orchestrator.orchestrator import Orchestrator
from server.orchestrator.request import Delta, TokenLogprob, Usage
from server.start.warm_engine import (
    OpenModel,
    open_model,
    warm_engine,
)
from server.telemetry.logs import configure_logging
from server.telemetry.metrics import Metrics
from warmup.guard import Guard
from warmup.report import WarmupReport


class QueueSink:
    """Puts a request's output into a queue: deltas, then `Usage` or the error."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Delta | Usage | ServerError] = queue.SimpleQueue()

    def prompt_logprobs(self, logprobs: tuple[TokenLogprob | None, ...]) -> None:
        raise AssertionError("nobody asked for the prompt's log-probs")

    def delta(self, delta: Delta) -> None:
        self.events.put(delta)

    def finish(self, usage: Usage) -> None:
        self.events.put(usage)

    def fail(self, error: ServerError) -> None:
        self.events.put(error)


def generate(config: ServeConfig, options: GenerateOptions) -> int:
    """Answers the prompts and prints the answers in order, each as it comes; samples of one prompt one after another."""
    configure_logging(config.log_format)
    logging.getLogger().setLevel(logging.WARNING)
    opened = open_model(config)
    with Guard() as guard:
        warm = warm_engine(config, opened, WarmupReport(config.warmup, guard=guard), guard)
        limits = opened.limits(config.served_model_name, warm.engine.config.max_len)
        samples = len(options.prompts) * (options.sampling.n or 1)
        orchestrator = Orchestrator(warm.engine, opened.tokenizer, metrics=Metrics(), max_queue=samples)
        orchestrator.start()
        orchestrator.open()
        try:
            sinks = []
            for prompt in options.prompts:
                ids = _encode(opened, prompt, options.chat)
                request = validation.build_request(options.sampling, ids, limits, request_id=secrets.token_hex(8))
                sink = QueueSink()
                orchestrator.submit(request, sink)
                sinks.append(sink)
            for sink in sinks:
                _print_answer(sink)
        except ServerError as error:
            raise StartError(error.message) from None
        finally:
            orchestrator.close()
    return 0


def _encode(opened: OpenModel, prompt: str, chat: bool) -> list[int]:
    if not chat:
        return opened.tokenizer.encode(prompt, parse_special=True)
    if opened.tokenizer.chat_template is None:
        raise StartError(f"{opened.path} has no chat template: leave out --chat")
    text = opened.tokenizer.chat_template.render([{"role": "user", "content": prompt}])
    return opened.tokenizer.encode_chat(text)


def _print_answer(sink: QueueSink) -> None:
    """The first sample as it comes; the others, which are generated at the same time, when it is done."""
    waiting: dict[int, list[str]] = {}
    while True:
        event = sink.events.get()
        match event:
            case Delta(sample=0, text=text):
                print(text, end="", flush=True)
            case Delta(sample=sample, text=text):
                waiting.setdefault(sample, []).append(text)
            case Usage():
                print()
                for _, texts in sorted(waiting.items()):
                    print("".join(texts))
                return
            case _:
                raise event
