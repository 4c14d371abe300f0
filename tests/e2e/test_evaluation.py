"""What lm-eval's ``hf`` backend reports of the served model, by the calls that its ``local-completions`` makes.

lm-eval itself makes them in ``test_client_lm_eval.py``, where it is installed; here its tokenizer, its payloads and its
reading of the answers are followed, on the server of the session.
"""

from __future__ import annotations

import json
import pathlib

import httpx
import pytest

from tests.golden import evaluation

HF = json.loads((pathlib.Path(evaluation.__file__).parent / "evaluation.json").read_text())


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.http, timeout=60) as client:
        yield client


def encode(http, text):
    answer = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    assert answer.status_code == 200
    return answer.json()["tokens"]


def complete(http, prompts, **body):
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": prompts, "temperature": 0, "seed": 1234, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_log_likelihoods_and_greedy_flags(http):
    pairs = [(row["question"], choice) for row in evaluation.DOCUMENTS for choice in row["choices"]]
    contexts = [len(encode(http, context)) for context, _ in pairs]
    choices = complete(
        http, [encode(http, context + choice) for context, choice in pairs], max_tokens=1, logprobs=1, echo=True
    )
    wanted = [answer for row in HF["choice"] for answer in row]
    for begin, choice, (value, greedy) in zip(contexts, choices, wanted, strict=True):
        scores = choice["logprobs"]["token_logprobs"][begin:-1]
        tops = choice["logprobs"]["top_logprobs"][begin:-1]
        assert sum(scores) == pytest.approx(value, abs=1e-3)
        assert all(score == max(top.values()) for score, top in zip(scores, tops, strict=True)) is greedy


def test_generation_until_a_stop_string(http):
    eos = http.get("/tokenizer_info").json()["eos_token"]
    prompts = [encode(http, row["question"]) for row in evaluation.DOCUMENTS]
    choices = complete(http, prompts, max_tokens=evaluation.MAX_TOKENS, stop=[*evaluation.UNTIL, eos])
    assert [choice["text"] for choice in choices] == HF["generate"]
