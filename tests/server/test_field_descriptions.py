"""What follows from the descriptions of fields: documents that are not stale, numbers that never change, a sampler that agrees."""

from __future__ import annotations

import dataclasses

import pytest

from engine.api import SamplingParams
from protos.orchestrator_pb2 import DecodeRequest
from server.api import decode_fields, document, fields, parsing
from server.api.description import Door, Name
from server.api.field_types import boolean, integer, number, schema_of, stop_strings
from server.commands.arguments import make_parser
from server.orchestrator.validation import ModelLimits, build_request

USER = [{"role": "user", "content": "hi"}]

# Of JetStream's proto, and of every release of ours: written down here, so that no description can change one.
NUMBERS = {
    "max_tokens": 4, "text_content": 5, "token_content": 6, "metadata": 7, "num_samples": 8, "lora_adapter_id": 9, "has_bos": 10,
    "temperature": 20, "top_k": 21, "top_p": 22, "min_p": 23, "seed": 24, "stop": 25, "stop_token_ids": 26, "min_tokens": 27,
    "ignore_eos": 28, "presence_penalty": 29, "frequency_penalty": 30, "repetition_penalty": 31, "logit_bias": 32, "logprobs": 33,
    "prompt_logprobs": 34, "want_text": 35, "echo": 36, "prompt_only": 37, "request_id": 38, "model": 39, "model_defaults": 40,
    "priority": 41, "guided_json": 42, "guided_regex": 43, "guided_grammar": 44, "show_tool_markers": 45, "guided_choice": 46,
    "parse_special": 47, "skip_special_tokens": 48, "add_special_tokens": 49, "top_n_sigma": 50,
}  # fmt: skip


@pytest.mark.parametrize("path", document.PARTS, ids=str)
def test_documents_say_what_the_descriptions_say(path):
    text = (document.ROOT / path).read_text(encoding="utf-8")
    assert document.filled(path, text) == text, "stale: run `make docs`, or `make protos` for the proto"


def test_only_what_stands_between_marks_is_written():
    text = (document.ROOT / document.PROTO).read_text(encoding="utf-8")
    before, mark, rest = text.partition("  // begin fields\n")
    _, end, after = rest.partition("  // end fields\n")
    assert document.filled(document.PROTO, before + mark + "  bool old = 1;\n" + end + after) == text
    with pytest.raises(ValueError, match=r"protos/orchestrator.proto must have the lines '// begin fields'"):
        document.filled(document.PROTO, before + after)


def test_numbers_of_the_proto_are_for_ever():
    known = {field.name: field.number for field in DecodeRequest.DESCRIPTOR.fields}
    assert NUMBERS.items() <= known.items()
    assert {number for name, number in known.items() if name not in NUMBERS} <= set(range(50, 100))


def test_the_proto_has_each_field_as_described():
    """By protobuf's own reading of the generated code."""
    kinds = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9}  # FieldDescriptorProto.Type
    for name, field in fields.GRPC.items():
        wire, found = fields.DESCRIPTIONS[field.target].wire, DecodeRequest.DESCRIPTOR.fields_by_name[name]
        assert found.number == wire.number, name
        *label, kind = wire.kind.split(" ") if not wire.kind.startswith("map") else ("map", "")
        if label == ["map"]:
            assert found.message_type.GetOptions().map_entry
        else:
            assert found.type == kinds[kind]
            assert (["repeated"] if found.is_repeated else ["optional"] if found.has_presence else []) == label, name


def test_numbers_of_the_sampler_are_described():
    """Silence over gRPC is what the engine takes for silence."""
    silent = SamplingParams()
    assert {name: option.plain for name, option in fields.OPTIONS.items()} == {name: getattr(silent, name) for name in fields.OPTIONS}
    by_hand = {"seed", "sample", "logit_bias", "min_tokens", "suppressed", "logprobs", "adapter"}  # in validation.py
    assert {field.name for field in dataclasses.fields(SamplingParams)} == by_hand | fields.OPTIONS.keys()


def test_a_number_reaches_the_sampler_from_every_door():
    """Each a value of its own, from JSON through the proto to `SamplingParams`; nothing on the way names one of them."""
    asked = {name: 1 + index / 64 for index, name in enumerate(fields.OPTIONS)} | {"top_p": 0.75, "min_p": 0.25, "top_k": 7}
    limits = ModelLimits("tiny", max_len=32, vocab_size=300)
    for table, body in ((fields.GENERATE, {"prompt": "x"}), (fields.COMPLETIONS, {"prompt": "x"}), (fields.CHAT, {"messages": USER})):
        request = decode_fields.fields_to_proto(parsing.parse(body | asked, table))
        parsed = decode_fields.fields_from_proto(DecodeRequest.FromString(request.SerializeToString()))
        sampling = build_request(parsed, [1], limits, request_id="r").sampling[0]
        assert {name: getattr(sampling, name) for name in asked} == asked


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        ((Name(Door.CHAT, boolean), Name(Door.OPENAI, boolean)), "x at .*CHAT.*: described twice"),
        ((Name(Door.CHAT, boolean), Name(Door.CHAT, boolean, "seed")), "seed at .*CHAT.*: described twice"),
        ((Name(Door.CHAT, name="y"), Name(Door.GRPC, boolean)), "y at .*CHAT.*: no check"),
    ],
)
def test_descriptions_that_contradict_themselves(monkeypatch, names, wrong):
    described = fields.DESCRIPTIONS["seed"]._replace(names=names)
    monkeypatch.setitem(fields.DESCRIPTIONS, "x", described)
    with pytest.raises(ValueError, match=wrong):
        fields._table(Door.CHAT)


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (integer(-1, 2**31 - 1), "-1 to 2^31 - 1"),
        (integer(-(2**63), 2**63 - 1), "-2^63 to 2^63 - 1"),
        (number(0, 1e6), "0 to 10^6"),
        (number(0, 1, above=True), "above 0, to 1"),
        (number(1e-3, 1e3), "0.001 to 1000"),
        (boolean, "true, false"),
        (stop_strings, "a text of 1 to 1024 characters, or a list of up to 16: texts of 1 to 1024 characters each"),
    ],
)
def test_what_is_allowed_in_words(check, said):
    assert document.words(schema_of(check)) == said


def test_flags_of_generate():
    """Each has the type of its field; those of today are all there."""
    parsed = make_parser().parse_args(
        ["generate", "x", "--max-tokens", "5", "--n", "2", "--temperature", "1", "--top-k", "3", "--top-p", "0.5", "--min-p", "0.1",
         "--seed", "7", "--min-tokens", "1", "--presence-penalty", "1", "--frequency-penalty", "1", "--repetition-penalty", "1.5",
         "--stop", "a", "--stop", "b", "--ignore-eos"]
    )  # fmt: skip
    given = {name.removeprefix("sampling_"): value for name, value in vars(parsed).items() if name.startswith("sampling_")}
    assert {name: value for name, value in given.items() if value is not None} == {
        "max_tokens": 5, "n": 2, "temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7, "min_tokens": 1,
        "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5, "stop": ["a", "b"], "ignore_eos": True,
    }  # fmt: skip
    assert isinstance(given["temperature"], float)


def test_one_text_of_a_client_is_a_list_of_it():
    assert decode_fields.named_fields({"stop": "ab", "guided_choice": "yes", "guided_regex": "ab", "stop_token_ids": [1]}) == {
        "stop": ["ab"], "guided_choice": ["yes"], "guided_regex": "ab", "stop_token_ids": [1]
    }  # fmt: skip
    with pytest.raises(ValueError, match="top_q"):
        DecodeRequest(**decode_fields.named_fields({"top_q": 1}))
