"""Hugging Face transformers on PyTorch, as a worker of ``benchmarks/peers.py``.

Eager, with its own cache and SDPA attention, the model called once per step: `generate` would only add to that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_worker import THREADS, Peer, run


class Transformers:
    def __init__(self, model: Any, torch: Any):  # which have no types here
        self._model, self._torch = model, torch

    def decode(self, prompts: Sequence[Sequence[int]], new: int) -> tuple[float, list[list[int]]]:
        with self._torch.inference_mode():
            output = self._model(input_ids=self._tensor(prompts), use_cache=True, logits_to_keep=1)
            last = output.logits[:, -1:].argmax(-1)
            tokens = [last]
            self._synchronize()
            began = time.perf_counter()
            for _ in range(new - 1):
                output = self._model(input_ids=last, past_key_values=output.past_key_values, use_cache=True)
                last = output.logits[:, -1:].argmax(-1)
                tokens.append(last)
            self._synchronize()
            seconds = time.perf_counter() - began
        return seconds, self._torch.cat(tokens, 1).tolist()

    def prefill(self, prompt: Sequence[int]) -> float:
        with self._torch.inference_mode():
            began = time.perf_counter()
            output = self._model(input_ids=self._tensor([prompt]), use_cache=True, logits_to_keep=1)
            output.logits[:, -1].argmax(-1).tolist()
            return time.perf_counter() - began

    def _tensor(self, ids: Sequence[Sequence[int]]) -> Any:
        return self._torch.tensor(list(ids), device=self._model.device)

    def _synchronize(self) -> None:
        if self._model.device.type == "cuda":
            self._torch.cuda.synchronize()


def make(path: str) -> tuple[Peer, str]:
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    file = Path(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    return Transformers(model, torch), f"transformers {transformers.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    run(make)
