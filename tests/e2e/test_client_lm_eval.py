"""lm-eval itself against served checkpoints, over completions and chat.

lm-eval lives in an environment of its own (``make test-clients`` makes it: 100 packages, 970 MB); without that, these
tests are skipped. The tasks are local data. What lm-eval reports is compared with sums over the table that a checkpoint
of known log-probs is made of, and with what its ``hf`` backend reports of another (golden: ``evaluation.py``).
"""

from __future__ import annotations

import itertools
import json
import pathlib

import numpy as np
import pytest
from server_process import ROOT, serving

from tests.golden import evaluation, known

LM_EVAL = ROOT / "build" / "clients" / "bin" / "lm_eval"
pytestmark = pytest.mark.skipif(not LM_EVAL.exists(), reason="lm-eval is not installed: make test-clients")

DOCUMENTS = [
    {"question": "How warm is it?", "choices": ["Cold", "Mild and dry", "Hot"], "answer": 1},
    {"question": "And now", "choices": ["a", "bb", "ccc"], "answer": 0},
    {"question": "x", "choices": ["yes", "no", "perhaps"], "answer": 2},
]
TEXTS = [{"text": "A text of some length, to be scored as a whole. " * 4}, {"text": "Short."}]
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: documents.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
"""
GENERATE = """
task: generate
dataset_path: json
dataset_kwargs: {data_files: {test: documents.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "x"
generation_kwargs: {until: [STOP], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
"""


def matrix():
    """After any token a printable ASCII character, with log-probs that are spread over ten nats."""
    table = known.spread(7, scale=2.0)
    printable = np.zeros(known.VOCAB, bool)
    printable[32:127] = True
    table[:, ~printable] *= 1e-12
    return table / table.sum(axis=1, keepdims=True)


LOGPROBS = np.log(matrix())


def log_likelihood(previous, text):
    """Of a text behind one token, and whether it is what greedy decoding says."""
    ids = [previous, *text.encode()]
    total = sum(LOGPROBS[pair] for pair in itertools.pairwise(ids))
    return total, all(LOGPROBS[before].argmax() == after for before, after in itertools.pairwise(ids))


def greedy(previous, count):
    text = ""
    for _ in range(count):
        previous = int(LOGPROBS[previous].argmax())
        text += chr(previous)
    return text


@pytest.fixture(scope="module")
def server(tmp_path_factory, cache):
    model = known.make(tmp_path_factory.mktemp("lm_eval"), matrix(), layers=1)
    options = ("--slots", "2", "--max-len", "256", "--prefill-buckets", "256", "--served-model-name", "known")
    with serving(model, cache, *options) as running:
        running.model = model
        yield running
        running.assert_nothing_compiled()


def evaluate(
    folder: pathlib.Path, server, model: str, path: str, tasks: dict[str, str], *options: str, **model_args
) -> dict[str, list[dict]]:
    """What lm-eval writes for each document, in their order, by task."""
    arguments = {"model": "known", "base_url": server.http + path, "max_length": 256, **model_args}
    rows = {"documents.jsonl": DOCUMENTS, "texts.jsonl": TEXTS}
    return evaluation.run([str(LM_EVAL), "run", "--model", model], folder, tasks, rows, arguments, *options)


@pytest.mark.parametrize(
    ("options", "how"),
    [(("--batch_size", "4"), {}), ((), {"num_concurrent": 4})],
    ids=["batch", "concurrent"],
)
def test_completions(server, tmp_path, options, how):
    ends = [ord(document["question"][-1]) for document in DOCUMENTS]
    answers = [greedy(end, 12) for end in ends]
    stop = answers[0][6]
    rows = evaluate(
        tmp_path, server, "local-completions", "/v1/completions",
        {"choice": CHOICE, "rolling": ROLLING, "generate": GENERATE.replace("STOP", json.dumps(stop))}, *options,
        tokenizer_backend="huggingface", tokenizer=server.model, **how,
    )  # fmt: skip
    for row, document, end in zip(rows["choice"], DOCUMENTS, ends, strict=True):
        wanted = [log_likelihood(end, f" {choice}") for choice in document["choices"]]
        for (response,), (value, is_greedy) in zip(row["resps"], wanted, strict=True):
            assert float(response[0]) == pytest.approx(value, abs=1e-3) and str(response[1]) == str(is_greedy)
        best = int(np.argmax([value for value, _ in wanted]))
        assert row["acc"] == float(best == document["answer"])
    for row, document in zip(rows["rolling"], TEXTS, strict=True):  # one window, behind BOS
        want, _ = log_likelihood(known.BOS, document["text"])
        assert float(row["resps"][0][0]) == pytest.approx(want, abs=1e-3)
    assert [row["resps"][0][0] for row in rows["generate"]] == [answer.split(stop)[0] for answer in answers]


def test_chat_completions(server, tmp_path):
    answer = greedy(ord(" "), 12)  # the prompt of the model's chat template ends in a space
    stop = answer[6]
    rows = evaluate(
        tmp_path, server, "local-chat-completions", "/v1/chat/completions",
        {"generate": GENERATE.replace("STOP", json.dumps(stop))}, "--apply_chat_template", eos_string="<|eos|>",
    )  # fmt: skip
    assert [row["resps"][0][0] for row in rows["generate"]] == [answer.split(stop)[0]] * len(DOCUMENTS)


TINY = pathlib.Path(evaluation.__file__).parent / "tiny_llama"
HF = json.loads((TINY.parent / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def tiny(cache):
    options = ("--slots", "4", "--max-len", "160", "--prefill-buckets", "16,32,64", "--served-model-name", "tiny")
    with serving(TINY, cache, *options) as running:
        yield running
        running.assert_nothing_compiled()


@pytest.mark.parametrize(
    ("options", "how"),
    [
        (("--batch_size", "4"), {"tokenizer_backend": "remote"}),
        ((), {"tokenizer_backend": "remote", "num_concurrent": 4}),
        (("--batch_size", "3"), {"tokenizer_backend": "huggingface", "tokenizer": TINY}),
    ],
    ids=["remote-batch", "remote-concurrent", "huggingface"],
)
def test_the_hf_backend_says_the_same(tiny, tmp_path, options, how):
    command = [str(LM_EVAL), "run", "--model", "local-completions"]
    arguments = {"model": "tiny", "base_url": f"{tiny.http}/v1/completions", "max_length": 160, **how}
    found = evaluation.answers(evaluation.run(command, tmp_path, evaluation.TASKS, evaluation.ROWS, arguments, *options))
    for row, wanted in zip(found["choice"], HF["choice"], strict=True):
        assert [greedy for _, greedy in row] == [greedy for _, greedy in wanted]
        assert [value for value, _ in row] == pytest.approx([value for value, _ in wanted], abs=1e-3)
    assert found["generate"] == HF["generate"]
