"""Adapters at the front doors: which one answers, what they are called, and what stays apart."""

from __future__ import annotations

import logging

import grpc
import httpx
import openai
import pytest
from front_doors import NAME, open_doors

from protos.orchestrator_pb2 import DecodeRequest
from protos.orchestrator_pb2_grpc import OrchestratorStub

ADAPTERS = ("pirate", "poet")
PAGES = "KLMNOPQRS"  # two pages of four tokens, BOS among them


class Asked:
    """A rule that answers with the next letter, and notes which adapter the engine was asked for."""

    def __init__(self):
        self.adapters = []

    def note(self, engine):
        insert = engine.insert

        def noted(prefix, first, slot, pages, length, sampling, **options):
            self.adapters.append(sampling.adapter)
            return insert(prefix, first, slot, pages, length, sampling, **options)

        engine.insert = noted


@pytest.fixture(scope="module")
def doors():
    with open_doors(limits={"adapters": ADAPTERS}) as opened:
        opened.asked = Asked()
        opened.asked.note(opened.engine)
        yield opened


@pytest.fixture
def asked(doors):
    doors.asked.adapters.clear()
    return doors.asked


@pytest.fixture(scope="module")
def api(doors):
    with openai.OpenAI(base_url=f"{doors.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed(api):
    listed = {model.id: model.model_extra["parent"] for model in api.models.list()}
    assert listed == {NAME: None, "pirate": NAME, "poet": NAME}
    assert api.models.retrieve("poet").id == "poet"
    with pytest.raises(openai.NotFoundError, match="'mock', 'pirate', 'poet' are served"):
        api.models.retrieve("other")


@pytest.mark.parametrize(("model", "adapter"), [(NAME, 0), ("pirate", 1), ("poet", 2)])
def test_http_chooses_by_model(api, asked, model, adapter):
    answer = api.completions.create(model=model, prompt="ab", max_tokens=3)
    assert answer.model == model and answer.choices[0].text == "cde"
    assert asked.adapters == [adapter]


def test_generate_chooses_by_model_too(doors, asked):
    answer = httpx.post(f"{doors.http}/generate", json={"prompt": "ab", "max_tokens": 2, "model": "poet"}, timeout=30)
    assert answer.json() == {"response": "cd"} and asked.adapters == [2]
    refused = httpx.post(f"{doors.http}/generate", json={"prompt": "ab", "model": "other"}, timeout=30)
    assert refused.status_code == 404 and refused.json()["error"]["param"] == "model"


def test_an_unknown_model_is_not_found(api):
    with pytest.raises(openai.NotFoundError, match="'pirate'"):
        api.completions.create(model="other", prompt="ab", max_tokens=3)


def decode(doors, **fields):
    with grpc.insecure_channel(doors.grpc.address) as channel:
        request = DecodeRequest(max_tokens=2, **fields)
        request.text_content.text = "ab"
        messages = list(OrchestratorStub(channel).Decode(request, timeout=30))
    return "".join(sample.text for message in messages for sample in message.stream_content.samples)


def test_grpc_chooses_by_id(doors, asked):
    assert decode(doors, lora_adapter_id="poet") == decode(doors, lora_adapter_id="") == decode(doors) == "cd"
    assert asked.adapters == [2, 0, 0]
    with pytest.raises(grpc.RpcError) as caught:
        decode(doors, lora_adapter_id="other")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "served are pirate, poet" in caught.value.details()


def test_prompts_are_shared_within_an_adapter_only(api):
    def cached(model):
        usage = api.completions.create(model=model, prompt=PAGES, max_tokens=1).usage
        return usage.prompt_tokens_details.cached_tokens

    assert [cached(model) for model in (NAME, "pirate", "poet", "pirate", NAME)] == [0, 0, 0, 8, 8]


def test_the_log_names_the_adapter(api, caplog):
    with caplog.at_level(logging.INFO, "preheat.request"):
        for model in (NAME, "poet"):
            api.completions.create(model=model, prompt="ab", max_tokens=1)
    said = [record.request.get("model") for record in caplog.records if record.name == "preheat.request"]
    assert said == [None, "poet"]
