"""Makes ``tekken/``: a small tekken.json, and the ids that Mistral's own library has for some texts.

    python -m venv tekken && tekken/bin/pip install mistral-common==1.13.1
    tekken/bin/python tests/golden/tekken.py

The tokens are merges learned from a few sentences; there are more of them than the vocabulary takes, as in real files.
"""

from __future__ import annotations

import base64
import collections
import importlib.metadata
import itertools
import json
import pathlib

import regex
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

HERE = pathlib.Path(__file__).parent / "tekken"
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # of the models' own files
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the other dogs hear of it.",
    "Hello world! Hello there, what is this? It's a test; it isn't theirs.",
    "naïve café über straße, aaaa aaaaaaa banana bananas ananas",
    "привет мир, приветствую; 日本語 日本 日本人; def f(x):\n    return x\n\n",
    "Some more words, so that there is something to merge: merging, merger; thing, nothing, anything.",
]
TOKENS, SPARE, BLOCK = 256 + 120, 20, 20
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]"]
TEXTS = [
    "",
    "The quick brown fox",
    "  leading and trailing  ",
    "Hello\r\n\r\nworld\t\ttabs \n",
    "isn't it's THEIRS they'LL",
    "aaaaaaaaaaaaaaaaaaa banananas anananana",
    "1234567890 3.14 ½ ٣",
    "привет, ПРИВЕТ мир 日本語 日本人です 한국어 العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 é e\u0301 \u200b\ufeff",
    "control \x00\x01\x7f bytes",
    "<s>[INST] spelled [/INST]</s> <SPECIAL_12> [THINK]",
    "def f(x):\n    return x // 2  /* a/b */\n",
]


def merges(count: int) -> list[bytes]:
    """The most frequent pairs, one after the other."""
    words = collections.Counter(word for text in CORPUS for word in regex.findall(PATTERN, text))
    parts = {word: [bytes([byte]) for byte in word.encode()] for word in words}
    found: list[bytes] = []
    while len(found) < count:
        pairs: collections.Counter[tuple[bytes, bytes]] = collections.Counter()
        for word, pieces in parts.items():
            for pair in itertools.pairwise(pieces):
                pairs[pair] += words[word]
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        found.append(left + right)
        for pieces in parts.values():
            place = 0
            while place < len(pieces) - 1:
                if (pieces[place], pieces[place + 1]) == (left, right):
                    pieces[place : place + 2] = [left + right]
                place += 1
    return found


def main() -> None:
    HERE.mkdir(exist_ok=True)
    tokens = list(dict.fromkeys([*(bytes([byte]) for byte in range(256)), *merges(TOKENS - 256 + SPARE)]))
    content = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": TOKENS + BLOCK,
            "default_num_special_tokens": BLOCK,
            "version": "v11",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": spelling, "is_control": spelling != "[THINK]"}
            for rank, spelling in enumerate(SPECIAL)
        ],
    }
    (HERE / "tekken.json").write_text(json.dumps(content))
    tokenizer = Tekkenizer.from_file(HERE / "tekken.json")
    golden = {
        "mistral-common": importlib.metadata.version("mistral-common"),
        "tiktoken": importlib.metadata.version("tiktoken"),
        "vocab_size": tokenizer.n_words,
        "bos": tokenizer.bos_id,
        "eos": tokenizer.eos_id,
        "cases": [{"text": text, "ids": tokenizer.encode(text, bos=True, eos=False)} for text in TEXTS],
        "bytes": [tokenizer.id_to_byte_piece(id).hex() for id in range(BLOCK, tokenizer.n_words)],
    }
    (HERE / "golden.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
