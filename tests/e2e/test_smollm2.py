"""The default model, obtained as a user obtains it: the greedy answers of Hugging Face transformers on the same weights."""

import concurrent.futures
import json
import pathlib
from typing import Literal

import httpx
import pydantic
import pytest
from server_process import PRODUCTION, serving

from server.start.model_files import DEFAULT_MODEL, resolve_model

GOLDEN_FOLDER = pathlib.Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((GOLDEN_FOLDER / "smollm2.json").read_text())
TOKENS = 48  # of each answer; every step's top-2 gap in the golden is over 0.02


@pytest.fixture(scope="module")
def server(cache):
    resolve_model(DEFAULT_MODEL)  # the download is not part of the start's time limit
    options = ("--warmup", "aot", "--slots", "3", "--batch-sizes", "3", "--max-len", "256", "--prefill-buckets", "64")
    with serving(DEFAULT_MODEL, cache, *options, environment=PRODUCTION) as server:
        yield server


def complete(server, golden, **options):
    body = {"model": DEFAULT_MODEL, "prompt": golden["prompt"], "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **options}
    response = httpx.post(f"{server.http}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def test_three_answers_at_once(server):
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda golden: complete(server, golden, logprobs=0), GOLDEN.values()))
    for golden, answer in zip(GOLDEN.values(), answers, strict=True):
        ids = httpx.post(f"{server.http}/detokenize", json={"tokens": golden["tokens"][:TOKENS]}).json()["text"]
        choice = answer["choices"][0]
        assert choice["text"] == ids
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(golden["logprobs"][:TOKENS], abs=2e-4)


def test_generate_ends_at_eos(server):
    """The README's curl: the answer is what comes before the model's EOS."""
    golden = GOLDEN["languages"]
    body = {"prompt": "What are the top 5 programming languages", "max_tokens": 200}
    text = httpx.post(f"{server.http}/generate", json=body, timeout=120).json()["response"]
    before = golden["tokens"][: golden["eos_at"]]
    assert text == httpx.post(f"{server.http}/detokenize", json={"tokens": before}).json()["text"]


def test_control_tokens_of_a_raw_prompt(server):
    for case in json.loads((GOLDEN_FOLDER / "smollm2_tokenizer.json").read_text())["special"]:
        answer = httpx.post(f"{server.http}/tokenize", json={"prompt": case["text"], "return_token_strs": True}).json()
        assert (answer["tokens"], answer["count"]) == (case["ids"], len(case["ids"]))
        assert "".join(answer["token_strs"]).replace("Ġ", " ").replace("Ċ", "\n") == case["text"]


def test_chat_answers_through_the_models_template(server):
    chat = json.loads((GOLDEN_FOLDER / "smollm2_tokenizer.json").read_text())["chats"][0]
    body = {"model": DEFAULT_MODEL, "messages": chat["messages"], "temperature": 0, "max_tokens": 64}
    answer = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=120).json()
    assert answer["usage"]["prompt_tokens"] == len(chat["ids"])
    assert answer["choices"][0]["message"]["content"] == GOLDEN["chat"]["text"]


class Person(pydantic.BaseModel):
    name: str
    age: int


class Company(pydantic.BaseModel):
    name: str
    employees: list[Person]


class Recipe(pydantic.BaseModel):
    title: str
    steps: list[str]
    vegetarian: bool


ASKED = [
    (Person, "Tell me about Ada, who is 36."),
    (Company, "Invent a company with two employees."),
    (Recipe, "A recipe for pancakes"),
]


def test_a_small_model_writes_what_a_schema_lists_and_ends(server):
    """Schemas as Pydantic sends them, without ``additionalProperties``: let go on, this model invents members to the end."""

    def ask(model, question):
        schema = {"name": "x", "schema": model.model_json_schema()}
        body = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 120}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=120).json()["choices"][0]

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        choices = list(threads.map(lambda asked: ask(*asked), ASKED))
    for (model, _), choice in zip(ASKED, choices, strict=True):
        assert choice["finish_reason"] == "stop"
        assert set(json.loads(choice["message"]["content"])) <= set(model.model_fields)
        model.model_validate_json(choice["message"]["content"])


class Place(pydantic.BaseModel, extra="forbid"):
    city: str
    unit: Literal["celsius", "fahrenheit"] = "celsius"


def test_tools_work_although_its_template_knows_none(server):
    assert "tools: calls in the form generic (the chat template knows no tools)" in server.log
    function = {"name": "get_weather", "description": "The weather of a city now.", "parameters": Place.model_json_schema()}
    body = {
        "model": DEFAULT_MODEL, "temperature": 0, "max_tokens": 60, "parallel_tool_calls": False, "tool_choice": "required",
        "messages": [{"role": "user", "content": "What is the weather in Rome?"}], "tools": [{"type": "function", "function": function}],
    }  # fmt: skip
    choice = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=120).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "get_weather")
    assert Place.model_validate_json(call["function"]["arguments"]).city == "Rome"
