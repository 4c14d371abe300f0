"""Hugging Face transformers with random weights, made on the device: a worker of ``benchmarks/gpu.py``. Its model file
is a ``config.json`` of a Llama."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peer_transformers import Transformers
from benchmarks.peer_worker import Peer, run


def make(path: str) -> tuple[Peer, str]:
    import torch
    import transformers

    on_gpu = torch.cuda.is_available()
    torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)
    config = transformers.LlamaConfig(**json.loads(Path(path).read_text()), attn_implementation="sdpa")
    with torch.device("cuda" if on_gpu else "cpu"):
        model = transformers.LlamaForCausalLM(config).eval()
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return Transformers(model, torch), f"{version} on {'GPU' if on_gpu else 'CPU'}"


if __name__ == "__main__":
    run(make)
