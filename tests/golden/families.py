"""Makes the golden data of ``families/``: a tiny random model of each family and RoPE kind, by transformers in float64.

Run by `make.py`, or alone for some cases: ``golden/bin/python tests/golden/families.py gemma2 longrope``.

``families/<case>/`` has ``config.json``, ``model.safetensors`` (bfloat16; RoPE kinds share the weights of
``tiny_llama``) and ``golden.npz``: for each prompt the ids, the 20 best next tokens with their log-probs at each
position, and the same for 64 greedy steps. Prompts reach past windows and original lengths; no greedy step is a near
tie. All greedy steps are computed by a pass over the whole sequence, but for ``dynamic``, whose keys keep the base that
was current when they were made."""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
OUT = HERE / "families"
TINY = HERE / "tiny_llama"
GAP = 0.01  # nats between the best and the second best token at each greedy step
STEPS = 64
TOP = 20
SPECIAL = {256, 257, 258}

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.02, 1.05, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 1.3, 2.1, 3.4, 6.0, 8.0],
}
MOE = {"num_experts_per_tok": 2, "intermediate_size": 16}

# name: class, what differs from SHAPE, lengths of the prompts
FAMILIES = {
    "mistral": ("Mistral", {"sliding_window": 24}, (7, 90)),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}, (7, 90)),
    "qwen3": ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, (7, 60)),
    "gemma": ("Gemma", {}, (7, 60)),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
            "num_hidden_layers": 4,
        },
        (7, 90),
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        (7, 90),
    ),
    "phi3": (
        "Phi3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 64,
            "rope_parameters": {**LONG, "rope_theta": 1e4, "partial_rotary_factor": 0.75},
            "sliding_window": 48,
        },
        (7, 90),
    ),
    "olmo2": ("Olmo2", {}, (7, 60)),
    "smollm3": (
        "SmolLM3",
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 2e6},
            "sliding_window": 24,
            "use_sliding_window": True,
        },
        (7, 90),
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 0.7,
            "attention_multiplier": 0.15,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.5,
        },
        (7, 60),
    ),
    "mixtral": ("Mixtral", {**MOE, "num_local_experts": 6, "num_hidden_layers": 2, "sliding_window": None}, (7, 60)),
    "qwen3_moe": (
        "Qwen3Moe",
        {**MOE, "num_experts": 6, "moe_intermediate_size": 16, "norm_topk_prob": False, "num_hidden_layers": 2},
        (7, 60),
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 16,
            "num_hidden_layers": 3,
            "sliding_window": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
        (7, 90),
    ),
}

# What docs/models.md takes as its example of adding a family
EXAMPLE = {"seed_oss": ("SeedOss", {"attention_out_bias": True}, (7, 60))}
FAMILIES |= EXAMPLE

# name: rope_parameters on top of tiny_llama's (theta 10,000, head_dim 32), max_position_embeddings, lengths
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
ROPES = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, 256, (7, 90)),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 64, (7, 90)),
    "yarn": (YARN, 512, (7, 90)),
    "yarn_attention_factor": ({**YARN, "attention_factor": 0.8, "beta_fast": 4.0, "beta_slow": 2.0}, 512, (90,)),
    "yarn_mscale": ({**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}, 512, (90,)),
    "longrope": (
        {
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.03 * i for i in range(16)],
            "long_factor": [1.0 + 0.5 * i for i in range(16)],
            "original_max_position_embeddings": 64,
        },
        256,
        (7, 40, 90),
    ),
}

SCALES = {
    "lm_head": 0.35,
    "q_proj": 0.25,
    "k_proj": 0.25,
    "qkv_proj": 0.25,
    "v_proj": 0.25,
    "o_proj": 0.25,
    "gate_up_proj": 0.25,
    "gate_proj": 0.25,
    "up_proj": 0.25,
    "down_proj": 0.3,
    "gate": 0.4,
    "router": 0.4,
    "sinks": 1.0,
}


def fill(model: torch.nn.Module, norm_mean: float) -> None:
    """Random weights that bfloat16 holds exactly. Tied embeddings are small, or each token would predict itself."""
    scales = {**SCALES, "embed_tokens": 0.15 if model.config.tie_word_embeddings else 1.0}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            *path, last = name.split(".")
            module = path[-1] if last in ("weight", "bias") else last
            if "norm" in name:
                # Gemma's are small otherwise, beside its scaled embeddings: each token would predict itself
                larger = 1.5 if norm_mean == 0.0 and ("post_" in name or name == "model.norm.weight") else 0.0
                parameter.normal_(norm_mean + larger, 0.2)
            elif last == "bias" or last.endswith("_bias"):
                parameter.normal_(0.0, 0.2)
            else:
                parameter.normal_(0.0, scales[module])
            parameter.copy_(parameter.to(torch.bfloat16).float())


def load(folder: pathlib.Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@torch.no_grad()
def log_probs(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    return torch.log_softmax(model(torch.tensor([ids]), use_cache=False).logits[0].double(), -1).numpy()


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int], cached: bool) -> tuple[list[int], np.ndarray]:
    tokens: list[int] = []
    rows, cache, fresh = [], None, prompt
    for _ in range(STEPS):
        if cached:
            out = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            row = torch.log_softmax(out.logits[0, -1].double(), -1).numpy()
        else:
            row = log_probs(model, prompt + tokens)[-1]
        rows.append(row)
        tokens.append(int(row.argmax()))
        fresh = tokens[-1:]
    return tokens, np.array(rows)


def record(folder: pathlib.Path, lengths: tuple[int, ...], seed: int, cached: bool = False) -> None:
    """Writes golden.npz."""
    arrays: dict[str, np.ndarray] = {}
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as complete:  # RoPE kinds have no weights of their own
        for file in [*TINY.glob("model.safetensors"), *folder.iterdir()]:
            (pathlib.Path(complete) / file.name).write_bytes(file.read_bytes())
        model = load(pathlib.Path(complete))
        for index, length in enumerate(lengths):
            while True:
                if cached:
                    model = load(pathlib.Path(complete))  # forgets the longest sequence that it has seen
                prompt = [256, *random.integers(0, 320, length - 1).tolist()]
                tokens, steps = greedy(model, prompt, cached)
                ordered = np.sort(steps, axis=1)
                if (ordered[:, -1] - ordered[:, -2]).min() > GAP and not SPECIAL & set(tokens):
                    break
            if cached:
                model = load(pathlib.Path(complete))
            scores = log_probs(model, prompt)
            arrays[f"prompt_{index}"] = np.array(prompt, np.int16)
            arrays[f"greedy_{index}"] = np.array(tokens, np.int16)
            arrays[f"next_{index}"] = scores[np.arange(length - 1), prompt[1:]].astype(np.float32)
            for name, rows in (("prompt", scores), ("greedy", steps)):
                top = np.argsort(-rows, axis=1)[:, :TOP]
                arrays[f"{name}_top_{index}"] = top.astype(np.int16)
                arrays[f"{name}_top_logprobs_{index}"] = np.take_along_axis(rows, top, 1).astype(np.float32)
            print(folder.name, length, "distinct", len(set(tokens)), "top", ordered[:, -1].mean().round(3), flush=True)
    np.savez_compressed(folder / "golden.npz", **arrays)


def make_family(name: str) -> None:
    kind, differences, lengths = FAMILIES[name]
    config_class = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    config = config_class(**{**SHAPE, **differences})
    torch.manual_seed(21)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    fill(model, 0.0 if kind.startswith("Gemma") else 1.0)
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    record(folder, lengths, seed=1)


def make_rope(name: str) -> None:
    parameters, max_position, lengths = ROPES[name]
    config = json.loads((TINY / "config.json").read_text())
    config["max_position_embeddings"] = max_position
    config["rope_parameters"] = {"rope_theta": 10000.0, **parameters}
    folder = OUT / f"rope_{name}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    record(folder, lengths, seed=2, cached=name == "dynamic")


def make(names: list[str] | None = None) -> None:
    """Makes these cases, or all."""
    for name in names or [*FAMILIES, *ROPES]:
        (make_family if name in FAMILIES else make_rope)(name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    make(sys.argv[1:])
