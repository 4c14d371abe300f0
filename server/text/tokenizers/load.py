"""Finds a model's tokenizer and reads the files around it.

Beside ``tokenizer.json``, ``tokenizer.model`` or ``tekken.json`` a Hugging Face directory may have files that declare
tokens (``server/text/tokenizers/declared.py``), chat templates (``chat_template.jinja``, ``additional_chat_templates/``,
``tokenizer_config.json``, ``chat_template.json``), and ``generation_config.json`` or ``config.json``, which know all
the tokens that end a generation.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

import tokenizers
from sentencepiece import sentencepiece_model_pb2

from server.errors import StartError
from server.text.tokenizers.base import BytesTokenizer
from server.text.tokenizers.chat import ChatTemplate, read_template
from server.text.tokenizers.declared import ADDED, CONFIG, Declared, declared, read_json, read_text
from server.text.tokenizers.fast import FastTokenizer, special_tokens
from server.text.tokenizers.gguf import load_gguf_tokenizer
from server.text.tokenizers.sentencepiece import CONTROL, UNKNOWN, SentencePieceTokenizer
from server.text.tokenizers.special import SpecialToken, SpecialTokens
from server.text.tokenizers.tekken import BOS, EOS, TekkenTokenizer
from server.text.tokenizers.tekken import special_tokens as tekken_special


def load_tokenizer(path: str | os.PathLike[str], template: pathlib.Path | None = None) -> BytesTokenizer:
    """The tokenizer of a model: a directory or a ``.gguf`` file. ``template`` is a file with a chat template that counts
    instead of the model's own. Raises `StartError` that names the file and the remedy.
    """
    path = pathlib.Path(path)
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return load_gguf_tokenizer(path, template)
    if (path / "tokenizer.json").exists():
        return _fast(path, template)
    if (path / "tokenizer.model").exists():
        return _sentencepiece(path, template)
    if (path / "tekken.json").exists():
        return _tekken(path, template)
    raise StartError(
        f"{path} has neither tokenizer.json nor tokenizer.model nor tekken.json; copy the model's tokenizer files into it"
    )


def _info(config: Mapping[str, object], names: Mapping[str, str | None]) -> dict[str, object]:
    """The configuration with tokens as their text, and without the template."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            content = value.get("content")
            return content if isinstance(content, str) else {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    told = {key: plain(value) for key, value in config.items() if key != "chat_template"}
    return {key: value for key, value in (told | dict(names)).items() if value is not None}


def _eos(path: pathlib.Path, own: int | None) -> tuple[int, ...]:
    """All tokens that end a generation: those of generation_config.json (or else config.json), and the tokenizer's
    own.
    """
    config = read_json(path / "config.json")
    text = config.get("text_config")
    places = (read_json(path / "generation_config.json"), config, text if isinstance(text, dict) else {})
    named = next((place["eos_token_id"] for place in places if place.get("eos_token_id") is not None), None)
    ids = named if isinstance(named, list) else [named]
    return tuple(dict.fromkeys(id for id in [*ids, own] if isinstance(id, int)))


def _chat_template(
    path: pathlib.Path,
    found: Declared,
    names: Mapping[str, str | None],
    special: SpecialTokens,
    given: pathlib.Path | None,
) -> ChatTemplate | None:
    """From the file that is ``given``, else chat_template.jinja and additional_chat_templates/, else
    tokenizer_config.json (one template or a list of named ones), else a processor's chat_template.json.
    """
    templates, source = ({"default": read_template(given)}, str(given)) if given else _own_templates(path, found)
    if not templates:
        return None
    return ChatTemplate(
        templates,
        special_tokens={name: spelling for name, spelling in names.items() if spelling is not None},
        control_spellings=special.unspoken,
        source=source,
    )


def _own_templates(path: pathlib.Path, found: Declared) -> tuple[dict[str, str], str]:
    """A model's templates by name, and where they are from."""
    template: object = found.config.get("chat_template")
    source = f"{path / CONFIG}: chat_template"
    default = path / "chat_template.jinja"
    if default.exists():
        template, source = read_text(default), str(default)
    elif template is None:
        template = read_json(path / "chat_template.json").get("chat_template")
        source = f"{path / 'chat_template.json'}: chat_template"
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = {entry.get("name"): entry.get("template") for entry in template}
    templates: dict[object, object]
    templates = template if isinstance(template, dict) else {} if template is None else {"default": template}
    more = sorted((path / "additional_chat_templates").glob("*.jinja"))
    if more:
        templates |= {file.stem: read_text(file) for file in more}
        source = f"{source} or {more[0].parent}"
    named = {name: text for name, text in templates.items() if isinstance(name, str) and isinstance(text, str)}
    if len(named) < len(templates):
        raise StartError(f"{source} is {type(template).__name__}; a string or a list of named templates is needed")
    return named, source


def _fast(path: pathlib.Path, template: pathlib.Path | None) -> FastTokenizer:
    file = path / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no type of its own for this
        raise StartError(f"{file} cannot be read ({error}); download it again") from None
    found = declared(path)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    unsaid = [token for token in found.tokens if token.word is False and token.content not in known]
    _add_tokens(tokenizer, found, path)
    bos, eos = (_id(tokenizer, found.names.get(name), path) for name in ("bos_token", "eos_token"))
    prefix = _prefix(tokenizer, eos)
    add_bos = found.config.get("add_bos_token")
    if add_bos is False:
        prefix = [id for id in prefix if id != bos]
    elif add_bos is True and bos is not None and bos not in prefix:
        prefix = [bos, *prefix]
    if bos is None and len(prefix) == 1:
        bos = prefix[0]
    special = SpecialTokens([*special_tokens(tokenizer).tokens.values(), *unsaid])
    return FastTokenizer(
        tokenizer,
        source=str(file),
        bos_token_id=bos,
        eos_token_ids=_eos(path, eos),
        prefix=prefix,
        chat_template=_chat_template(path, found, found.names, special, template),
        info=_info(found.config, found.names),
    )


def _add_tokens(tokenizer: tokenizers.Tokenizer, found: Declared, path: pathlib.Path) -> None:
    """Gives the tokenizer the tokens that it lacks, and the flags that ``added_tokens_decoder`` changes."""
    known = {token.content: (id, token) for id, token in tokenizer.get_added_tokens_decoder().items()}
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    overrides = "added_tokens_decoder" in found.config
    explicit = {token.content for token in found.tokens}
    wanted = {}
    for token in found.with_ids(vocab):
        if token.content in known and not (overrides and token.content in explicit and known[token.content][0] == token.id):
            continue  # tokenizer.json knows best
        if token.content not in explicit and token.content not in vocab and token.content in (
            found.names.get("bos_token"), found.names.get("eos_token"),
        ):  # fmt: skip
            continue  # a model without its BOS or EOS is incomplete: `_id` says so
        added = tokenizers.AddedToken(
            token.content,
            special=token.control,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            single_word=token.single_word,
            normalized=not token.control if token.normalized is None else token.normalized,
        )
        if token.content not in known or repr(known[token.content][1]) != repr(added):
            wanted[token.id] = added
    tokenizer.add_tokens([wanted[id] for id in sorted(wanted)])
    for id, added in wanted.items():
        actual = tokenizer.token_to_id(added.content)
        if actual != id:
            source = path / (CONFIG if overrides else ADDED)
            raise StartError(
                f"{source} gives {added.content!r} the id {id}, tokenizer.json the id {actual}; "
                "the two are of different versions: download both again"
            )


def _id(tokenizer: tokenizers.Tokenizer, spelling: str | None, path: pathlib.Path) -> int | None:
    if spelling is None:
        return None
    id = tokenizer.token_to_id(spelling)
    if id is None:
        raise StartError(
            f"{path / CONFIG} names {spelling!r}, which tokenizer.json does not have; download both again"
        )
    return id


def _prefix(tokenizer: tokenizers.Tokenizer, eos: int | None) -> list[int]:
    """What the tokenizer's post-processor puts before a text: what is special about the empty one, but for a final
    EOS.
    """
    ids = tokenizer.encode("", add_special_tokens=True).ids
    return ids[:-1] if ids and ids[-1] == eos else ids


def _sentencepiece(path: pathlib.Path, template: pathlib.Path | None) -> SentencePieceTokenizer:
    file = path / "tokenizer.model"
    data = file.read_bytes()
    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(data)
    except Exception as error:  # protobuf's DecodeError, whose class depends on the implementation
        raise StartError(f"{file} is not a SentencePiece model ({error}); download it again") from None
    found = declared(path)
    pieces = {piece.piece: id for id, piece in enumerate(model.pieces)}
    own = [SpecialToken(id, piece.piece) for id, piece in enumerate(model.pieces) if piece.type in (CONTROL, UNKNOWN)]
    special = SpecialTokens([*own, *found.with_ids(pieces)])
    names = {"bos_token": "<s>", "eos_token": "</s>", **found.names}
    ids = pieces | {content: token.id for content, token in special.tokens.items()}
    bos, eos = (ids.get(names[name] or "") for name in ("bos_token", "eos_token"))
    config = found.config
    return SentencePieceTokenizer(
        data,
        source=str(file),
        special=special,
        bos_token_id=bos,
        eos_token_ids=_eos(path, eos),
        prefix=[bos] if bos is not None and config.get("add_bos_token", True) else [],
        chat_template=_chat_template(path, found, names, special, template),
        info=_info(config, names),
        legacy=config.get("legacy") is not False,
        space_first=config.get("add_prefix_space") is not False,
    )


def _tekken(path: pathlib.Path, template: pathlib.Path | None) -> TekkenTokenizer:
    file = path / "tekken.json"
    content, found = read_json(file), declared(path)
    try:
        own = tekken_special(content)
    except (KeyError, TypeError) as error:
        raise StartError(f"{file} is not a tekken.json ({error!r}); download it again") from None
    special = SpecialTokens({token.id: token for token in (*own.tokens.values(), *found.tokens)}.values())
    names = {"bos_token": BOS, "eos_token": EOS, **found.names}
    return TekkenTokenizer(
        content,
        source=str(file),
        special=special,
        eos_token_ids=_eos(path, None),
        add_bos=found.config.get("add_bos_token", True),
        chat_template=_chat_template(path, found, names, special, template),
        info=_info(found.config, names),
    )
