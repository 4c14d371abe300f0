"""What travels through the orchestrator: a `GenerateRequest` in, `Delta`s and at last one `Finished` or an error out.

Front doors build requests with ``server/orchestrator/validation.py``; by then every value is of the right type and in range.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple, Protocol

from engine.api import SamplingParams
from server.errors import ServerError
from server.text.guided import Guide

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """One request: a prompt and the sequences wanted from it (one per entry of ``sampling``).

    ``sampling`` has one entry per sample, alike but for ``sample``, so that each sample has a random key of its own.
    """

    id: str  # for logs and the client; never a key of internal state
    prompt: tuple[int, ...]  # token ids, BOS included where the model wants one; at least one
    sampling: tuple[SamplingParams, ...]
    max_tokens: int  # of each sample; 0 only scores the prompt
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    detokenize: bool = True  # text is wanted
    shown_special: frozenset[int] = frozenset()  # control tokens that the text shows, which it leaves out otherwise
    guide: Guide | None = None  # what the text must keep to
    prompt_logprobs: bool = False
    deadline: float = math.inf  # time.monotonic() seconds
    adapter: str | None = None  # name of the LoRA adapter; its index is in ``sampling``
    priority: int = 0  # lower goes first; FIFO among equals


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probs at one generated or prompt position, in nats."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-prob), most probable first, TOP_LOGPROBS of them


class Delta(NamedTuple):
    """A piece of one sample. ``text`` and ``tokens`` need not match one to one: text waits for whole characters and for
    stop strings to be ruled out. Joined, the texts are the sample's text, the tokens its ids (a final EOS or stop token
    is counted in usage and not in ``tokens``)."""

    sample: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token where asked for
    finish_reason: FinishReason | None = None  # set in the sample's last delta
    stop_reason: int | str | None = None  # the stop string or stop token id that matched


@dataclasses.dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int  # of all samples
    cached_tokens: int  # prompt tokens taken from the prefix cache


class Sink(Protocol):
    """Where a request's output goes. Called from the detokenize thread, in order; must not wait for a client.

    After ``finish`` or ``fail`` nothing more is called.
    """

    def prompt_logprobs(self, logprobs: tuple[TokenLogprob | None, ...]) -> None:
        """Once, before any delta, if asked for; one entry per prompt token, `None` for the first."""

    def delta(self, delta: Delta) -> None: ...

    def finish(self, usage: Usage) -> None: ...

    def fail(self, error: ServerError) -> None: ...
