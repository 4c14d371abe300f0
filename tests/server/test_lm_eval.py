"""The calls that lm-eval's ``local-completions`` and ``local-chat-completions`` make, and its reading of the answers.

lm-eval itself (0.4.13, ``lm_eval[api]``) brings 74 packages and 760 MB, too much for the test suite; ``make
test-clients`` runs it (``tests/e2e/test_client_lm_eval.py``). The payloads and what is read of the answers follow its
``models/openai_completions.py``; the log-likelihoods are compared with sums over the table that the model is made of.
"""

from __future__ import annotations

import math

import httpx
import pytest
from front_doors import NAME, open_doors

from engine.mock import Table

SPREAD = {ord("a"): 0.5, ord("b"): 0.25, ord("c"): 0.125, ord(" "): 0.0625, 257: 0.0625}
MODEL = Table({token: SPREAD for token in range(320)})


@pytest.fixture(scope="module")
def http():
    with open_doors(MODEL, slots=4, max_queue=64) as doors, httpx.Client(base_url=doors.http, timeout=30) as client:
        yield client


def log_likelihoods(http, requests):
    """As ``loglikelihood`` does: (log-likelihood, whether greedy) of each continuation, one batch of token ids."""
    payload = {
        "model": NAME,
        "prompt": [context + continuation for context, continuation in requests],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    response = http.post("/v1/completions", json=payload)
    assert response.status_code == 200
    results = []
    choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
    for choice, (context, _) in zip(choices, requests, strict=True):
        logprobs = choice["logprobs"]
        tokens = logprobs["token_logprobs"][len(context) : -1]  # the last one was generated
        tops = logprobs["top_logprobs"][len(context) : -1]
        greedy = all(token == max(top.values()) for token, top in zip(tokens, tops, strict=True))
        results.append((sum(tokens), greedy))
    return results


def test_log_likelihoods_are_those_of_the_model(http):
    def ids(text):
        return list(text.encode())

    requests = [
        ([256, *ids("q: ")], ids("aaa")),
        ([256, *ids("q: ")], ids("abc")),
        ([256], ids("c")),
        (ids("x"), ids("a b")),
    ]
    expected = [
        (3 * math.log(0.5), True),
        (math.log(0.5) + math.log(0.25) + math.log(0.125), False),
        (math.log(0.125), False),
        (math.log(0.5) + math.log(0.0625) + math.log(0.25), False),
    ]
    for (value, greedy), (want, greedy_want) in zip(log_likelihoods(http, requests), expected, strict=True):
        assert value == pytest.approx(want, abs=1e-4) and greedy is greedy_want


def test_rolling_log_likelihood_of_a_long_text(http):
    """Windows over a text, each conditioned on one token before it, as ``loglikelihood_rolling`` makes them."""
    text, window = [97, 98, 99] * 40, 60
    starts = range(0, len(text), window)
    windows = [([text[start - 1]] if start else [256], text[start : start + window]) for start in starts]
    total = sum(value for value, _ in log_likelihoods(http, windows))
    assert total == pytest.approx(40 * (math.log(0.5) + math.log(0.25) + math.log(0.125)), abs=1e-3)


def test_generate_until(http):
    payload = {"prompt": [[256, 97], [256, 98]], "model": NAME, "max_tokens": 5, "temperature": 0, "seed": 1234}
    response = http.post("/v1/completions", json=payload | {"stop": []}).json()
    assert [choice["text"] for choice in response["choices"]] == ["aaaaa", "aaaaa"]
    stopped = http.post("/v1/completions", json=payload | {"stop": ["aaa", "<|endoftext|>"]}).json()
    assert [choice["text"] for choice in stopped["choices"]] == ["", ""]


def test_chat(http):
    payload = {
        "messages": [{"role": "user", "content": "q", "type": "text"}],
        "model": NAME,
        "max_tokens": 4,
        "temperature": 0,
        "stop": ["\n\n"],
        "seed": 1234,
    }
    response = http.post("/v1/chat/completions", json=payload).json()
    assert [choice["message"]["content"] for choice in response["choices"]] == ["aaaa"]
