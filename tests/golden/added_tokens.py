"""Makes ``added_tokens/``: what transformers makes of the files in which a model folder declares tokens.

    python -m venv slow && slow/bin/pip install "transformers<5" sentencepiece protobuf
    slow/bin/python tests/golden/added_tokens.py
    python -m venv fast && fast/bin/pip install "transformers>=5" torch
    fast/bin/python tests/golden/added_tokens.py

The slow tokenizers, which read a SentencePiece model as it is, went with transformers 5: its version decides what is
made, ``tokenizer.model`` (316 pieces, learned from a few sentences) and ``slow.json``, or ``fast.json``, whose
tokenizer.json is that of `known`. A case has the files beside the tokenizer's own, and for each text its ids without BOS
(which transformers puts before a text also where that begins with it). Texts avoid what is odd in the slow ones: a word
that is found and is not ``single_word`` is cut off from what is before it all the same.
"""

from __future__ import annotations

import io
import json
import pathlib
import tempfile

import known
import transformers

HERE = pathlib.Path(__file__).parent / "added_tokens"
PIECES = 316
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, hello there",
    "user assistant system",
    "a word in words",
]
CHATML = {"<|im_start|>": 316, "<|im_end|>": 317}
SPECIAL = {"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"}


def token(content: str, special: bool = True, **flags: bool) -> dict:
    entry = {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return entry | {"special": special} | flags


def flagged(first: int) -> dict:
    return {
        "added_tokens_decoder": {
            str(first): token("<l>", lstrip=True),
            str(first + 1): token("<r>", special=False, rstrip=True),
            str(first + 2): token("word", special=False, single_word=True, normalized=True),
            str(first + 3): token("<|both|>", lstrip=True, rstrip=True),
            str(first + 4): token("<|bot", special=False),
        }
    }


FLAG_TEXTS = ["the  <l> quick  <r>  fox", "a word in", "sword", "x <|both|> y<|both|>z"]
FIRST_TEXTS = ["word", "<|bot h|><|both|>", " \n <l>\t<r> \n "]  # the text begins with an added token
CHAT_TEXTS = [
    "<|im_start|>x<|im_end|>",
    "<|im_start|>user\nhello <|im_end|>\n<|im_start|>assistant\n",
    "the <|im_end|> fox<|im_end|>",
    "<s>hello there",
    "  the quick",
    "<|im_start",
    "",
]
SLOW = {
    "added_tokens.json alone": ({"added_tokens.json": CHATML}, CHAT_TEXTS),
    "special_tokens_map.json": ({"added_tokens.json": CHATML, "special_tokens_map.json": SPECIAL}, CHAT_TEXTS),
    "names in tokenizer_config.json": ({"added_tokens.json": CHATML, "tokenizer_config.json": SPECIAL}, CHAT_TEXTS),
    "no space behind tokens": (
        {"added_tokens.json": CHATML, "tokenizer_config.json": SPECIAL | {"legacy": False}},
        CHAT_TEXTS,
    ),
    "tokens without ids": (
        {
            "added_tokens.json": CHATML,
            "tokenizer_config.json": {"additional_special_tokens": ["<|b|>", "hello"], "mask_token": "<mask>"},
            "special_tokens_map.json": {
                "additional_special_tokens": ["<|a|>", "<|b|>"],
                "pad_token": {**token("<pad>", rstrip=True)},
            },
        },
        ["<pad>  x<|a|><|b|>y<mask>z", "hello<|im_end|>"],
    ),
    "tokens as objects": (
        {
            "tokenizer_config.json": {
                "additional_special_tokens": [{"__type": "AddedToken", **token("<|o|>", lstrip=True)}],
                "unk_token": {"__type": "AddedToken", **token("<unk>")},
            }
        },
        ["the  <|o|> fox <unk>"],
    ),
    "flags": ({"tokenizer_config.json": flagged(316)}, [*FLAG_TEXTS, *FIRST_TEXTS]),
    "flags without a space": ({"tokenizer_config.json": flagged(316) | {"legacy": False}}, FLAG_TEXTS),
    "added_tokens_decoder alone counts": (
        {
            "tokenizer_config.json": flagged(316),
            "added_tokens.json": CHATML,
            "special_tokens_map.json": {"additional_special_tokens": ["<|a|>"], "eos_token": "<l>"},
        },
        ["<|a|><|im_start|><l></s>"],
    ),
    "no BOS": ({"tokenizer_config.json": {"add_bos_token": False}}, ["the", "<s>the"]),
}
FAST = {
    "added_tokens_decoder": ({"tokenizer_config.json": flagged(259)}, [*FLAG_TEXTS, *FIRST_TEXTS]),
    "special_tokens_map.json": (
        {"special_tokens_map.json": {"additional_special_tokens": ["<|a|>", "<|eot|>"], "pad_token": "<pad>"}},
        ["x<|a|><|eot|><pad>"],
    ),
    "added_tokens.json": (
        {"added_tokens.json": {"<|a|>": 259, "<tool>": 260}, "special_tokens_map.json": {"eos_token": "<|a|>"}},
        ["x<|a|><tool><|eos|>"],
    ),
    "a word of the vocabulary": ({"tokenizer_config.json": {"additional_special_tokens": ["A"]}}, ["AxA"]),
    "extra_special_tokens": ({"tokenizer_config.json": {"extra_special_tokens": ["<|a|>"]}}, ["x<|a|>"]),
    "named extra tokens": (
        {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<image>"}, "video_token": "<video>"}},
        ["x<image><video>"],
    ),
    "changed flags": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"258": token("<|eot|>", rstrip=True)}}},
        ["x<|eot|>  y"],
    ),
    "normalized": (
        {
            "tokenizer.json": {"normalizer": {"type": "Lowercase"}},
            "tokenizer_config.json": {
                "added_tokens_decoder": {
                    "259": token("<tool>", special=False, normalized=True),
                    "260": token("<Raw>", special=False),
                }
            },
        },
        ["X<TOOL><tool><Raw><raw>"],
    ),
}


def model() -> bytes:
    import sentencepiece

    data = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_writer=data, vocab_size=PIECES, model_type="bpe", byte_fallback=True,
        character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        minloglevel=2,
    )  # fmt: skip
    return data.getvalue()


def write(folder: pathlib.Path, files: dict[str, dict]) -> None:
    """A case's files; one that is there gets these fields."""
    for name, content in files.items():
        file = folder / name
        old = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(old | content))


def answers(tokenizer: transformers.PreTrainedTokenizerBase, texts: list[str]) -> dict:
    return {
        "tokens": len(tokenizer),
        "special": sorted(
            {*tokenizer.all_special_ids, *(id for id, one in tokenizer.added_tokens_decoder.items() if one.special)}
        ),
        "prefix": tokenizer.encode(""),
        "texts": [[text, tokenizer.encode(text, add_special_tokens=False)] for text in texts],
    }


def main() -> None:
    HERE.mkdir(exist_ok=True)
    slow = int(transformers.__version__.split(".")[0]) < 5
    if slow:
        (HERE / "tokenizer.model").write_bytes(model())
    found = {}
    for name, (files, texts) in (SLOW if slow else FAST).items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            if slow:
                (folder / "tokenizer.model").write_bytes((HERE / "tokenizer.model").read_bytes())
                write(folder, files)
                tokenizer = transformers.LlamaTokenizer.from_pretrained(folder)
            else:
                known.write_tokenizer(folder)
                write(folder, files)
                tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
            found[name] = {"files": files, **answers(tokenizer, texts)}
    content = {"transformers": transformers.__version__, "cases": found}
    (HERE / ("slow.json" if slow else "fast.json")).write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
