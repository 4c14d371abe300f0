"""The verbs of an engine and the values that cross them.

The life of a sequence, and who calls what::

    prefill thread    prefix = engine.acquire_prefix()
                      prefix = engine.fetch(prefix, pages, tokens, slot)    (owner thread; only on a prefix-cache hit)
                      first  = engine.prefill(prefix, chunk, ...)           (once per chunk; the last one samples)
    owner thread      engine.insert(prefix, slot, pages, ...)               (prefix -> pages of the pool)
                      engine.release_prefix(prefix)
                      step   = engine.generate(rows)                        (every active row advances by one token)
    any thread        result = engine.read(step)                            (blocks until the device has it)

Ownership: the decode state with the page pool belongs to the one thread that calls ``insert``, ``fetch``, ``set_mask`` and
``generate``. A prefix belongs to whoever acquired it. All verbs but ``read`` only dispatch: they return before the device is
done, and the device runs them in the order of dispatch for each buffer.

Everything passed in is numpy or plain Python, everything handed back is opaque until ``read``; every verb calls one program of
the table (``engine/programs.py``), so nothing a caller can pass makes a new program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from engine.config import EngineConfig, ModelConfig

# What an engine hands out and takes back. Each has types of its own, which nobody else looks into.
Prefix = Any
Step = Any

TOP_LOGPROBS = 20  # the most alternatives that are ever reported for a token
MAX_LOGIT_BIAS = 300  # entries of one request's logit_bias (OpenAI's limit)
MAX_SUPPRESSED = 32  # ids held back until min_tokens: EOS ids and stop_token_ids together


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one sequence is computed and chooses its tokens. Values are valid already: the server checks them
    (``server/orchestrator/validation.py``).

    The order of application is: logit_bias, suppressed ids, mask, penalties (repetition over prompt and generated tokens, then
    frequency and presence over generated ones), temperature, top-n-sigma, top-k, top-p, min-p.
    """

    temperature: float = 0.0  # 0 is greedy
    top_n_sigma: float = 0.0  # 0 and less are off
    top_k: int = 0  # 0 is off; of equal tokens those of the lowest ids are kept, by top-p too
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # 0 .. 2**64 - 1
    sample: int = 0  # index of this sample among the request's n; part of the random key
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias), at most MAX_LOGIT_BIAS
    min_tokens: int = 0  # until so many tokens are generated, `suppressed` ids cannot be chosen
    suppressed: tuple[int, ...] = ()  # at most MAX_SUPPRESSED
    logprobs: bool = False  # log-probs of generated tokens and of TOP_LOGPROBS alternatives
    adapter: int = 0  # which of `EngineConfig.adapters` computes the sequence, from 1; 0 is the model itself


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a decode step: the slot that advances, and the page that holds the position it writes.

    Where there are several groups (`EngineConfig.groups`), each has a pool, and a slot's pages are those of its group's,
    ``slot % groups``.
    """

    slot: int
    page: int


@dataclasses.dataclass(frozen=True)
class TokenResults:
    """What a step chose, on the host. Log-probs are the model's own log-softmax in nats; zeros where no row asked for them."""

    tokens: np.ndarray  # int32 [rows]
    logprobs: np.ndarray  # float32 [rows]
    top_tokens: np.ndarray  # int32 [rows, TOP_LOGPROBS], most probable first
    top_logprobs: np.ndarray  # float32 [rows, TOP_LOGPROBS]


class Engine(Protocol):
    """What the orchestrator needs of an engine. `engine.jax_engine.JaxEngine` and `engine.mock.MockEngine` have it."""

    model: ModelConfig
    config: EngineConfig

    def acquire_prefix(self) -> Prefix:
        """A prefix buffer, empty. Raises `LookupError` when all ``config.prefixes`` are out: the caller counts them."""

    def release_prefix(self, prefix: Prefix) -> None:
        """Gives a prefix back. Any prefix that was acquired may be released, at any stage, also after a failed prefill."""

    def prefill(
        self,
        prefix: Prefix,
        tokens: np.ndarray,  # int32 [n], 1 <= n <= config.prefill_chunk
        start: int,  # tokens already in the prefix; the position of tokens[0]
        sampling: SamplingParams,
        *,
        last: bool,  # the prompt ends here: sample the first token
        next_token: int = -1,  # prompt token after this chunk; -1: none. Only read with prompt_logprobs
        prompt_logprobs: bool = False,
        mask: np.ndarray | None = None,  # restricts the first token: as in `set_mask`
        generated: np.ndarray | None = None,  # int32 [g]: see below; read only where ``last``
        prompt_length: int | None = None,  # tokens of the whole prompt; None: it ends with this chunk
    ) -> Step:
        """Computes one chunk of a prompt; the prefix is changed in place.

        A sequence that was put back is prefilled with the tokens it had generated behind its prompt. ``generated`` names
        them, so that presence and frequency penalties count them; it is passed only where those penalties are set
        (``sampling.min_tokens`` is what remains of it; the repetition penalty covers all tokens of a prefix anyway).
        ``prompt_length`` counts for models whose rotary embedding follows the length (`ModelConfig.follows_length`).

        Returns a step to `read`: one row, the first generated token, where ``last``; with ``prompt_logprobs`` also
        the log-probs of what follows each of the ``n`` positions: see `read_prompt`.
        """

    def insert(self, prefix: Prefix, first: Step, slot: int, pages: np.ndarray, length: int, sampling: SamplingParams,
               *, shared_pages: int = 0, generated: np.ndarray | None = None) -> None:
        """Copies a prefilled prefix into the pool and makes ``slot`` ready to generate. ``generated``: as in `prefill`.

        ``first`` is what the last `prefill` returned; its token becomes the row's next input without a trip to the host.
        ``pages`` [ceil(length / page_size)] are the sequence's pages; the first ``shared_pages`` of them hold their
        content already and are not written.
        """

    def fetch(self, prefix: Prefix, pages: np.ndarray, tokens: np.ndarray, *, slot: int) -> None:
        """Copies pages of the pool into a prefix (a prefix-cache hit): ``len(pages) * page_size == len(tokens)``. ``slot`` is the one
        that the prefix is for: it says whose pages (`Row`)."""

    def set_mask(self, slot: int, mask: np.ndarray | None) -> None:
        """Restricts the next tokens of a slot. ``mask`` is uint32 [ceil(vocab / 32)], little end first, a set bit allows;
        ``None`` allows everything (which is what `insert` leaves behind)."""

    def generate(self, rows: Sequence[Row]) -> Step:
        """Advances every row by one token; ``len(rows) <= config.slots``. Returns a step to `read`, in the order of rows."""

    def read(self, step: Step) -> TokenResults:
        """Waits for a step of `prefill` or `generate` and returns its rows. Raises what the device raised."""

    def read_prompt(self, step: Step) -> TokenResults:
        """The prompt log-probs of a `prefill` step: row i is about the token at position ``start + i + 1``; ``tokens[i]`` is
        that token, ``-1`` where the prompt ends."""
