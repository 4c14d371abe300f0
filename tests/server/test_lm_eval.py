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
MODEL = Table(dict.fromkeys(range(320), SPREAD))


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


TEXTS = ["a", "naïve €", "😀b", "é", "a longer text than the others, 漢字"]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("bos", [[], [256]])
def test_one_shape_per_prompt_whatever_the_batch(http, max_tokens, bos):
    prompts = [bos + list(text.encode()) for text in TEXTS]
    body = {"model": NAME, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}

    def ask(prompt):
        response = http.post("/v1/completions", json=body | {"prompt": prompt})
        assert response.status_code == 200
        return response.json()["choices"]

    together = ask(prompts)
    assert [choice["index"] for choice in together] == list(range(len(prompts)))
    for prompt, text, choice in zip(prompts, TEXTS, together, strict=True):
        assert choice["text"] == text + "a" * max_tokens
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(prompt) + max_tokens}
        # Each byte of a character begins where the character does; BOS is no text.
        places = [place for place, character in enumerate(text) for _ in character.encode()]
        assert logprobs["text_offset"] == [0] * len(bos) + places + [len(text)] * max_tokens
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        for token, value, top in list(zip(*(logprobs[key] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True))[1:]:
            assert math.isfinite(value) and top[token] == value and len(top) in (1, 2)
            assert max(top.values()) == pytest.approx(math.log(0.5), abs=1e-4)
        for key, value in ask([prompt])[0].items():
            assert key == "index" or value == choice[key]
        assert ask(prompt)[0]["logprobs"] == logprobs
    assert ask(prompts[::-1])[-1]["logprobs"] == together[0]["logprobs"]


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
