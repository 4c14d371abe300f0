"""Makes the golden data of this folder with PyTorch and transformers, which Preheat itself does not need.

    python -m venv golden && golden/bin/pip install torch transformers gguf numpy safetensors
    golden/bin/python tests/golden/make.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf

What it writes: ``tiny_llama/`` (a random Llama, its log-probs at each position of some prompts, and greedy
continuations without near ties, both in float64), ``families/`` (see `families.py`), ``smollm2.json``
(greedy continuations by transformers of the same
GGUF in float32), ``smollm2_tokenizer.json`` (ids and chat renderings), ``versions.json``. It also checks that
`known.make` does what it says.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import platform
import tempfile

import families
import known
import numpy as np
import safetensors
import tokenizers
import torch
import transformers
from tokenizers import pre_tokenizers

HERE = pathlib.Path(__file__).parent
TINY = HERE / "tiny_llama"
GAP = 0.01  # nats between the best and the second best token at each greedy step
STEPS = 64


def tiny_config() -> transformers.LlamaConfig:
    """Grouped queries, head_dim other than hidden / heads, untied, and llama3 scaling that changes most frequencies."""
    return transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        tie_word_embeddings=False,
        bos_token_id=known.BOS,
        eos_token_id=known.EOS,
        attn_implementation="eager",
    )


def make_tiny() -> None:
    torch.manual_seed(20)
    model = transformers.LlamaForCausalLM(tiny_config()).eval()
    scales = {
        "embed_tokens": 1.0,
        "lm_head": 0.25,
        "q_proj": 0.18,
        "k_proj": 0.18,
        "v_proj": 0.15,
        "o_proj": 0.15,
        "gate_proj": 0.15,
        "up_proj": 0.15,
        "down_proj": 0.15,
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = name.split(".")[-2]
            if module in scales:
                parameter.normal_(0.0, scales[module])
            else:
                parameter.normal_(1.0, 0.2)  # norms
            parameter.copy_(parameter.to(torch.bfloat16).float())  # so that bfloat16 files hold exactly this model
    model.to(torch.bfloat16).save_pretrained(TINY)
    (TINY / "model.safetensors").chmod(0o644)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    known.write_tokenizer(TINY)

    arrays: dict[str, np.ndarray] = {}
    random = np.random.default_rng(0)
    for index, length in enumerate((1, 7, 33, 70)):
        while True:
            prompt = (
                [known.BOS, *random.integers(0, 320, length - 1).tolist()] if index else [int(random.integers(0, 256))]
            )
            tokens, steps = greedy(model, prompt, STEPS)
            gaps = np.sort(steps, axis=1)[:, -1] - np.sort(steps, axis=1)[:, -2]
            if gaps.min() > GAP and not {known.EOS, known.EOT} & set(tokens):
                break
        top = np.argsort(-steps, axis=1)[:, :20]
        arrays[f"prompt_{index}"] = np.array(prompt, np.int32)
        arrays[f"logprobs_{index}"] = log_probs(model, prompt).astype(np.float32)  # [len, vocab]
        arrays[f"greedy_{index}"] = np.array(tokens, np.int32)  # [64]
        arrays[f"greedy_top_{index}"] = top.astype(np.int32)  # [64, 20]
        arrays[f"greedy_top_logprobs_{index}"] = np.take_along_axis(steps, top, 1).astype(np.float32)  # [64, 20]
        error = np.abs(log_probs(rounded, prompt + tokens) - log_probs(model, prompt + tokens)).max()
        print(
            "tiny", index, length, "smallest gap", gaps.min(), "distinct", len(set(tokens)), "float32 differs by", error
        )
    np.savez_compressed(TINY / "golden.npz", **arrays)


@torch.no_grad()
def log_probs(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """[len(ids), vocab], float64."""
    return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1).numpy()


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int], steps: int) -> tuple[list[int], np.ndarray]:
    """Greedy ids, through EOS and on, and the log-probs of each step [steps, vocab]."""
    ids, rows, cache = torch.tensor([prompt]), [], None
    tokens: list[int] = []
    for _ in range(steps):
        out = model(ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        row = torch.log_softmax(out.logits[0, -1].double(), -1).numpy()
        rows.append(row)
        tokens.append(int(row.argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tokens, np.array(rows)


def smollm2_tokenizer(path: pathlib.Path) -> transformers.PreTrainedTokenizerBase:
    """The GGUF's tokenizer. transformers takes GPT-2's word splitting where the file names SmolLM's, so that of the
    published tokenizer.json is put in: each digit alone, then GPT-2's.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Write a Python function that adds two numbers."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Name 3 primes."},
    ],
]

TEXTS = [
    "",
    " ",
    "  ",
    "a",
    " a",
    "  a",
    "\n",
    "\n\n\n a \t b\r\n",
    "Hello, world!",
    "hello   world",
    "I'm you're we'LL DON'T",
    "3.14159 1234567890 ½ Ⅷ ² ٣٤٥ १२३ 𝟘𝟙",
    "x=1;y+=22//3",
    "snake_case camelCase kebab-case",
    "    def f(x):\n\treturn x**2\n",
    "Ünïcödé naïve café é",
    "Привет, мир",
    "你好,世界。",
    "こんにちは カタカナ ﾊﾝｶｸ",
    "안녕하세요",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "Γειά σου Κόσμε",
    "გამარჯობა",
    "Բարև",
    "ሰላም",
    "𐍈𐌰𐌽",
    "𓀀𓂀",
    "👋🌍",
    "👩‍👩‍👧‍👦 👨🏽‍🚀 🏳️‍🌈 🇩🇪",
    "\u0000\u0001\u0007\u001b[31m\u007f",
    "\u200b\u200e\ufeff\u00a0\u2028\u3000",
    "e\u0301 vs \u00e9",
    "\ufffd\uffff\U0010ffff",
    "$€£¥ © ™ ← ∑∫√ ≠",
    "…—–“”‘’«»",
    "https://example.com/a?b=c&d=%20",
    "<html><!-- x --></html>",
    '{"a": [1, 2.5e-3, null]}',
    "a" * 100,
    "ab " * 50,
    " " * 33 + "x",
    "Z̴̡͌a̶l̷g̵o̶",
    "<|im_end|",
    "|im_end|>",
    "<| im_end |>",
    "<repo",
    "<jupyter_",
]
SPECIAL_TEXTS = [
    "<|im_end|>",
    "a<|im_start|>b",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|> x <repo_name>",
    "  <file_sep>  1",
]


def make_smollm2(path: pathlib.Path) -> None:
    tokenizer = smollm2_tokenizer(path)
    cases = [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)} for text in TEXTS]
    for case in cases:
        assert tokenizer.decode(case["ids"]) == case["text"], case
    special = [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)} for text in SPECIAL_TEXTS]
    random = np.random.default_rng(0)
    decoded = []
    for _ in range(40):  # random ids, which make all kinds of invalid UTF-8
        ids = random.integers(0, 49152 if len(decoded) % 2 else 400, 12).tolist()
        decoded.append({"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=True)})
    chats = [
        {
            "messages": messages,
            "add_generation_prompt": generation,
            "text": tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation),
            "ids": tokenizer.apply_chat_template(messages, add_generation_prompt=generation, return_dict=False),
        }
        for messages in CHATS
        for generation in (True, False)
    ]
    dump("smollm2_tokenizer.json", {"plain": cases, "special": special, "decoded": decoded, "chats": chats})

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    prompts = {
        "languages": tokenizer.encode("What are the top 5 programming languages", add_special_tokens=False),
        "chat": chats[0]["ids"],
        "moon": tokenizer.encode("In 1969, the first man", add_special_tokens=False),
    }
    answers = {}
    for name, prompt in prompts.items():
        tokens, steps = greedy(model, prompt, STEPS)
        ordered = np.sort(steps, axis=1)
        gaps = ordered[:, -1] - ordered[:, -2]
        assert gaps.min() > GAP, (name, gaps.min())
        answers[name] = {
            "prompt": prompt,
            "eos_at": next((step for step, token in enumerate(tokens) if token in (0, 2)), None),
            "tokens": tokens,
            "logprobs": [round(float(value), 5) for value in ordered[:, -1]],
            "gaps": [round(float(value), 5) for value in gaps],
            "text": tokenizer.decode(tokens),
        }
        print(name, "smallest gap", gaps.min(), answers[name]["text"])
    dump("smollm2.json", answers)


def check_known() -> None:
    """transformers gives log P on the checkpoint of known.py."""
    probabilities = known.spread(3)
    with tempfile.TemporaryDirectory() as folder:
        known.make(pathlib.Path(folder), probabilities)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        text = "né\U0001f600\x00"
        assert tokenizer.encode(text) == [known.BOS, *text.encode()], tokenizer.encode(text)
    ids = [known.BOS, 1, 1, 200, 77, known.VOCAB - 1]
    error = np.abs(log_probs(model, ids) - np.log(probabilities[ids])).max()
    assert error < 1e-5, error
    print("known: largest error", error)


def dump(name: str, value: object) -> None:
    (HERE / name).write_text(json.dumps(value, ensure_ascii=True, separators=(",", ":")) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--gguf", type=pathlib.Path, help="the default model's file; without it, the tiny models only"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    check_known()
    make_tiny()
    families.make()
    if arguments.gguf is not None:
        make_smollm2(arguments.gguf)
    modules = {
        "torch": torch,
        "transformers": transformers,
        "tokenizers": tokenizers,
        "safetensors": safetensors,
        "numpy": np,
    }
    versions = {name: module.__version__ for name, module in modules.items()}
    dump("versions.json", {"python": platform.python_version(), "gguf": importlib.metadata.version("gguf"), **versions})


if __name__ == "__main__":
    main()
