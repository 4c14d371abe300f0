"""What int8 weights and int8 keys and values cost in accuracy: perplexity on a fixed text.

``python -m benchmarks.perplexity [--model M] [--text FILE]`` scores the text (benchmarks/data/lighthouse.txt) with each combination of
``--quantize`` and ``--kv-dtype`` and prints the perplexity, its ratio to that of unquantized weights, and the bytes of both.
Perplexity is exp of the mean negative log-likelihood per token, the first one left out.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from benchmarks.bare_engine import compile_table
from benchmarks.output import Table
from engine.agreement import read_model
from engine.api import SamplingParams
from engine.checkpoints import open_checkpoint
from engine.config import EngineConfig, call_bytes, layer_layout
from engine.jax_engine import JaxEngine
from engine.loader import load_weights
from engine.programs import tree_bytes
from server.start.model_files import resolve_model
from server.text.tokenizers import load_tokenizer

TEXT = Path(__file__).parent / "data" / "lighthouse.txt"
Kind = tuple[Literal["none", "int8"], Literal["auto", "int8"]]  # of weights, and of keys and values
KINDS: tuple[Kind, ...] = (("none", "auto"), ("int8", "auto"), ("none", "int8"), ("int8", "int8"))
CHUNK = 256  # tokens


def log_likelihoods(engine: JaxEngine, ids: list[int]) -> np.ndarray:
    """The log-probability of each token but the first, given those before it."""
    prefix = engine.acquire_prefix()
    found = []
    for start in range(0, len(ids), CHUNK):
        piece, end = np.array(ids[start : start + CHUNK], np.int32), min(start + CHUNK, len(ids))
        following = ids[end] if end < len(ids) else -1
        step = engine.prefill(
            prefix, piece, start, SamplingParams(), last=False, next_token=following, prompt_logprobs=True, prompt_length=len(ids)
        )  # fmt: skip
        found.append(engine.read_prompt(step).logprobs)
    engine.release_prefix(prefix)
    return np.concatenate(found)[: len(ids) - 1]


def make_engine(path: Path, length: int, quantize: Literal["none", "int8"], kv_dtype: Literal["auto", "int8"]) -> JaxEngine:
    """An engine that has one program for chunks, and what goes with it."""
    checkpoint = open_checkpoint(path)
    model, platform = read_model(checkpoint), jax.devices()[0].platform
    config = EngineConfig(
        slots=1,
        max_len=length,
        kv_pages=2 + length // 32,
        prefill_buckets=(CHUNK,),
        batch_sizes=(1,),
        quantize=quantize,
        kv_dtype=kv_dtype,
        layers=layer_layout(platform),
        call_bytes=call_bytes(platform),
    )
    engine = JaxEngine(model, config, jax.devices()[:1])
    engine.install({done.program.name: done.compiled for done in compile_table(engine.programs())})
    engine.set_weights(load_weights(checkpoint, model, engine.abstract_weights))
    engine.allocate()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, default=TEXT)
    arguments = parser.parse_args()
    path = Path(resolve_model(arguments.model))
    ids = load_tokenizer(path).encode(arguments.text.read_text())
    rows, first = [], None
    for quantize, kv_dtype in KINDS:
        engine = make_engine(path, -(-len(ids) // 32) * 32 + 32, quantize, kv_dtype)
        perplexity = math.exp(-float(np.mean(log_likelihoods(engine, ids), dtype=np.float64)))
        first = first or perplexity
        names = (quantize if quantize != "none" else engine.config.dtype, kv_dtype if kv_dtype != "auto" else engine.config.dtype)
        weights = tree_bytes(engine.abstract_weights) / 2**20
        per_token = tree_bytes(engine.abstract_prefix.pools) // engine.config.prefix_capacity
        rows.append((*names, f"{perplexity:.3f}", f"{perplexity / first:.4f}", round(weights), per_token))
    columns = ("weights", "keys and values", "perplexity", "ratio", "weights MiB", "KV bytes a token")
    print(Table(f"Perplexity of {len(ids)} tokens", columns, rows).text())


if __name__ == "__main__":
    main()
