"""The tokenizer inside a GGUF, built from its metadata.

``tokenizer.ggml.model`` says which kind: ``gpt2`` is byte-level BPE, whose way of cutting text into words is only
named, in ``tokenizer.ggml.pre``; ``llama`` is SentencePiece BPE. A name that is not known here is refused, since
another way of cutting gives other ids. The regular expressions are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from engine.checkpoints.gguf_file import GgufFile
from server.errors import StartError
from server.text.tokenizers import sentencepiece as spm
from server.text.tokenizers.base import BytesTokenizer
from server.text.tokenizers.chat import ChatTemplate, read_template
from server.text.tokenizers.fast import FastTokenizer
from server.text.tokenizers.special import SpecialToken, SpecialTokens

# Tokens that end a turn whatever the metadata call EOS, and are control tokens whatever their type, as llama.cpp has it
# (src/llama-vocab.cpp): many files name only one of theirs.
END_OF_TURN = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<turn|>",
    "<EOT>",
    "_<EOT>",
}
# The same where they are control tokens; else they may be pieces of text.
END_OF_TEXT = {"</s>", "<eos>", "[EOS]", "[EOT]"}
HARMONY = {"<|return|>", "<|call|>", "<|end|>"}  # in a vocabulary that has all of them, the last one ends no turn

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# How text is cut before merging: each expression cuts further what the ones before it left.
SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "starcoder": (r"\p{N}", GPT2),
    "refact": (r"\p{N}", GPT2),
    "command-r": (r"\p{N}", GPT2),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "llama-bpe": (LLAMA3,),
    "llama3": (LLAMA3,),
    "llama-v3": (LLAMA3,),
    "qwen2": (QWEN2,),
    "deepseek-r1-qwen": (QWEN2,),
    "tekken": (TEKKEN,),
}
IGNORE_MERGES = {
    "llama-bpe",
    "llama3",
    "llama-v3",
    "tekken",
}  # a word that is a token is that token, whatever the merges
NFC = {"qwen2", "deepseek-r1-qwen"}  # text is composed first
ADDS_BOS = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # where the metadata do not say


def load_gguf_tokenizer(path: pathlib.Path, template: pathlib.Path | None = None) -> BytesTokenizer:
    """The tokenizer of a GGUF, with its own chat template or that of a file. Raises `StartError`, or `CheckpointError` where
    the file itself is at fault."""
    file = GgufFile(path)
    kind = file.require("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(file, template)
    if kind == "llama":
        return _sentencepiece(file, template)
    raise StartError(
        f"{path}: tokenizer.ggml.model is {kind!r}, which is not served; served are gpt2 (byte-level BPE) and llama"
    )


def _types(file: GgufFile, tokens: list[str]) -> list[int]:
    types = file.get("tokenizer.ggml.token_type")
    types = [spm.NORMAL] * len(tokens) if types is None else types.tolist()
    for id, token in enumerate(tokens):
        if token in END_OF_TURN and types[id] in (spm.NORMAL, spm.USER_DEFINED):
            types[id] = spm.CONTROL
    return types


def _eos(file: GgufFile, tokens: list[str], types: list[int]) -> tuple[int, ...]:
    names = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    named = [_named(file, name, tokens) for name in names]
    ending = END_OF_TURN | END_OF_TEXT
    if HARMONY.issubset(tokens):
        ending.remove("<|end|>")
    spelled = [id for id, token in enumerate(tokens) if token in ending and types[id] == spm.CONTROL]
    return tuple(dict.fromkeys([id for id in named if id is not None] + spelled))


def _control(file: GgufFile, tokens: list[str], types: list[int]) -> SpecialTokens:
    """The control tokens. Those of Phi-3 take the space behind them, which no metadata say, but the model's name (as
    llama.cpp has it) and its tokenizer.json do.
    """
    phi3 = any(name in file.get("general.name", "").lower() for name in ("phi-3", "phi3"))
    return SpecialTokens(
        SpecialToken(id, token, rstrip=phi3 and token not in ("<unk>", "<s>", "<|endoftext|>"))
        for id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (spm.CONTROL, spm.UNKNOWN)
    )


def _named(file: GgufFile, name: str, tokens: list[str]) -> int | None:
    """The id of a named special token; as llama.cpp has it, none where it is no token's, such as -1."""
    id = file.get(f"tokenizer.ggml.{name}_token_id")
    return id if id is not None and 0 <= id < len(tokens) else None


def _prefix(file: GgufFile, bos: int | None, default: bool) -> list[int]:
    return [bos] if bos is not None and file.get("tokenizer.ggml.add_bos_token", default) else []


def _spellings(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    """The named special tokens, as a tokenizer_config.json calls them."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _named(file, key, tokens) for name, key in names.items()}
    return {name: tokens[id] for name, id in ids.items() if id is not None}


def _chat_template(
    file: GgufFile, spellings: dict[str, str], control: Sequence[str], given: pathlib.Path | None
) -> ChatTemplate | None:
    if given is not None:
        return ChatTemplate(
            read_template(given), special_tokens=spellings, control_spellings=control, source=str(given)
        )
    template = file.get("tokenizer.chat_template")
    if template is None:
        return None
    named = {"default": template}
    for name in file.get("tokenizer.chat_templates", []):
        named[name] = file.require(f"tokenizer.chat_template.{name}")
    return ChatTemplate(
        named, special_tokens=spellings, control_spellings=control, source=f"{file.path}: tokenizer.chat_template"
    )


def _byte_level(file: GgufFile, template: pathlib.Path | None) -> FastTokenizer:
    pre = file.get("tokenizer.ggml.pre")
    if pre not in SPLITS:
        found = "is missing" if pre is None else f"is {pre!r}, which is not served"
        raise StartError(
            f"{file.path}: tokenizer.ggml.pre {found}; served are {', '.join(SPLITS)}: "
            "convert the model again with a current converter, or use its safetensors version"
        )
    tokens = file.require("tokenizer.ggml.tokens")
    spellings, bos = _spellings(file, tokens), _named(file, "bos", tokens)
    types = _types(file, tokens)
    control = _control(file, tokens, types)
    vocab = {token: id for id, token in enumerate(tokens)}
    merges = [
        (merge[:cut], merge[cut + 1 :])
        for merge in file.require("tokenizer.ggml.merges")
        if (cut := merge.find(" ", 1))
    ]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in IGNORE_MERGES)
    except Exception as error:  # the library has no type of its own for this
        raise StartError(
            f"{file.path}: tokenizer.ggml.merges do not fit its tokens ({error}); download it again"
        ) from None
    tokenizer = tokenizers.Tokenizer(model)
    if pre in NFC:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(tokenizers.Regex(cut), behavior="isolated") for cut in SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=file.get("tokenizer.ggml.add_space_prefix", False), use_regex=False
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    words = [token for token, kind in zip(tokens, types, strict=True) if kind == spm.USER_DEFINED]
    tokenizer.add_special_tokens([
        tokenizers.AddedToken(token.content, special=True, normalized=False, rstrip=token.rstrip)
        for token in control.tokens.values()
    ])
    tokenizer.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in words])
    return FastTokenizer(
        tokenizer,
        source=str(file.path),
        bos_token_id=bos,
        eos_token_ids=_eos(file, tokens, types),
        prefix=_prefix(file, bos, pre in ADDS_BOS),
        chat_template=_chat_template(file, spellings, control.unspoken, template),
        info=spellings,
        unused=frozenset(id for id, kind in enumerate(types) if kind == spm.UNUSED),
    )


def _sentencepiece(file: GgufFile, template: pathlib.Path | None) -> spm.SentencePieceTokenizer:
    tokens = file.require("tokenizer.ggml.tokens")
    spellings, bos = _spellings(file, tokens), _named(file, "bos", tokens)
    types = _types(file, tokens)
    scores = file.require("tokenizer.ggml.scores").tolist()
    model = spm.bpe_model(tokens, scores, types, add_space_prefix=file.get("tokenizer.ggml.add_space_prefix", True))
    control = _control(file, tokens, types)
    return spm.SentencePieceTokenizer(
        model,
        source=str(file.path),
        special=control,  # the library finds user-defined pieces itself
        bos_token_id=bos,
        eos_token_ids=_eos(file, tokens, types),
        prefix=_prefix(file, bos, True),
        chat_template=_chat_template(file, spellings, control.unspoken, template),
        info=spellings,
    )
