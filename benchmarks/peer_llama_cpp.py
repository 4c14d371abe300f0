"""llama.cpp through the low-level functions of llama-cpp-python, as a worker of ``benchmarks/peers.py``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.peer_worker import THREADS, Peer, run

BATCH = 2048  # tokens of a call; llama.cpp cuts them in pieces of 512


class LlamaCpp:
    def __init__(self, model: Any, llama_cpp: Any):  # which have no types here
        self._model, self._lib = model, llama_cpp
        self._sampler = llama_cpp.llama_sampler_init_greedy()

    def decode(self, prompts: Sequence[Sequence[int]], new: int) -> tuple[float, list[list[int]]]:
        longest = max(len(prompt) for prompt in prompts)
        with self._context(len(prompts), longest + new) as (context, batch):
            last = []
            for sequence, prompt in enumerate(prompts):  # each fits in a call
                self._fill(batch, [(token, place, sequence) for place, token in enumerate(prompt)], len(prompt) - 1)
                self._run(context, batch)
                last.append(self._sample(context, len(prompt) - 1))
            tokens = [[token] for token in last]
            began = time.perf_counter()
            for step in range(new - 1):
                rows = [(row[-1], len(prompt) + step, index)
                        for index, (row, prompt) in enumerate(zip(tokens, prompts, strict=True))]  # fmt: skip
                self._fill(batch, rows, None)
                self._run(context, batch)
                for index, row in enumerate(tokens):
                    row.append(self._sample(context, index))
            return time.perf_counter() - began, tokens

    def prefill(self, prompt: Sequence[int]) -> float:
        with self._context(1, len(prompt) + 1) as (context, batch):
            self._fill(batch, [(token, place, 0) for place, token in enumerate(prompt)], len(prompt) - 1)
            began = time.perf_counter()
            self._run(context, batch)
            self._sample(context, len(prompt) - 1)
            return time.perf_counter() - began

    @contextlib.contextmanager
    def _context(self, sequences: int, length: int) -> Iterator[tuple[Any, Any]]:
        lib = self._lib
        parameters = lib.llama_context_default_params()
        parameters.n_ctx = sequences * -(-length // 256) * 256
        parameters.n_batch = BATCH
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = THREADS
        parameters.type_k = parameters.type_v = lib.GGML_TYPE_F32
        context = lib.llama_init_from_model(self._model, parameters)
        batch = lib.llama_batch_init(BATCH, 0, 1)
        try:
            self._fill(batch, [(3, 0, 0)], None)  # the first call allocates
            self._run(context, batch)
            lib.llama_memory_clear(lib.llama_get_memory(context), True)
            yield context, batch
        finally:
            lib.llama_batch_free(batch)
            lib.llama_free(context)

    def _fill(self, batch: Any, rows: Sequence[tuple[int, int, int]], wanted: int | None) -> None:
        """Rows are (token, position, sequence); ``wanted`` is the row whose logits are wanted, `None`: all."""
        batch.n_tokens = len(rows)
        for index, (token, position, sequence) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted is None or index == wanted

    def _run(self, context: Any, batch: Any) -> None:
        if code := self._lib.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode failed with {code}")

    def _sample(self, context: Any, row: int) -> int:
        return int(self._lib.llama_sampler_sample(self._sampler, context, row))


def make(path: str) -> tuple[Peer, str]:
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    return LlamaCpp(model, llama_cpp), f"llama-cpp-python {llama_cpp.__version__}"


if __name__ == "__main__":
    run(make)
