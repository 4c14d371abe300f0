"""One sequence: one sample of one request, as the scheduler sees it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable
from typing import NamedTuple

from engine.api import SamplingParams
from server.text.guided import Matcher


class Stage(enum.Enum):
    """Where a sequence is. A sequence that is put back goes from any of the middle stages to ``WAITING``."""

    WAITING = "waiting"  # in the queue; holds nothing
    PREFILL = "prefill"  # its prompt is being computed into a prefix; slot and pages are reserved
    READY = "ready"  # prefilled, its first token is known; waits for insert
    DECODE = "decode"  # in its slot
    ENDED = "ended"  # holds nothing any more


class Rank(NamedTuple):  # compared at every step, so a tuple
    """The order of service: priority (lower first), then arrival, then sample. The youngest is the largest."""

    priority: int
    arrival: int  # serial number of the request
    sample: int


@dataclasses.dataclass(eq=False)
class Sequence:
    """``tokens`` are the prompt and every generated token that was read; ``planned`` counts the generated tokens
    including those of steps that were dispatched and not read yet. ``epoch`` changes whenever the sequence leaves its
    slot, so that (sequence, epoch) names one stay in a slot: results of an earlier stay are recognised by it and
    dropped.
    """

    rank: Rank
    tokens: list[int]
    sampling: SamplingParams
    max_tokens: int
    matcher: Matcher | None = None  # the grammar its text keeps to
    use_cache: bool = True  # may take its prompt's beginning from the prefix cache
    prompt_tokens: int = 0  # length of the prompt proper
    stage: Stage = Stage.WAITING
    epoch: int = 0
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    shared_pages: int = 0  # the first of `pages`, taken from the prefix cache
    prefill_length: int = 0  # tokens to prefill in this stay: the prompt, and what was generated before a put-back
    prefilled: int = 0  # of them, tokens in the prefix already
    regime: Hashable = None  # of this stay: what its keys depend on beside the tokens (adapter, `ModelConfig.regime`)
    planned: int = 0
    put_back: int = 0  # how often
    complete: bool = False  # has all its tokens, while its prompt is still on the way into the pool

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def generated(self) -> int:
        """Generated tokens that were read."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def position(self) -> int:
        """Where the next step of this sequence writes."""
        return self.prompt_tokens + self.planned - 1

    @property
    def awaits_token(self) -> bool:
        """Whether its next step must wait for the token of the one before, which says what the grammar allows then."""
        return self.matcher is not None and self.planned > self.generated
