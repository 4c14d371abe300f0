"""The prefill thread: prompts into prefixes, chunk by chunk, and the first token.

It takes the next sequence the scheduler admits, has the owner fetch what the prefix cache holds of it, and computes the
rest when it has its turn. The first token is read here: it may end the sequence before anything is inserted. Otherwise
prefix and step go to the owner for `insert`. A sequence that was cancelled or put back meanwhile is noticed between
chunks, and its prefix is returned.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from engine.api import SamplingParams
from server.live_request import LiveRequest, Output
from server.request import TokenLogprob
from server.scheduler import Chunk
from server.sequence import Sequence
from server.shared import Fetch, Insert, PromptScored, Shared, token_logprob
from server.transcript import Ending


class PrefillWorker:
    """Runs in a thread of its own until ``shared.stop``."""

    def __init__(self, shared: Shared):
        self._shared = shared
        self._engine = shared.engine

    def run(self) -> None:
        while (admitted := self._next()) is not None:
            live, sequence, epoch = admitted
            self._shared.hook("prefill")
            prefix = self._engine.acquire_prefix()
            handed_over = False
            try:
                handed_over = self._prefill(live, sequence, epoch, prefix)
            except Exception as error:
                self._shared.fault(live, "prefill", error)
            finally:
                if not handed_over:
                    self._engine.release_prefix(prefix)
                    with self._shared.lock:
                        self._shared.prefix_returned()

    def _next(self) -> tuple[LiveRequest, Sequence, int] | None:
        shared = self._shared
        with shared.lock:
            while not shared.stopping:
                sequence = shared.scheduler.admit()
                if sequence is not None:
                    return shared.began(sequence), sequence, sequence.epoch
                shared.admission.wait()
        return None

    def _prefill(self, live: LiveRequest, sequence: Sequence, epoch: int, prefix: Any) -> bool:
        """Computes a prompt. True: the owner has the prefix now; False: it is to be returned."""
        shared = self._shared
        shared.hook("prefill", live.request)
        scores = live.request.prompt_logprobs and sequence.rank.sample == 0 and not live.prompt_logprobs
        sampling, generated = sampling_now(sequence)
        extra = {} if generated is None else {"generated": generated}
        if sequence.matcher is not None:
            extra["mask"] = sequence.matcher.mask()
        scored: list[TokenLogprob | None] = [None]
        if sequence.shared_pages and not self._fetch(sequence, epoch, prefix):
            return False
        while True:
            if not shared.turns.take():
                return False
            try:
                chunk = self._next_chunk(sequence, epoch)
                if chunk is None:
                    return False
                step = self._engine.prefill(
                    prefix, chunk.tokens, chunk.start, sampling, last=chunk.last, next_token=chunk.next_token,
                    prompt_logprobs=scores, prompt_length=sequence.prefill_length, **(extra if chunk.last else {}),
                )  # fmt: skip
            finally:
                shared.turns.dispatched()
            if live.counted:
                shared.metrics.prefilled_tokens.inc(len(chunk.tokens))
            if scores:
                scored += self._score(step, chunk)
            if chunk.last:
                break
        if scores:
            live.prompt_logprobs = scored
            shared.outputs.put(PromptScored(live))
        if not sequence.max_tokens:
            return self._end_without_tokens(live, sequence, epoch)
        return self._hand_over(live, sequence, epoch, prefix, step)

    def _fetch(self, sequence: Sequence, epoch: int, prefix: Any) -> bool:
        shared = self._shared
        fetch = Fetch(sequence, epoch, prefix)
        with shared.lock:
            shared.inbox.append(fetch)
            shared.work.notify()
            while not fetch.done and not shared.stopping:
                shared.fetched.wait()
        if fetch.error is not None:
            raise fetch.error
        return fetch.done

    def _next_chunk(self, sequence: Sequence, epoch: int) -> Chunk | None:
        """`None`: the sequence is not to be prefilled any more."""
        with self._shared.lock:
            if not self._shared.scheduler.current(sequence, epoch):
                return None
            return self._shared.scheduler.next_chunk(sequence)

    def _score(self, step: Any, chunk: Chunk) -> list[TokenLogprob]:
        """The log-probs of the prompt tokens that follow a chunk's."""
        results = self._engine.read_prompt(step)
        rows = len(chunk.tokens) - int(chunk.last)  # nothing of the prompt follows its last token
        return [token_logprob(results, row) for row in range(rows)]

    def _end_without_tokens(self, live: LiveRequest, sequence: Sequence, epoch: int) -> bool:
        with self._shared.lock:
            if self._shared.scheduler.current(sequence, epoch):
                self._shared.release(sequence)
        self._shared.outputs.put(
            [Output(live, sample, None, None, Ending("length")) for sample in range(len(live.transcripts))]
        )
        return False

    def _hand_over(self, live: LiveRequest, sequence: Sequence, epoch: int, prefix: Any, step: Any) -> bool:
        """Takes in the first token and gives the rest of the sequence's life to the owner."""
        shared = self._shared
        results = self._engine.read(step)
        with shared.lock:
            output = shared.commit(sequence, epoch, int(results.tokens[0]), results, 0)
            if output is None:
                return False
            if output.ending is not None:
                shared.complete(sequence)
                if not shared.scheduler.current(sequence, epoch):
                    shared.release(sequence)
        if output.ending is None:
            shared.outputs.put([output])
        with shared.lock:
            if not shared.scheduler.current(sequence, epoch):
                if output.ending is not None:
                    shared.outputs.put([output], force=True)
                return False
            shared.turns.expect()
            shared.inbox.append(Insert(live, sequence, epoch, prefix, step, output if output.ending else None))
            shared.work.notify()
        return True


def sampling_now(sequence: Sequence) -> tuple[SamplingParams, np.ndarray | None]:
    """The options for what remains of a sequence, and the generated tokens that its penalties have to count.

    Both differ from the request's only after a put-back, when generated tokens are prefilled like a prompt.
    """
    sampling = sequence.sampling
    if not sequence.prefill_length > sequence.prompt_tokens:
        return sampling, None
    generated = sequence.tokens[sequence.prompt_tokens : sequence.prefill_length]
    remaining = dataclasses.replace(sampling, min_tokens=max(0, sampling.min_tokens - len(generated)))
    if sampling.presence_penalty or sampling.frequency_penalty:
        return remaining, np.array(generated, np.int32)
    return remaining, None
