"""What the HTTP APIs promise, made from gRPC messages: pure functions and small accumulators, without any transport.

A `Choice` collects what one sample of one prompt has produced; a `AnswerFormat` turns choices into the answer of its API,
whole or in chunks. OpenAI's API reference is the source of every name here.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from protos.orchestrator_pb2 import DecodeResponse, TokenLogprob
from server.text.tool_forms import CallPiece, Parsed, ToolParser

Json = dict[str, Any]
LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have


def logprob_value(value: float) -> float:
    return value if value > LOWEST_LOGPROB else LOWEST_LOGPROB  # also for NaN, which compares false


@dataclasses.dataclass
class Choice:
    """What has come of one sample. `take` hands over the new part, for a chunk.

    ``echo``: the prompt comes before the answer. ``include_stop``: the text has the stop string that ended it.
    """

    index: int
    text: str = ""
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    echo: bool = False
    include_stop: bool = False

    def add_prompt(self, prompt: DecodeResponse.Prompt) -> None:
        self.text += prompt.text
        self.prompt_logprobs.extend(prompt.logprobs)
        if self.echo:
            self.logprobs.extend(prompt.logprobs)

    def add(self, sample: DecodeResponse.StreamContent.Sample) -> None:
        self.text += sample.text
        self.logprobs.extend(sample.logprobs)
        if sample.HasField("finish_reason"):
            self.finish_reason = sample.finish_reason
        if self.include_stop:
            self.text += sample.stop_string

    @property
    def empty(self) -> bool:
        return not (self.text or self.logprobs or self.finish_reason)

    def take(self) -> Choice:
        taken = Choice(self.index, self.text, self.logprobs, self.finish_reason)
        self.text, self.logprobs, self.finish_reason = "", [], None
        return taken


@dataclasses.dataclass
class TotalUsage:
    """Usage of all prompts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, usage: DecodeResponse.Usage) -> None:
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.cached_tokens += usage.cached_tokens

    def json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class AnswerFormat:
    """How an API spells an answer."""

    def whole(self, choices: Sequence[Choice], usage: TotalUsage) -> Json:
        raise NotImplementedError

    def first_chunks(self, choices: Iterable[Choice]) -> list[Json]:
        """Sent before anything is generated."""
        return []

    def chunks(self, choice: Choice) -> list[Json]:
        """For what is new of one choice."""
        raise NotImplementedError

    def usage_chunk(self, usage: TotalUsage) -> Json | None:
        """Sent after everything, where it was asked for."""
        return None


class GenerateFormat(AnswerFormat):
    """``/generate``."""

    def whole(self, choices: Sequence[Choice], usage: TotalUsage) -> Json:
        return {"response": choices[0].text}

    def chunks(self, choice: Choice) -> list[Json]:
        return [{"response": choice.text}] if choice.text else []


class _OpenAIFormat(AnswerFormat):
    prefix: str
    object: str
    chunk_object: str

    def __init__(self, model: str, *, logprobs: int | None, include_usage: bool, prompt_logprobs: int | None = None):
        self._id = self.prefix + secrets.token_hex(12)
        self._created = int(time.time())
        self._model = model
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self._include_usage = include_usage

    def whole(self, choices: Sequence[Choice], usage: TotalUsage) -> Json:
        answers = [self._choice(choice) for choice in choices]
        return self._envelope(self.object, answers) | {"usage": usage.json()}

    def usage_chunk(self, usage: TotalUsage) -> Json | None:
        return self._envelope(self.chunk_object, []) | {"usage": usage.json()} if self._include_usage else None

    def _chunk(self, choice: Json) -> Json:
        chunk = self._envelope(self.chunk_object, [choice])
        return chunk | {"usage": None} if self._include_usage else chunk

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _choice(self, choice: Choice) -> Json:
        raise NotImplementedError


class CompletionFormat(_OpenAIFormat):
    """``/v1/completions``."""

    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def chunks(self, choice: Choice) -> list[Json]:
        return [] if choice.empty else [self._chunk(self._choice(choice))]

    def _choice(self, choice: Choice) -> Json:
        logprobs = None if self._logprobs is None else completion_logprobs(choice.logprobs, self._logprobs)
        made = {"index": choice.index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        if self._prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, self._prompt_logprobs)
        return made


class ChatFormat(_OpenAIFormat):
    """``/v1/chat/completions``. ``parser`` makes what looks for tool calls in a choice's text; `None`: nothing does."""

    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        *,
        logprobs: int | None,
        include_usage: bool,
        prompt_logprobs: int | None = None,
        parser: Callable[[], ToolParser] | None = None,
    ):
        super().__init__(model, logprobs=logprobs, include_usage=include_usage, prompt_logprobs=prompt_logprobs)
        self._make_parser = parser
        self._parsers: dict[int, ToolParser] = {}

    def whole(self, choices: Sequence[Choice], usage: TotalUsage) -> Json:
        made = super().whole(choices, usage)
        if self._prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs, self._prompt_logprobs)
        return made

    def first_chunks(self, choices: Iterable[Choice]) -> list[Json]:
        return [self._delta(choice.index, {"role": "assistant", "content": ""}) for choice in choices]

    def chunks(self, choice: Choice) -> list[Json]:
        parsed = self._parse(choice)
        deltas: list[Json] = []
        if parsed.content or (choice.logprobs and not parsed.pieces):
            deltas.append({"content": parsed.content})
        deltas += [{"tool_calls": [_call_delta(piece)]} for piece in parsed.pieces]
        logprobs = self._logprobs_of(choice)
        chunks = []
        for delta in deltas:
            chunks.append(self._delta(choice.index, delta, logprobs))
            logprobs = None  # said once
        if choice.finish_reason is not None:
            chunks.append(self._delta(choice.index, {}, finish_reason=self._finish_reason(choice)))
        return chunks

    def _parse(self, choice: Choice) -> Parsed:
        """What is new of a choice, content and calls apart."""
        if self._make_parser is None:
            return Parsed(choice.text)
        parser = self._parsers.setdefault(choice.index, self._make_parser())
        parsed = parser.push(choice.text)
        if choice.finish_reason is not None:
            last = parser.finish()
            parsed = Parsed(parsed.content + last.content, parsed.pieces + last.pieces)
        return parsed

    def _finish_reason(self, choice: Choice) -> str | None:
        parser = self._parsers.get(choice.index)
        called = parser is not None and parser.calls and not parser.is_cut
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason

    def _delta(self, index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
        return self._chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})

    def _choice(self, choice: Choice) -> Json:
        parsed = self._parse(choice)
        message: Json = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.pieces:
            message = message | {"content": parsed.content or None, "tool_calls": _whole_calls(parsed.pieces)}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs_of(choice),
            "finish_reason": self._finish_reason(choice),
        }

    def _logprobs_of(self, choice: Choice) -> Json | None:
        return None if self._logprobs is None else {"content": chat_logprobs(choice.logprobs), "refusal": None}


def _call_delta(piece: CallPiece) -> Json:
    """A piece of a tool call, as a chunk has it."""
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _whole_calls(pieces: Iterable[CallPiece]) -> list[Json]:
    calls: list[Json] = []
    for piece in pieces:
        if piece.id is not None:
            function = {"name": piece.name, "arguments": piece.arguments}
            calls.append({"id": piece.id, "type": "function", "function": function})
        else:
            calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls


def completion_logprobs(tokens: Iterable[TokenLogprob], limit: int) -> Json:
    """The log-probs object of completions: parallel lists; the at most ``limit`` alternatives of a token always include the token
    itself."""
    result: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        result["tokens"].append(token.text)
        result["text_offset"].append(token.text_offset)
        if not token.HasField("logprob"):  # the first token of a prompt
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        top: dict[str, float] = {}
        for other in token.alternatives[:limit]:
            top.setdefault(other.text, logprob_value(other.logprob))  # of two with the same text the more probable one
        top.setdefault(token.text, logprob_value(token.logprob))
        result["token_logprobs"].append(logprob_value(token.logprob))
        result["top_logprobs"].append(top)
    return result


def prompt_logprobs(tokens: Iterable[TokenLogprob], limit: int) -> list[Json | None]:
    """vLLM's ``prompt_logprobs``: by token id, the prompt's own token and the ``limit`` most probable ones. ``rank`` is 1 for the
    most probable; `None`: the token is not among those that were reported."""
    result: list[Json | None] = []
    for token in tokens:
        if not token.HasField("logprob"):  # the first
            result.append(None)
            continue
        ranks = {other.token_id: rank for rank, other in enumerate(token.alternatives, 1)}
        entries: Json = {}
        reported: list[TokenLogprob | TokenLogprob.Alternative] = [token, *token.alternatives[:limit]]
        for one in reported:
            entries.setdefault(
                str(one.token_id),
                {"logprob": logprob_value(one.logprob), "rank": ranks.get(one.token_id), "decoded_token": one.text},
            )
        result.append(entries)
    return result


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> list[Json]:
    """The log-probs list of chat completions."""
    return [
        _chat_token(token) | {"top_logprobs": [_chat_token(other) for other in token.alternatives]} for token in tokens
    ]


def _chat_token(token: TokenLogprob | TokenLogprob.Alternative) -> Json:
    return {"token": token.text, "logprob": logprob_value(token.logprob), "bytes": list(token.raw)}


def error_body(message: str, kind: str, code: str | None, param: str | None) -> Json:
    return {"error": {"message": message, "type": kind, "code": code, "param": param}}
