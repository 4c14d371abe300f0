"""The tokens that a model folder declares beside its tokenizer's own vocabulary, as transformers reads them.

Where ``tokenizer_config.json`` has ``added_tokens_decoder``, that alone counts: ids, spellings and flags. Else
``special_tokens_map.json`` overrides the names in ``tokenizer_config.json``, and ``added_tokens.json`` has ids of
spellings, which are control tokens if they are named. Named are ``bos_token`` and its like, any other ``..._token``,
and those listed as ``additional_special_tokens`` or ``extra_special_tokens``; a named token without an id is a word of
the vocabulary, or takes the next id.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from server.errors import StartError
from server.text.tokenizers.special import SpecialToken

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTED = ("additional_special_tokens", "extra_special_tokens")  # before and from transformers 5 on
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


@dataclasses.dataclass(frozen=True)
class Declared:
    """What the files say.

    Args:
        config: tokenizer_config.json, with the special_tokens_map.json where that counts.
        names: spellings of the named special tokens; `None` where the files say that there is none.
        tokens: the added tokens that have ids.
        special: control tokens by name or list, in the order in which transformers gives ids to those that have none;
            id -1.
    """

    config: dict[str, Any]
    names: dict[str, str | None]
    tokens: tuple[SpecialToken, ...]
    special: tuple[SpecialToken, ...]

    def with_ids(self, vocab: Mapping[str, int]) -> list[SpecialToken]:
        """All of them, of a tokenizer whose vocabulary has these ids."""
        named = {token.content for token in self.special}
        found = [dataclasses.replace(token, control=token.control or token.content in named) for token in self.tokens]
        known = {token.content for token in found}
        following = 1 + max([*vocab.values(), *(token.id for token in found)], default=-1)
        for token in self.special:
            if token.content in known:
                continue
            known.add(token.content)
            id = vocab.get(token.content)
            if id is None:
                id, following = following, following + 1
            found.append(dataclasses.replace(token, id=id))
        return found


def declared(path: pathlib.Path) -> Declared:
    """What the folder's files say. Raises `StartError` that names the file."""
    config = read_json(path / CONFIG)
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        _merge(config, read_json(path / MAP))
    names = {
        name: token.content if isinstance(token := _token(config[name], path / CONFIG), SpecialToken) else None
        for name in NAMED
        if name in config
    }
    special = tuple(_special(config, path / CONFIG))
    tokens = []
    if decoder is not None:
        for id, entry in _object(decoder, path / CONFIG, "added_tokens_decoder").items():
            token = _token(entry, path / CONFIG)
            if token is None or not str(id).isdecimal():
                raise StartError(f"{path / CONFIG}: added_tokens_decoder has no token with an id at {id!r}; correct it")
            control = isinstance(entry, dict) and bool(entry.get("special", False))
            normalized = not control if token.normalized is None else token.normalized
            tokens.append(dataclasses.replace(token, id=int(id), control=control, normalized=normalized))
    else:
        named = {token.content for token in special}
        for content, id in read_json(path / ADDED).items():
            if type(id) is not int or id < 0:
                raise StartError(f"{path / ADDED} has no id at {content!r}; download it again")
            # Nothing says whether one without a name is a control token. It is shown, and it is no word of a message.
            tokens.append(SpecialToken(id, content, content in named, word=False, normalized=content not in named))
    return Declared(config, names, tuple(tokens), special)


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """A JSON object; empty where the file does not exist."""
    if not file.exists():
        return {}
    try:
        value = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise StartError(f"{file} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise StartError(f"{file} holds {type(value).__name__} where an object is expected; download it again")
    return value


def read_text(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StartError(f"{file} is not UTF-8 ({error}); download it again") from None


def _merge(config: dict[str, Any], names: Mapping[str, object]) -> None:
    """Puts a special_tokens_map.json over the configuration; lists are joined."""
    for key, value in names.items():
        if isinstance(value, list) and isinstance(old := config.get(key), list):
            value = old + [token for token in value if token not in old]
        if value is not None:
            config[key] = value


def _special(config: Mapping[str, Any], source: pathlib.Path) -> Iterable[SpecialToken]:
    """The named tokens, then those of other names, then the listed ones."""
    others = [
        value
        for key, value in config.items()
        if key.endswith("_token") and key not in NAMED and isinstance(value, (str, dict))
    ]
    listed: list[object] = []
    for key in LISTED:
        value = config.get(key) or []
        if isinstance(value, dict):  # names of the model's own
            others += value.values()
        elif isinstance(value, list):
            listed += value
        else:
            raise StartError(f"{source}: {key} is {type(value).__name__} where a list is expected; correct it")
    for value in [*(config.get(name) for name in NAMED), *others, *listed]:
        token = _token(value, source)
        if token is not None:
            yield token


def _token(value: object, source: pathlib.Path) -> SpecialToken | None:
    """A token as the files have it, a string or an object; `None` for null and the empty string."""
    if isinstance(value, str) or value is None:
        return SpecialToken(-1, value) if value else None
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(content, str):
        raise StartError(f"{source}: {json.dumps(value)[:80]} is no token; a string or an object with content is needed")
    flags = {name: value[name] for name in FLAGS if isinstance(value.get(name), bool)}
    return SpecialToken(-1, content, **flags) if content else None


def _object(value: object, source: pathlib.Path, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise StartError(f"{source}: {name} is {type(value).__name__} where an object is expected; correct it")
    return value
