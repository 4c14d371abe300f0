"""A served model with adapters: peft's own tokens beside the model's, in one batch, and no compile."""

import concurrent.futures
import json
import pathlib
import shutil

import httpx
import numpy as np
import pytest
from server_process import serving

from server.config.commands import ServeConfig
from server.errors import StartError
from server.start.warm_engine import open_model

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY, ADAPTER = GOLDEN / "tiny_llama", GOLDEN / "adapter"
OPTIONS = ("--slots", "2", "--max-len", "160", "--prefill-buckets", "16", "--max-queue", "64", "--served-model-name", "tiny")


def test_a_server_with_adapters(cache):
    base, adapted = np.load(TINY / "golden.npz"), np.load(ADAPTER / "golden.npz")
    count = len(adapted["tokens"])
    prompts = {"tiny": base["prompt_1"].tolist(), "one": adapted["prompt"].tolist()}
    answers = {"tiny": base["greedy_1"].tolist()[:count], "one": adapted["tokens"].tolist()}
    with serving(TINY, cache, *OPTIONS, "--lora", f"one={ADAPTER}", "--lora", f"two={ADAPTER}") as server:

        def expected(answer):
            body = {"tokens": answers[answer]}
            return httpx.post(f"{server.http}/detokenize", json=body, timeout=30).json()["text"]

        def text(asked):
            name, answer = asked
            body = {"model": name, "prompt": prompts[answer], "max_tokens": count, "temperature": 0}
            response = httpx.post(f"{server.http}/v1/completions", json=body, timeout=120)
            assert response.status_code == 200 and response.json()["model"] == name
            return response.json()["choices"][0]["text"]

        asked = [("tiny", "tiny"), ("one", "one"), ("two", "one"), ("tiny", "tiny")] * 2
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            assert list(threads.map(text, asked)) == [expected(answer) for _, answer in asked]
        listed = httpx.get(f"{server.http}/v1/models", timeout=30).json()["data"]
        assert [(card["id"], card["parent"]) for card in listed] == [("tiny", None), ("one", "tiny"), ("two", "tiny")]
        report = server.warmup()
        assert (report["compiles_since_ready"], report["traces_since_ready"]) == (0, 0)
        assert "model=two" in server.log


def test_an_adapter_that_is_not_there_is_one_readable_error(tmp_path):
    with pytest.raises(StartError, match="adapter_config.json does not exist: give the directory"):
        open_model(ServeConfig(model=str(TINY), lora=(("a", tmp_path / "a"),)))


def test_an_adapter_of_another_model_is_told(tmp_path, caplog):
    open_model(ServeConfig(model=str(TINY), lora=(("a", ADAPTER),)))
    assert not caplog.records
    shutil.copytree(ADAPTER, tmp_path / "b")
    settings = json.loads((ADAPTER / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "somebody/Other-7B"
    (tmp_path / "b" / "adapter_config.json").write_text(json.dumps(settings))
    open_model(ServeConfig(model=str(TINY), lora=(("b", tmp_path / "b"),)))
    assert "the adapter b was trained on somebody/Other-7B" in caplog.text
