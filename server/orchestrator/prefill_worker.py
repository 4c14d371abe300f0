"""The prefill thread: prompts into prefixes, chunk by chunk, and the first token.

It takes the next sequence the scheduler admits, has the owner fetch what the prefix cache holds of it, and computes the
rest when it has its turn. The first token is read here: it may end the sequence before anything is inserted. Otherwise
prefix and step go to the owner for `insert`. A sequence that was cancelled or put back meanwhile is noticed between
chunks, and its prefix is returned.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from engine.api import Prefix, SamplingParams, Step
from server.orchestrator.in_flight import Fetch, InFlight, Insert, PromptScored, token_logprob
from server.orchestrator.live_request import LiveRequest, Output
from server.orchestrator.request import TokenLogprob
from server.orchestrator.scheduler import Chunk
from server.orchestrator.sequence import Sequence
from server.orchestrator.transcript import Ending


class PrefillWorker:
    """Runs in a thread of its own until ``in_flight.stop``."""

    def __init__(self, in_flight: InFlight):
        self._in_flight = in_flight
        self._engine = in_flight.engine

    def run(self) -> None:
        while (admitted := self._next()) is not None:
            live, sequence, epoch = admitted
            self._in_flight.hook("prefill")
            prefix = self._engine.acquire_prefix()
            handed_over = False
            try:
                handed_over = self._prefill(live, sequence, epoch, prefix)
            except Exception as error:
                self._in_flight.fault(live, "prefill", error)
            finally:
                if not handed_over:
                    self._engine.release_prefix(prefix)
                    with self._in_flight.lock:
                        self._in_flight.prefix_returned()

    def _next(self) -> tuple[LiveRequest, Sequence, int] | None:
        in_flight = self._in_flight
        with in_flight.lock:
            while not in_flight.stopping:
                sequence = in_flight.scheduler.admit()
                if sequence is not None:
                    return in_flight.began(sequence), sequence, sequence.epoch
                in_flight.admission.wait()
        return None

    def _prefill(self, live: LiveRequest, sequence: Sequence, epoch: int, prefix: Prefix) -> bool:
        """Computes a prompt. True: the owner has the prefix now; False: it is to be returned."""
        in_flight = self._in_flight
        in_flight.hook("prefill", live.request)
        scores = live.request.prompt_logprobs and sequence.rank.sample == 0 and not live.prompt_logprobs
        sampling, generated = sampling_now(sequence)
        extra = {} if generated is None else {"generated": generated}
        if sequence.matcher is not None:
            extra["mask"] = sequence.matcher.mask()
        scored: list[TokenLogprob | None] = [None]
        if sequence.shared_pages and not self._fetch(sequence, epoch, prefix):
            return False
        while True:
            if not in_flight.turns.take():
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
                in_flight.turns.dispatched()
            if live.counted:
                in_flight.metrics.prefilled_tokens.inc(len(chunk.tokens))
            if scores:
                scored += self._score(step, chunk)
            if chunk.last:
                break
        if scores:
            live.prompt_logprobs = scored
            in_flight.outputs.put(PromptScored(live))
        if not sequence.max_tokens:
            return self._end_without_tokens(live, sequence, epoch)
        return self._hand_over(live, sequence, epoch, prefix, step)

    def _fetch(self, sequence: Sequence, epoch: int, prefix: Prefix) -> bool:
        in_flight = self._in_flight
        fetch = Fetch(sequence, epoch, prefix)
        with in_flight.lock:
            in_flight.inbox.append(fetch)
            in_flight.work.notify()
            while not fetch.done and not in_flight.stopping:
                in_flight.fetched.wait()
        if fetch.error is not None:
            raise fetch.error
        return fetch.done

    def _next_chunk(self, sequence: Sequence, epoch: int) -> Chunk | None:
        """`None`: the sequence is not to be prefilled any more."""
        with self._in_flight.lock:
            if not self._in_flight.scheduler.current(sequence, epoch):
                return None
            return self._in_flight.scheduler.next_chunk(sequence)

    def _score(self, step: Step, chunk: Chunk) -> list[TokenLogprob]:
        """The log-probs of the prompt tokens that follow a chunk's."""
        results = self._engine.read_prompt(step)
        rows = len(chunk.tokens) - int(chunk.last)  # nothing of the prompt follows its last token
        return [token_logprob(results, row) for row in range(rows)]

    def _end_without_tokens(self, live: LiveRequest, sequence: Sequence, epoch: int) -> bool:
        with self._in_flight.lock:
            if self._in_flight.scheduler.current(sequence, epoch):
                self._in_flight.release(sequence)
        self._in_flight.outputs.put(
            [Output(live, sample, None, None, Ending("length")) for sample in range(len(live.transcripts))]
        )
        return False

    def _hand_over(self, live: LiveRequest, sequence: Sequence, epoch: int, prefix: Prefix, step: Step) -> bool:
        """Takes in the first token and gives the rest of the sequence's life to the owner."""
        in_flight = self._in_flight
        results = self._engine.read(step)
        with in_flight.lock:
            output = in_flight.commit(sequence, epoch, int(results.tokens[0]), results, 0)
            if output is None:
                return False
            if output.ending is not None:
                in_flight.complete(sequence)
                if not in_flight.scheduler.current(sequence, epoch):
                    in_flight.release(sequence)
        if output.ending is None:
            in_flight.outputs.put([output])
        with in_flight.lock:
            if not in_flight.scheduler.current(sequence, epoch):
                if output.ending is not None:
                    in_flight.outputs.put([output], force=True)
                return False
            in_flight.turns.expect()
            in_flight.inbox.append(Insert(live, sequence, epoch, prefix, step, output if output.ending else None))
            in_flight.work.notify()
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
