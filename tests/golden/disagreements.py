"""Checkpoints whose config and tensors disagree, and what transformers makes of them.

``CASES`` change the tiny Llama's config and tensors (numpy arrays) in place. Run alone, as `make.py` says, it writes
``disagreements.json``: for each case the tensors that transformers missed and those it did not use, and, where all it
missed has one definite value, the most probable token behind each token of a prompt and its log-prob, in float64.

    golden/bin/python tests/golden/disagreements.py
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import numpy as np

HERE = pathlib.Path(__file__).parent
TINY = HERE / "tiny_llama"
OUT = HERE / "disagreements.json"
LAYER = "model.layers.{}."
WIDTHS = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "o_proj": 64}


def _biases(tensors: dict[str, np.ndarray], layers: tuple[int, ...], modules: tuple[str, ...] = tuple(WIDTHS)) -> None:
    random = np.random.default_rng(5)
    for layer in layers:
        for module in modules:
            name = f"{LAYER.format(layer)}self_attn.{module}.bias"
            tensors[name] = random.normal(0.0, 0.5, WIDTHS[module]).astype(np.float32)


def another_head_beside_a_tie(config: dict, tensors: dict[str, np.ndarray]) -> None:
    config["tie_word_embeddings"] = True


def the_same_head_beside_a_tie(config: dict, tensors: dict[str, np.ndarray]) -> None:
    config["tie_word_embeddings"] = True
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()


def a_tie_with_a_head_only(config: dict, tensors: dict[str, np.ndarray]) -> None:
    config["tie_word_embeddings"] = True
    del tensors["model.embed_tokens.weight"]


def neither_a_tie_nor_a_head(config: dict, tensors: dict[str, np.ndarray]) -> None:
    del tensors["lm_head.weight"]


def no_word_of_a_tie_and_no_head(config: dict, tensors: dict[str, np.ndarray]) -> None:
    del config["tie_word_embeddings"], tensors["lm_head.weight"]


def biases_that_are_not_there(config: dict, tensors: dict[str, np.ndarray]) -> None:
    config["attention_bias"] = config["mlp_bias"] = True


def biases_of_some_layers(config: dict, tensors: dict[str, np.ndarray]) -> None:
    config["attention_bias"] = True
    _biases(tensors, (0,))
    _biases(tensors, (2,), ("q_proj", "v_proj"))


def biases_that_the_config_denies(config: dict, tensors: dict[str, np.ndarray]) -> None:
    config["attention_bias"] = False
    _biases(tensors, (0, 1, 2))


def fewer_layers_than_are_there(config: dict, tensors: dict[str, np.ndarray]) -> None:
    config["num_hidden_layers"] = 2


def more_layers_than_are_there(config: dict, tensors: dict[str, np.ndarray]) -> None:
    config["num_hidden_layers"] = 4


def tensors_of_no_use(config: dict, tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.full(32, 3.0, np.float32)
    tensors["lm_head.bias"] = np.ones(320, np.float32)


def buffers_of_older_versions(config: dict, tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
    tensors["model.rotary_emb.inv_freq"] = np.ones(16, np.float32)


def a_larger_vocabulary_than_the_embedding(config: dict, tensors: dict[str, np.ndarray]) -> None:
    config["vocab_size"] = 330


def a_smaller_vocabulary_than_the_embedding(config: dict, tensors: dict[str, np.ndarray]) -> None:
    config["vocab_size"] = 310


CASES: dict[str, Callable[[dict, dict[str, np.ndarray]], None]] = {
    change.__name__: change
    for change in (
        another_head_beside_a_tie,
        the_same_head_beside_a_tie,
        a_tie_with_a_head_only,
        neither_a_tie_nor_a_head,
        no_word_of_a_tie_and_no_head,
        biases_that_are_not_there,
        biases_of_some_layers,
        biases_that_the_config_denies,
        fewer_layers_than_are_there,
        more_layers_than_are_there,
        tensors_of_no_use,
        buffers_of_older_versions,
        a_larger_vocabulary_than_the_embedding,
        a_smaller_vocabulary_than_the_embedding,
    )
}


def main() -> None:
    import logging
    import tempfile

    import torch
    import transformers
    from safetensors.numpy import save_file
    from safetensors.torch import load_file

    prompt = np.load(TINY / "golden.npz")["prompt_1"].tolist()
    found: dict[str, object] = {"transformers": transformers.__version__, "prompt": prompt}
    for name, change in CASES.items():
        config = json.loads((TINY / "config.json").read_text())
        tensors = {key: value.float().numpy() for key, value in load_file(TINY / "model.safetensors").items()}
        change(config, tensors)
        warnings: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, warnings=warnings: warnings.append(record.getMessage())
        transformers.utils.logging.get_logger("transformers").addHandler(handler)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            (path / "config.json").write_text(json.dumps(config))
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
            try:
                model, info = transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
                )
            except RuntimeError as error:
                found[name] = {"error": type(error).__name__}
                print(name, "->", error)
                continue
            finally:
                transformers.utils.logging.get_logger("transformers").removeHandler(handler)
        missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
        case = {"missing": missing, "unused": unused, "not_tied": any("will NOT tie" in text for text in warnings)}
        if all(key.endswith(".bias") for key in missing):  # which are zeros; other weights are random
            with torch.no_grad():
                best = torch.log_softmax(model.eval()(torch.tensor([prompt])).logits[0], -1).max(-1)
            case |= {"tokens": best.indices.tolist(), "logprobs": [round(value, 6) for value in best.values.tolist()]}
        found[name] = case
        print(name, case, *warnings, sep="\n  ")
    OUT.write_text("{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()) + "\n}\n")


if __name__ == "__main__":
    main()
