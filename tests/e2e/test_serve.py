"""A served model, in both warmup modes: the tokens of Hugging Face transformers, whatever comes at the same time, and no compile."""

import concurrent.futures
import itertools
import pathlib
import re

import grpc
import httpx
import numpy as np
import openai
import pytest

from protos import orchestrator_pb2, orchestrator_pb2_grpc

GOLDEN = dict(np.load(pathlib.Path(__file__).parents[1] / "golden" / "tiny_llama" / "golden.npz"))
PROMPTS = [GOLDEN[f"prompt_{index}"].tolist() for index in range(4)]
ANSWERS = [GOLDEN[f"greedy_{index}"].tolist() for index in range(4)]


def decode(server, prompt, max_tokens, **options):
    """Token ids, over gRPC as a JetStream client asks for them."""
    with grpc.insecure_channel(server.grpc) as channel:
        request = orchestrator_pb2.DecodeRequest(max_tokens=max_tokens, **options)
        request.token_content.token_ids.extend(prompt)
        stub = orchestrator_pb2_grpc.OrchestratorStub(channel)
        return [token for message in stub.Decode(request) for token in message.stream_content.samples[0].token_ids]


def test_golden_tokens_over_grpc(server):
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        assert decode(server, prompt, 64) == answer


def test_four_clients_at_once_get_what_they_get_alone(server):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        order = [0, 1, 2, 3, 3, 2, 1, 0]
        found = list(threads.map(lambda index: decode(server, PROMPTS[index], 64), order))
    assert found == [ANSWERS[index] for index in order]


def test_seeds_repeat_alone_and_in_a_crowd(server):
    options = {"temperature": 1.0, "ignore_eos": True}
    alone = [decode(server, PROMPTS[1], 20, seed=seed, **options) for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        crowd = list(threads.map(lambda seed: decode(server, PROMPTS[1], 20, seed=seed, **options), range(4)))
    assert crowd == alone
    assert len({tuple(tokens) for tokens in alone}) == 4


def test_report(server):
    report = server.warmup()
    assert report["mode"] == server.mode
    assert report["state"] == "ready"
    assert report["done"] == report["total"] == len(report["programs"])
    names = {program["name"] for program in report["programs"]}
    assert {"prefill/16", "prefill/32", "prefill/64", "insert", "generate/1", "generate/2", "generate/4"} <= names
    for program in report["programs"]:
        assert program["source"] in ("compiled", "cache", "aot")
    state = next(program for program in report["programs"] if program["name"] == "generate/4")
    assert state["alias_bytes"] > 0.9 * state["output_bytes"]  # the decode state is written in place
    assert set(report["startup"]) == {"seconds_import", "seconds_weights", "seconds_programs", "seconds_proof", "seconds_total"}
    assert all(value > 0 for value in report["startup"].values())
    assert "prefill/64" in server.log
    assert "tools: calls in the form hermes (--tool-format)" in server.log


BUCKETS = [1, 15, 16, 17, 32, 33, 64, 65, 100, 128]  # every bucket, one below and one over, and several chunks
SAMPLING = [
    {}, {"temperature": 1}, {"temperature": 0.5, "top_k": 3}, {"temperature": 1, "top_p": 0.5, "seed": 7}, {"min_p": 0.1},
    {"temperature": 2, "top_k": -1, "min_p": 0.01}, {"presence_penalty": 1}, {"frequency_penalty": -1, "repetition_penalty": 1.3},
    {"logit_bias": {"5": 3.5, "7": -100}}, {"stop": ["a", "bc"]}, {"stop_token_ids": [3]}, {"min_tokens": 3}, {"ignore_eos": True},
    {"n": 2, "temperature": 1}, {"logprobs": 0}, {"logprobs": 5}, {"echo": True}, {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 1, "max_tokens": 0}, {"stream": True, "logprobs": 1}, {"priority": -1},
    {"guided_regex": "[0-9]+"}, {"guided_json": {"type": "object"}, "temperature": 1, "n": 2},
    {"guided_grammar": 'start: "a" /[a-z]/+', "stream": True, "logprobs": 1, "presence_penalty": 1},
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = [
    {}, {"response_format": {"type": "json_object"}}, {"logprobs": True, "top_logprobs": 20}, {"guided_regex": "(yes|no)!*"},
    {"continue_final_message": True, "messages": [{"role": "assistant", "content": "well"}]}, {"tools": [TOOL], "tool_choice": "none"},
]  # fmt: skip


def test_no_option_and_no_length_compiles(server):
    """Every length with options in turn, every option, every number of simultaneous requests."""
    url = f"{server.http}/v1/completions"
    rng = np.random.default_rng(5)

    def send(length, options):
        prompt = rng.integers(0, 256, length).tolist()
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, **options}
        response = httpx.post(url, json=body, timeout=120)
        assert response.status_code == 200, (body, response.text)

    for length, options in zip(BUCKETS, itertools.cycle(SAMPLING), strict=False):
        send(length, options)
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        for count in (1, 2, 3, 4, 6):
            for batch in itertools.batched(SAMPLING, count) if hasattr(itertools, "batched") else [SAMPLING[:count]]:
                list(threads.map(lambda options: send(20, options), batch))
        list(threads.map(lambda options: send(40, options), SAMPLING))
        # The same prompt again and again: prefix-cache hits of every length in pages.
        shared = rng.integers(0, 256, 150).tolist()
        for length in (150, 150, 70, 33, 32, 100):
            body = {"model": "tiny", "prompt": shared[:length], "max_tokens": 2}
            assert httpx.post(url, json=body, timeout=120).status_code == 200
    for options in CHAT:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **options}
        response = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=120)
        assert response.status_code == 200, (body, response.text)
    # Refused, cancelled.
    assert httpx.post(url, json={"model": "tiny", "prompt": "a", "guided_json": {"type": "strin"}}).status_code == 400
    assert httpx.post(url, json={"model": "tiny", "prompt": [999], "max_tokens": 1}).status_code == 400
    with httpx.stream("POST", url, json={"model": "tiny", "prompt": [1], "max_tokens": 150, "stream": True}) as response:
        next(response.iter_lines())
    server.assert_nothing_compiled()


def test_guided_rows_beside_others_keep_to_their_grammar(server):
    """Half of the clients are guided; the others get the tokens that they get alone."""
    def guided(seed):
        body = {"model": "tiny", "prompt": [seed], "max_tokens": 20, "guided_regex": "[0-9]{3}-[a-f]{5}", "seed": seed}
        choice = httpx.post(f"{server.http}/v1/completions", json=body, timeout=120).json()["choices"][0]
        return choice["text"], choice["finish_reason"]

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        texts = threads.map(guided, range(6))
        tokens = threads.map(lambda index: decode(server, PROMPTS[index], 64), range(4))
        for text, reason in texts:
            assert re.fullmatch("[0-9]{3}-[a-f]{5}", text) and reason == "stop"
        assert list(tokens) == ANSWERS
    server.assert_nothing_compiled()


def test_openai_client(server):
    client = openai.OpenAI(base_url=f"{server.http}/v1", api_key="unused")
    assert [model.id for model in client.models.list()] == ["tiny"]
    whole = client.completions.create(model="tiny", prompt=PROMPTS[1], max_tokens=64, temperature=0)
    pieces = client.completions.create(model="tiny", prompt=PROMPTS[1], max_tokens=64, temperature=0, stream=True)
    want = bytes(token for token in ANSWERS[1] if token < 256).decode(errors="replace")
    assert whole.choices[0].text == "".join(piece.choices[0].text for piece in pieces) == want
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPTS[1]), 64)
    client.close()


def test_generate_endpoint(server):
    response = httpx.post(f"{server.http}/generate", json={"prompt": "abc", "max_tokens": 5})
    assert response.status_code == 200
    assert list(response.json()) == ["response"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/warmup", "/metrics", "/v1/models", "/"])
def test_pages(server, path):
    assert httpx.get(server.http + path).status_code == 200
