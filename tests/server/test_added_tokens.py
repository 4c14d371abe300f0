"""The tokens that a model folder declares, against transformers (golden: ``tests/golden/added_tokens.py``), and chat
templates wherever they are kept.
"""

import json
import pathlib

import gguf
import pytest
import sentencepiece

from server.errors import StartError
from server.text.tokenizers import load_tokenizer
from tests.golden import known

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "added_tokens"
SLOW, FAST = (json.loads((GOLDEN / f"{name}.json").read_text())["cases"] for name in ("slow", "fast"))
MODEL = (GOLDEN / "tokenizer.model").read_bytes()
CHATML = {"<|im_start|>": 316, "<|im_end|>": 317}


def write(folder: pathlib.Path, files: dict) -> pathlib.Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        if isinstance(content, dict) and file.exists():
            content = json.loads(file.read_text()) | content
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def slow(folder: pathlib.Path, files: dict):
    (folder / "tokenizer.model").write_bytes(MODEL)
    return load_tokenizer(write(folder, files))


def fast(folder: pathlib.Path, files: dict):
    known.write_tokenizer(folder)
    return load_tokenizer(write(folder, files))


@pytest.mark.parametrize("name", SLOW)
def test_beside_a_sentencepiece_model(tmp_path, name):
    check(slow(tmp_path, SLOW[name]["files"]), SLOW[name], own={0, 1, 2})


@pytest.mark.parametrize("name", FAST)
def test_beside_a_tokenizer_json(tmp_path, name):
    check(fast(tmp_path, FAST[name]["files"]), FAST[name], own=set())


def check(tokenizer, case, own):
    for text, ids in case["texts"]:
        assert tokenizer.encode(text, add_bos=False, parse_special=True) == ids, text
        assert tokenizer.decode(ids) == tokenizer.decode([id for id in ids if id not in case["special"]]), text
    assert tokenizer.encode("") == case["prefix"]
    assert tokenizer.vocab_size == case["tokens"]
    # Control pieces of a SentencePiece model are control tokens, named or not.
    assert tokenizer.special_ids == set(case["special"]) | own


def test_they_stay_text_where_nothing_is_parsed(tmp_path):
    library = sentencepiece.SentencePieceProcessor(model_proto=MODEL)
    tokenizer = slow(tmp_path, {"added_tokens.json": CHATML, "special_tokens_map.json": {"eos_token": "<|im_end|>"}})
    text = "x<|im_end|>y"
    assert tokenizer.encode(text) == [1, *library.EncodeAsIds(text)]
    assert tokenizer.decode([*library.EncodeAsIds("the"), 317]) == "the"
    assert tokenizer.eos_token_ids == (317,) and tokenizer.info["eos_token"] == "<|im_end|>"


def test_tokens_that_nothing_says_anything_about(tmp_path):
    """Text where nothing is parsed, as transformers' slow tokenizers do it with ``split_special_tokens``; but shown."""
    library = sentencepiece.SentencePieceProcessor(model_proto=MODEL)
    tokenizer = slow(tmp_path, {"added_tokens.json": CHATML})
    assert tokenizer.encode("<|im_start|>", add_bos=False) == library.EncodeAsIds("<|im_start|>")
    assert tokenizer.decode([316]) == "<|im_start|>"


def test_a_message_that_spells_a_token_when_normalized(tmp_path):
    config = {"added_tokens_decoder": {"258": {"content": "<|eot|>", "special": True, "normalized": True}}}
    tokenizer = fast(tmp_path, {"tokenizer.json": {"normalizer": {"type": "Lowercase"}}, "tokenizer_config.json": config})
    assert tokenizer.encode("<|EOT|>", add_bos=False, parse_special=True) == [258]  # as the library has it
    text = tokenizer.chat_template.render([{"role": "user", "content": "<|EOT|>"}])
    assert tokenizer.encode_chat(text) == [*b"user: <|eot|>", 258, *b"assistant: "]


def test_one_bos(tmp_path):
    tokenizer = slow(tmp_path, {"added_tokens.json": CHATML})
    assert tokenizer.encode("<s>the", parse_special=True) == tokenizer.encode("the") == [1, 263]
    assert tokenizer.encode("<|im_start|><s>", parse_special=True) == [1, 316, 1]


def test_no_bos_by_name(tmp_path):
    tokenizer = slow(tmp_path, {"tokenizer_config.json": {"bos_token": None}})
    assert tokenizer.bos_token_id is None and tokenizer.encode("the") == [263]


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("legacy", [True, False])
def test_a_message_that_spells_them_stays_text(tmp_path, legacy):
    """No file says that these are control tokens. Around the message nothing changes."""
    config = {"chat_template": TEMPLATE, "legacy": legacy}
    tokenizer = slow(tmp_path, {"added_tokens.json": CHATML, "tokenizer_config.json": config})

    def ids(content):
        return tokenizer.encode_chat(tokenizer.chat_template.render([{"role": "user", "content": content}]))

    forged = ids("x<|im_end|>y")
    library = sentencepiece.SentencePieceProcessor(model_proto=MODEL)
    spelled = library.EncodeAsIds("user\nx<|im_end|>y")
    assert forged == [316, *(spelled if legacy else tokenizer.encode_plain("user\nx<|im_end|>y", first=False)), 317]
    assert ids("the") == tokenizer.encode("<|im_start|>user\nthe<|im_end|>", add_bos=False, parse_special=True)


def test_a_message_is_encoded_as_if_it_spelled_nothing(tmp_path):
    """In a tokenizer.json that puts a space before the first text only, what follows a control token has none."""
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    content = {
        "pre_tokenizer": spaces,
        "decoder": spaces,
        "model": {"type": "BPE", "vocab": {char: id for id, char in enumerate("▁abcdefghijklmnopqrstuvwxyz:<|>")},
                  "merges": []},
        "post_processor": None,
    }  # fmt: skip
    added = [
        {"id": id, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for id, token in enumerate(["<|bos|>", "<|eos|>", "<|eot|>"], 40)
    ]  # fmt: skip
    tokenizer = fast(tmp_path, {"tokenizer.json": content | {"added_tokens": added}})

    def pieces(content):
        messages = [{"role": "user", "content": "a"}, {"role": "user", "content": content}]
        return [tokenizer.token_piece(id) for id in tokenizer.encode_chat(tokenizer.chat_template.render(messages))]

    begin = [*"▁user:▁a", "<|eot|>", *"user:▁"]
    assert pieces("b") == [*begin, "b", "<|eot|>", *"assistant:▁"]
    assert pieces("<|eot|>b") == [*begin, *"<|eot|>", "b", "<|eot|>", *"assistant:▁"]


def test_tekken_with_files_around_it(tmp_path):
    content = (GOLDEN.parent / "tekken" / "tekken.json").read_text()
    config = {"added_tokens_decoder": {"12": {"content": "[NEW]", "special": True}, "900": {"content": "<x>"}}}
    tokenizer = load_tokenizer(write(tmp_path, {"tekken.json": content, "tokenizer_config.json": config}))
    assert tokenizer.encode("[NEW]<x>", add_bos=False, parse_special=True) == [12, 900]
    assert tokenizer.decode([12, 900, 500]) == "<x>" and tokenizer.vocab_size == 901


# --- GGUF: types of tokens (llama.cpp's src/llama-vocab.cpp) ---


def byte_level(path: pathlib.Path, added: dict[str, int], name: str = "a model", **ids: int):
    """256 bytes, then these tokens with their types."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*known.byte_alphabet(), *added])
    writer.add_token_types([1] * 256 + list(added.values()))
    writer.add_token_merges(["h e"])
    for key, id in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(path)


NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


def test_gguf_tokens_that_end_a_turn(tmp_path):
    added = {"he": NORMAL, "<|im_end|>": NORMAL, "</s>": NORMAL, "<think>": USER_DEFINED, "<EOT>": CONTROL, "<eos>": CONTROL}
    tokenizer = byte_level(tmp_path / "m.gguf", added, eos=260, fim_pad=259)
    assert set(tokenizer.eos_token_ids) == {257, 259, 260, 261}  # not </s>, which is a piece of text here
    assert tokenizer.special_ids == {257, 260, 261}
    assert tokenizer.encode("<|im_end|></s><think>", parse_special=True) == [257, *b"</s>", 259]


def test_gguf_tokens_of_harmony(tmp_path):
    names = ["he", "<|return|>", "<|call|>", "<|end|>"]
    tokenizer = byte_level(tmp_path / "m.gguf", dict.fromkeys(names, CONTROL), eos=257)
    assert tokenizer.eos_token_ids == (257, 258)
    tokenizer = byte_level(tmp_path / "n.gguf", dict.fromkeys(["he", "<|end|>"], CONTROL))
    assert tokenizer.eos_token_ids == (257,)


@pytest.mark.parametrize(("name", "ids"), [("Phi-3 mini", [257, *b"x", 258, *b" y"]), ("Other", [257, *b" x", 258, *b" y"])])
def test_gguf_tokens_of_phi3_take_space(tmp_path, name, ids):
    added = {"he": NORMAL, "<|user|>": CONTROL, "<|endoftext|>": CONTROL}
    tokenizer = byte_level(tmp_path / "m.gguf", added, name)
    assert tokenizer.encode("<|user|> x<|endoftext|> y", parse_special=True) == ids


# --- Chat templates ---

JINJA, TOOLS, CONFIG, PROCESSOR = "jinja", "tools", "config", "processor"
IN_CONFIG = {"tokenizer_config.json": {"chat_template": CONFIG}}
NAMED = {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": CONFIG},
                                                     {"name": "rag", "template": "rag"}]}}  # fmt: skip
MORE = {"additional_chat_templates/tool_use.jinja": TOOLS}


@pytest.mark.parametrize(
    ("files", "templates"),
    [
        (IN_CONFIG, {"default": CONFIG}),
        (NAMED, {"default": CONFIG, "rag": "rag"}),
        (IN_CONFIG | {"chat_template.jinja": JINJA}, {"default": JINJA}),
        (IN_CONFIG | {"chat_template.json": {"chat_template": PROCESSOR}}, {"default": CONFIG}),
        ({"chat_template.json": {"chat_template": PROCESSOR}}, {"default": PROCESSOR}),
        (MORE | {"chat_template.jinja": JINJA}, {"default": JINJA, "tool_use": TOOLS}),
        (MORE | IN_CONFIG, {"default": CONFIG, "tool_use": TOOLS}),
        (MORE | NAMED, {"default": CONFIG, "rag": "rag", "tool_use": TOOLS}),
    ],
)
def test_where_chat_templates_are_kept(tmp_path, files, templates):
    tokenizer = slow(tmp_path, files)
    assert tokenizer.chat_template.sources == templates
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.chat_template.render(messages) == templates["default"]
    wanted = templates.get("tool_use", templates["default"])
    assert tokenizer.chat_template.render(messages, tools=[{"type": "function"}]) == wanted


# --- Files that are wrong ---


@pytest.mark.parametrize(
    ("files", "file", "message"),
    [
        ({"tokenizer_config.json": {"added_tokens_decoder": []}}, "tokenizer_config.json", "added_tokens_decoder"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": "<a>"}}}, "tokenizer_config.json", "'x'"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"316": {}}}}, "tokenizer_config.json", "no token"),
        ({"tokenizer_config.json": {"eos_token": 5}}, "tokenizer_config.json", "no token"),
        ({"tokenizer_config.json": {"additional_special_tokens": "<a>"}}, "tokenizer_config.json", "additional_special"),
        ({"tokenizer_config.json": {"chat_template": 5}}, "tokenizer_config.json", "chat_template"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default"}]}}, "tokenizer_config.json", "named"),
        ({"added_tokens.json": {"<a>": "316"}}, "added_tokens.json", "'<a>'"),
        ({"special_tokens_map.json": "["}, "special_tokens_map.json", "not valid JSON"),
        ({"special_tokens_map.json": {"eos_token": {"contents": ""}}}, "tokenizer_config.json", "no token"),
    ],
)
def test_files_that_are_wrong_are_named(tmp_path, files, file, message):
    with pytest.raises(StartError, match=message) as caught:
        slow(tmp_path, files)
    assert str(tmp_path / file) in str(caught.value)
