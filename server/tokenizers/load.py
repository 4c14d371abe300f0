"""Finds a model's tokenizer and reads the files around it.

Beside ``tokenizer.json``, ``tokenizer.model`` or ``tekken.json`` a Hugging Face directory may have ``tokenizer_config.json`` (names of
special tokens, added tokens, whether BOS is added, the chat template), ``special_tokens_map.json``,
``added_tokens.json``, ``chat_template.jinja``, and ``generation_config.json`` or ``config.json``, which know all the
tokens that end a generation.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2

from server.errors import StartError
from server.tokenizers.base import BytesTokenizer
from server.tokenizers.chat import ChatTemplate
from server.tokenizers.fast import FastTokenizer, special_tokens
from server.tokenizers.gguf import load_gguf_tokenizer
from server.tokenizers.sentencepiece import CONTROL, UNKNOWN, SentencePieceTokenizer
from server.tokenizers.special import SpecialToken
from server.tokenizers.tekken import BOS, EOS, TekkenTokenizer, special_tokens as tekken_special

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_tokenizer(path: str | os.PathLike[str]) -> BytesTokenizer:
    """The tokenizer of a model: a directory or a ``.gguf`` file. Raises `StartError` that names the file and the
    remedy.
    """
    path = pathlib.Path(path)
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return load_gguf_tokenizer(path)
    if (path / "tokenizer.json").exists():
        return _fast(path)
    if (path / "tokenizer.model").exists():
        return _sentencepiece(path)
    if (path / "tekken.json").exists():
        return _tekken(path)
    raise StartError(
        f"{path} has neither tokenizer.json nor tokenizer.model nor tekken.json; copy the model's tokenizer files into it"
    )


def read_json(file: pathlib.Path) -> dict:
    """A JSON object; empty where the file does not exist."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StartError(f"{file} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise StartError(f"{file} holds {type(value).__name__} where an object is expected; download it again")
    return value


def _config(path: pathlib.Path) -> dict:
    """tokenizer_config.json, over the older special_tokens_map.json."""
    return {**read_json(path / "special_tokens_map.json"), **read_json(path / "tokenizer_config.json")}


def _spellings(config: dict) -> dict[str, str]:
    """Named special tokens; in the files each is a string or an object with its content."""
    found = {name: config.get(name) for name in NAMED}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in found.items()
        if isinstance(token, (str, dict))
    }


def _info(config: dict) -> dict[str, Any]:
    """The configuration with tokens as their text, and without the template."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            content = value.get("content")
            return content if isinstance(content, str) else {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return {key: plain(value) for key, value in config.items() if key != "chat_template" and value is not None}


def _added_tokens(path: pathlib.Path, config: dict) -> list[SpecialToken]:
    """Added tokens of tokenizer_config.json, and of the older added_tokens.json."""
    added = [
        SpecialToken(
            int(id),
            token["content"],
            token.get("special", False),
            token.get("lstrip", False),
            token.get("rstrip", False),
        )
        for id, token in config.get("added_tokens_decoder", {}).items()
    ]
    seen = {token.content for token in added}
    special = set(_spellings(config).values())
    older = read_json(path / "added_tokens.json")
    return added + [
        SpecialToken(id, content, content in special) for content, id in older.items() if content not in seen
    ]


def _eos(path: pathlib.Path, own: int | None) -> tuple[int, ...]:
    """All tokens that end a generation: those of generation_config.json (or else config.json), and the tokenizer's
    own.
    """
    named = read_json(path / "generation_config.json").get("eos_token_id")
    if named is None:
        named = read_json(path / "config.json").get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    return tuple(dict.fromkeys(id for id in [*ids, own] if isinstance(id, int)))


def _chat_template(path: pathlib.Path, config: dict, control: tuple[str, ...]) -> ChatTemplate | None:
    """From chat_template.jinja, or tokenizer_config.json: one template or a list of named ones."""
    file = path / "chat_template.jinja"
    template: object = config.get("chat_template")
    source = f"{path / 'tokenizer_config.json'}: chat_template"
    if file.exists():
        template, source = file.read_text(encoding="utf-8"), str(file)
    if template is None:
        return None
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if not isinstance(template, (str, dict)):
        raise StartError(f"{source} is {type(template).__name__}; a string or a list of named templates is needed")
    return ChatTemplate(template, special_tokens=_spellings(config), control_spellings=control, source=source)


def _fast(path: pathlib.Path) -> FastTokenizer:
    file = path / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no type of its own for this
        raise StartError(f"{file} cannot be read ({error}); download it again") from None
    config = _config(path)
    known = tokenizer.get_added_tokens_decoder()
    for token in sorted(_added_tokens(path, config), key=lambda token: token.id):
        if token.id in known and known[token.id].special == token.control:
            continue
        added = tokenizers.AddedToken(
            token.content, special=token.control, lstrip=token.lstrip, rstrip=token.rstrip, normalized=not token.control
        )
        tokenizer.add_special_tokens([added]) if token.control else tokenizer.add_tokens([added])
        if tokenizer.token_to_id(token.content) != token.id:
            raise StartError(
                f"{path / 'tokenizer_config.json'} gives {token.content!r} the id {token.id}, {file.name} the id "
                f"{tokenizer.token_to_id(token.content)}; the two are of different versions: download both again"
            )
    spellings = _spellings(config)
    bos, eos = (_id(tokenizer, spellings.get(name), path) for name in ("bos_token", "eos_token"))
    prefix = _prefix(tokenizer, eos)
    if config.get("add_bos_token") is False:
        prefix = [id for id in prefix if id != bos]
    elif config.get("add_bos_token") is True and bos is not None and bos not in prefix:
        prefix = [bos, *prefix]
    if bos is None and len(prefix) == 1:
        bos = prefix[0]
    return FastTokenizer(
        tokenizer,
        source=str(file),
        bos_token_id=bos,
        eos_token_ids=_eos(path, eos),
        prefix=prefix,
        chat_template=_chat_template(path, config, special_tokens(tokenizer).control_spellings),
        info=_info(config),
    )


def _id(tokenizer: tokenizers.Tokenizer, spelling: str | None, path: pathlib.Path) -> int | None:
    if spelling is None:
        return None
    id = tokenizer.token_to_id(spelling)
    if id is None:
        raise StartError(
            f"{path / 'tokenizer_config.json'} names {spelling!r}, which tokenizer.json does not have; "
            "download both again"
        )
    return id


def _prefix(tokenizer: tokenizers.Tokenizer, eos: int | None) -> list[int]:
    """What the tokenizer's post-processor puts before a text: what is special about the empty one, but for a final
    EOS.
    """
    ids = tokenizer.encode("", add_special_tokens=True).ids
    return ids[:-1] if ids and ids[-1] == eos else ids


def _sentencepiece(path: pathlib.Path) -> SentencePieceTokenizer:
    file = path / "tokenizer.model"
    data = file.read_bytes()
    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(data)
    except Exception as error:  # protobuf's DecodeError, whose class depends on the implementation
        raise StartError(f"{file} is not a SentencePiece model ({error}); download it again") from None
    config = _config(path)
    added = _added_tokens(path, config)
    ids = {piece.piece: id for id, piece in enumerate(model.pieces)} | {token.content: token.id for token in added}
    spellings = {"bos_token": "<s>", "eos_token": "</s>", **_spellings(config)}
    bos, eos = ids.get(spellings["bos_token"]), ids.get(spellings["eos_token"])
    control = [piece.piece for piece in model.pieces if piece.type in (CONTROL, UNKNOWN)]
    control += [token.content for token in added if token.control]
    return SentencePieceTokenizer(
        data,
        source=str(file),
        added=added,
        bos_token_id=bos,
        eos_token_ids=_eos(path, eos),
        prefix=[bos] if bos is not None and config.get("add_bos_token", True) else [],
        chat_template=_chat_template(path, {**config, **spellings}, tuple(control)),
        info=_info({**config, **spellings}),
    )


def _tekken(path: pathlib.Path) -> TekkenTokenizer:
    file = path / "tekken.json"
    content, config = read_json(file), _config(path)
    try:
        control = tekken_special(content).control_spellings
    except (KeyError, TypeError) as error:
        raise StartError(f"{file} is not a tekken.json ({error!r}); download it again") from None
    spellings = {"bos_token": BOS, "eos_token": EOS, **_spellings(config)}
    return TekkenTokenizer(
        content,
        source=str(file),
        eos_token_ids=_eos(path, None),
        add_bos=config.get("add_bos_token", True),
        chat_template=_chat_template(path, {**config, **spellings}, control),
        info=_info({**config, **spellings}),
    )
