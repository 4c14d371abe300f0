"""An engine of no cost: every verb returns at once, and the next token is always the same.

With ``step_seconds`` it has a pace, as if there were a device: each step is done so long after the one before, or after
it was dispatched, and `read` sleeps until then.

What a server does with it is the server's own work: ``benchmarks/orchestrator.py`` measures that. Its layout and model
are those of `engine.mock`; nothing is checked here, for checking is what the mock engine spends its time on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.api import TOP_LOGPROBS, Row, SamplingParams, TokenResults
from engine.mock import mock_config, mock_model

TOKEN = ord("a")


class FreeEngine:
    """`engine.api.Engine`. A step is its number of rows, and when it is done."""

    def __init__(self, slots: int, max_len: int, *, step_seconds: float = 0.0):
        self.model = mock_model()
        self.config = mock_config(slots=slots, max_len=max_len, page_size=32, prefill_chunk=64)
        self.step_seconds = step_seconds
        self.steps = 0
        self._done = 0.0
        self._prefixes = self.config.prefixes
        self._lock = threading.Lock()
        self._results = [_results(rows) for rows in range(slots + 1)]

    def acquire_prefix(self) -> object:
        with self._lock:
            if not self._prefixes:
                raise LookupError("all prefixes are out")
            self._prefixes -= 1
        return object()

    def release_prefix(self, prefix: object) -> None:
        with self._lock:
            self._prefixes += 1

    def prefill(
        self, prefix: object, tokens: np.ndarray, start: int, sampling: SamplingParams, **more: Any
    ) -> tuple[int, float]:
        return 1, 0.0

    def insert(
        self,
        prefix: object,
        first: Any,
        slot: int,
        pages: np.ndarray,
        length: int,
        sampling: SamplingParams,
        **more: Any,
    ) -> None:
        pass

    def fetch(self, prefix: object, pages: np.ndarray, tokens: np.ndarray, *, slot: int) -> None:
        pass

    def set_mask(self, slot: int, mask: np.ndarray | None) -> None:
        pass

    def generate(self, rows: Sequence[Row]) -> tuple[int, float]:
        self.steps += 1
        if self.step_seconds:
            self._done = max(self._done, time.monotonic()) + self.step_seconds
        return len(rows), self._done

    def read(self, step: tuple[int, float]) -> TokenResults:
        rows, done = step
        if (left := done - time.monotonic()) > 0:
            time.sleep(left)
        return self._results[rows]

    def read_prompt(self, step: Any) -> TokenResults:
        raise NotImplementedError("the free engine knows no log-probs of prompts")


def _results(rows: int) -> TokenResults:
    nothing = np.zeros((rows, TOP_LOGPROBS), np.float32)
    return TokenResults(np.full(rows, TOKEN, np.int32), np.zeros(rows, np.float32), nothing.astype(np.int32), nothing)
