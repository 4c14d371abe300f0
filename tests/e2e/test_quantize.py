"""A server whose weights, keys and values are int8, with an adapter beside them."""

import pathlib

import httpx
import pytest
from server_process import serving

from server.config.commands import load_serve_config
from server.errors import StartError

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
OPTIONS = ("--slots", "2", "--max-len", "160", "--prefill-buckets", "32", "--served-model-name", "tiny", "--warmup", "aot")


def test_int8_serves_without_compiling_and_a_prefix_hit_changes_nothing(cache):
    options = (*OPTIONS, "--quantize", "int8", "--kv-dtype", "int8", "--lora", f"one={GOLDEN / 'adapter'}")
    prompt = [7 * i % 200 + 3 for i in range(100)]
    with serving(GOLDEN / "tiny_llama", cache, *options) as server:

        def answer(model):
            body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
            response = httpx.post(f"{server.http}/v1/completions", json=body, timeout=120).json()
            cached = response["usage"]["prompt_tokens_details"]["cached_tokens"]
            return response["choices"][0]["text"], response["choices"][0]["logprobs"]["token_logprobs"], cached

        for model in ("tiny", "one"):
            text, logprobs, cached = answer(model)
            assert cached == 0
            again, logprobs_again, cached = answer(model)
            assert cached == 96  # three pages of 32
            assert again == text and logprobs_again == pytest.approx(logprobs, abs=1e-3)
        report = server.warmup()
        assert (report["compiles_since_ready"], report["traces_since_ready"]) == (0, 0)


@pytest.mark.parametrize("option", ["--quantize", "--kv-dtype"])
def test_another_kind_is_an_error_by_name(option):
    with pytest.raises(StartError, match=f"{option}.*int8"):
        load_serve_config({option[2:].replace("-", "_"): "int3"}, {})
