"""The fields of a request: each described once, by `RequestFields`, and the tables that follow from the descriptions.

A new field is one attribute here. A number for the sampler is an `option`, and an attribute of the same name in
`engine.api.SamplingParams`; then ``make docs`` and ``make protos`` write it into ``docs/api.md`` and the proto.
How requests are checked by the tables: ``server/api/parsing.py``. Fields of other servers that this one does not have:
``server/api/peer_fields.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from server.api import chat_types, field_types
from server.api.chat_types import ToolName
from server.api.description import Description, Door, Name, Wire, described, descriptions, option
from server.api.field_types import INT32_MAX, INT64_MAX, INT64_MIN, MAX_SAMPLES, MAX_TOP_LOGPROBS, Check, boolean, integer, number, only
from server.api.peer_fields import LLAMA, OPENAI, SGLANG, TGI, VLLM

_NOT_ON_GENERATE = "is not available on /generate; use /v1/completions"
_STOP_AND_ANSWER = "The text ends with the stop string that ended it; not with stop_token_ids."


@dataclasses.dataclass(frozen=True)
class RequestFields:
    """What a request asks for, the same for all doors. `None` where it is silent and a default may depend on the door or the model."""

    max_tokens: int | None = described(
        None,
        Name(Door.RAW | Door.GRPC, integer(0, INT32_MAX)),
        Name(Door.CHAT, integer(1, INT32_MAX)),
        Name(Door.HTTP, name="max_completion_tokens", about="OpenAI's newer name of max_tokens.", of=(OPENAI,)),
        Name(Door.RAW, field_types.token_limit(0), "n_predict", "llama-server's name of max_tokens; -1: as many as fit.", (LLAMA,)),
        Name(Door.CHAT, field_types.token_limit(1), "n_predict", "llama-server's name of max_tokens; -1: as many as fit.", (LLAMA,)),
        about="The most tokens to generate for each sample, with the prompt at most --max-len; 0 scores the prompt only.",
        absent="16 on `/v1/completions`, else what fits",
        wire=Wire(4, "int32"),
        flag=True,
    )
    n: int = described(
        1,
        Name(Door.OPENAI, integer(1, MAX_SAMPLES)),
        Name(Door.GENERATE, only(1, because="must be 1 on /generate; /v1/completions takes more")),
        Name(Door.GRPC, integer(1, MAX_SAMPLES), "num_samples"),
        about="Samples for each prompt.",
        wire=Wire(8, "int32"),
        flag=True,
    )

    # Numbers of the sampler, in the order in which it applies them.
    repetition_penalty: float | None = option(
        number(1e-3, 1e3),
        Wire(31, "optional double"),
        about="Divides the logits (multiplies, below 0) of tokens of the prompt and the answer; 1 is off.",
        neutral=1.0,
        of_model=True,
    )
    frequency_penalty: float | None = option(
        number(-2, 2),
        Wire(30, "optional double"),
        about="Subtracted from a token's logit once for each time it was generated.",
        neutral=0.0,
    )
    presence_penalty: float | None = option(
        number(-2, 2),
        Wire(29, "optional double"),
        about="Subtracted from the logits of tokens that were generated before.",
        neutral=0.0,
    )
    temperature: float | None = option(
        number(0, 1e6), Wire(20, "optional double"), about="Divides the logits; 0 is greedy.", neutral=1.0, of_model=True, plain=0.0
    )
    top_n_sigma: float | None = option(
        number(-1, 1e3),
        Wire(50, "optional double"),
        about="Keep tokens whose logits are within this many standard deviations of the largest; 0 and less keep all.",
        neutral=0.0,
    )
    top_k: int | None = option(
        integer(-1, INT32_MAX),
        Wire(21, "optional int32"),
        about="Keep the k most probable tokens, of equal ones those of the lowest ids; 0 and -1 keep all.",
        neutral=0,
        of_model=True,
    )
    top_p: float | None = option(
        number(0, 1, above=True),
        Wire(22, "optional double"),
        about="Keep the fewest tokens, most probable first, that together have this probability; of equal ones those of the lowest ids.",
        neutral=1.0,
        of_model=True,
    )
    min_p: float | None = option(
        number(0, 1),
        Wire(23, "optional double"),
        about="Keep tokens at least this many times as probable as the most probable one.",
        neutral=0.0,
        of_model=True,
    )

    seed: int | None = described(
        None,
        Name(Door.EVERYWHERE, integer(INT64_MIN, INT64_MAX)),
        about="The same seed gives the same tokens; -1 is a random one.",
        absent="random",
        wire=Wire(24, "optional int64"),
        flag=True,
    )
    stop: tuple[str, ...] = described(
        (),
        Name(Door.EVERYWHERE, field_types.stop_strings),
        about="Generation ends before the first of these texts.",
        wire=Wire(25, "repeated string"),
        flag=True,
    )
    stop_token_ids: tuple[int, ...] = described(
        (),
        Name(Door.EVERYWHERE, field_types.stop_token_ids),
        about="Token ids that end generation, beside EOS.",
        wire=Wire(26, "repeated int32"),
    )
    min_tokens: int = described(
        0,
        Name(Door.EVERYWHERE, integer(0, INT32_MAX)),
        about="EOS and stop_token_ids cannot come before so many tokens, at most max_tokens.",
        wire=Wire(27, "optional int32"),
        flag=True,
    )
    ignore_eos: bool = described(
        False,
        Name(Door.EVERYWHERE, boolean),
        about="EOS does not end generation.",
        wire=Wire(28, "optional bool"),
        flag=True,
    )
    logit_bias: tuple[tuple[int, float], ...] = described(
        (),
        Name(Door.EVERYWHERE, field_types.logit_bias),
        about="Added to the logits of these token ids (the keys).",
        wire=Wire(32, "map<int32, double>"),
    )
    logprobs: int | None = described(  # alternatives per generated token; None: no log-probs
        None,
        Name(Door.COMPLETIONS, integer(0, field_types.MAX_COMPLETION_LOGPROBS)),
        Name(Door.CHAT, boolean),
        Name(Door.GRPC, integer(0, MAX_TOP_LOGPROBS)),
        Name(Door.GENERATE, only(because=_NOT_ON_GENERATE)),
        about="Log-probs of the generated tokens, each with so many alternatives (on chat true, and top_logprobs).",
        wire=Wire(33, "optional int32"),
    )
    prompt_logprobs: int | None = described(
        None,
        Name(Door.GRPC, integer(0, MAX_TOP_LOGPROBS)),
        about="Log-probs of the prompt's tokens, each with so many alternatives.",
        wire=Wire(34, "optional int32"),
    )
    echo: bool = described(
        False,
        Name(Door.COMPLETIONS | Door.GRPC, boolean),
        about="The prompt comes back before the answer.",
        wire=Wire(36, "optional bool"),
    )
    want_text: bool = described(
        False,
        Name(Door.GRPC, boolean),
        about="The answer has text although the prompt was given as token ids.",
        wire=Wire(35, "optional bool"),
    )
    prompt_only: bool = described(
        False,
        Name(Door.GRPC, boolean),
        about="Generate nothing: only the prompt's log-probs are wanted. max_tokens must be 0.",
        wire=Wire(37, "optional bool"),
    )
    model_defaults: bool = described(
        False,
        Name(Door.GRPC, boolean),
        about="Where this request is silent the model's generation_config.json decides, then temperature is 1, as over /v1/*.",
        wire=Wire(40, "optional bool"),
    )
    priority: int = described(
        0, Name(Door.EVERYWHERE, integer(-1000, 1000)), about="Lower goes first.", wire=Wire(41, "optional int32")
    )
    model: str | None = described(
        None,
        Name(Door.EVERYWHERE | Door.TOKENIZE | Door.DETOKENIZE, field_types.string),
        about="The served model's name, which is checked, or an adapter's (--lora), which then answers.",
        absent="the served model",
        wire=Wire(39, "optional string"),
    )
    lora_adapter_id: str | None = described(
        None, Name(Door.GRPC, field_types.string), about="The adapter that answers.", wire=Wire(9, "string")
    )
    request_id: str | None = described(
        None,
        Name(Door.GRPC, field_types.request_id),
        about="Appears in the server's log and in the answer.",
        wire=Wire(38, "optional string"),
    )
    guided_json: str | None = described(
        None,
        Name(Door.EVERYWHERE, field_types.json_schema),
        about="The answer keeps to this JSON schema (an object, or its text). Of the fields guided_* at most one may be given.",
        wire=Wire(42, "optional string"),
    )
    guided_regex: str | None = described(
        None,
        Name(Door.EVERYWHERE, field_types.grammar),
        about="The whole answer matches this regular expression (Rust's syntax, no look-around).",
        wire=Wire(43, "optional string"),
    )
    guided_grammar: str | None = described(
        None,
        Name(Door.EVERYWHERE, field_types.grammar),
        about="The answer keeps to this grammar (GBNF or Lark).",
        wire=Wire(44, "optional string"),
    )
    guided_choice: tuple[str, ...] | None = described(
        None,
        Name(Door.EVERYWHERE, field_types.choices),
        about="The answer is one of these texts.",
        wire=Wire(46, "repeated string"),
    )
    show_tool_markers: bool = described(
        False,
        Name(Door.GRPC, boolean),
        about="The text shows the control tokens by which the model marks a tool call; it leaves them out otherwise.",
        wire=Wire(45, "optional bool"),
    )
    parse_special: bool = described(
        True,
        Name(Door.RAW | Door.GRPC | Door.TOKENIZE, boolean),
        Name(Door.CHAT, only(False, because="must be false: what messages spell stays text")),
        about="False: control tokens that a raw prompt spells stay text, as they do in messages always.",
        wire=Wire(47, "optional bool"),
    )
    skip_special_tokens: bool = described(
        True,
        Name(Door.EVERYWHERE | Door.DETOKENIZE, boolean),
        about="False: the text shows control tokens, and stop strings see them.",
        wire=Wire(48, "optional bool"),
    )
    add_special_tokens: bool | None = described(
        None,
        Name(Door.EVERYWHERE | Door.TOKENIZE, boolean),
        about="Whether BOS comes first.",
        absent="true before a raw prompt; in a chat, where the template has it",
        wire=Wire(49, "optional bool"),
    )

    # Of HTTP only.
    shown_prompt_logprobs: int | None = described(  # what the answer has as such; prompt_logprobs may be of echo
        None,
        Name(
            Door.OPENAI,
            integer(0, MAX_TOP_LOGPROBS),
            "prompt_logprobs",
            of=(VLLM,),
            about="Log-probs of the prompt's tokens, of each choice (of the answer, in a chat), not with stream: for each token an object "
            "by token id of logprob, rank and decoded_token, its own token first and then so many alternatives; null for the first. "
            "rank is null where the token is not among as many as were asked for.",
        ),
        Name(Door.GENERATE, only(because=_NOT_ON_GENERATE), "prompt_logprobs", "Not available; use /v1/completions."),
    )
    include_stop: bool = described(
        False,
        Name(Door.HTTP, boolean, "include_stop_str_in_output", _STOP_AND_ANSWER, (VLLM,)),
        Name(Door.HTTP, boolean, "no_stop_trim", _STOP_AND_ANSWER, (SGLANG,)),
    )
    as_many_as_fit: bool = False  # asked for, where max_tokens is absent
    spelled: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)  # what the client called these fields
    guide_field: str | None = None  # what the client called its guide, where that is another name
    stream: bool = described(False, Name(Door.HTTP, boolean), about="Server-sent events, the last of them [DONE].")
    include_usage: bool = described(
        False,
        Name(
            Door.OPENAI, field_types.stream_options, "stream_options", "With stream. include_usage: a last event with the usage."
        ),
    )
    prompt: tuple[str | tuple[int, ...], ...] = described(
        (),
        Name(Door.GENERATE, field_types.prompt, required=True),
        Name(Door.COMPLETIONS, field_types.prompts, required=True),
        Name(Door.TOKENIZE, field_types.string, about="The text to tokenize, as vLLM's clients spell it."),
        about="The text to continue; on /v1/completions also several texts, token ids, or several lists of ids.",
    )
    messages: tuple[Mapping[str, Any], ...] = described(
        (),
        Name(Door.CHAT, chat_types.chat_messages, required=True),
        Name(Door.TOKENIZE, chat_types.chat_messages),
        about="The conversation. Content is text or a list of text parts.",
    )
    add_generation_prompt: bool = described(
        True,
        Name(Door.CHAT | Door.TOKENIZE, boolean),
        about="The prompt ends with the beginning of the assistant's turn.",
    )
    continue_final_message: bool = described(
        False,
        Name(Door.CHAT | Door.TOKENIZE, boolean),
        about="The answer goes on with the last message, which is the assistant's.",
    )
    chat_template_kwargs: Mapping[str, Any] | None = described(
        None,
        Name(Door.CHAT | Door.TOKENIZE, field_types.json_object),
        about="Further variables of the model's chat template.",
    )
    tools: tuple[Mapping[str, Any], ...] = described(
        (), Name(Door.CHAT | Door.TOKENIZE, chat_types.tools), about="Functions that the model may call."
    )
    tool_choice: str | ToolName = described(  # "none", "auto", "required"
        "auto",
        Name(Door.CHAT, chat_types.tool_choice),
        about="Whether it may, must not, or must call one, or which it must call.",
    )
    parallel_tool_calls: bool = described(True, Name(Door.CHAT, boolean), about="False: at most one call.")


# Other spellings of a guide: each becomes one of the fields ``guided_*``.
_GUIDES = (
    Name(
        Door.HTTP,
        field_types.structured_outputs,
        "structured_outputs",
        "vLLM's spelling: exactly one of json, regex, choice, grammar, json_object.",
    ),
    Name(
        Door.HTTP,
        chat_types.response_format,
        "response_format",
        "Free text, JSON, JSON by a schema, or what a regular expression or grammar matches.",
    ),
    Name(
        Door.HTTP,
        chat_types.any_grammar,
        "grammar",
        'The same as guided_grammar ("": none); or an object of type and value as in response_format.',
        (LLAMA, TGI),
    ),
    Name(Door.HTTP, field_types.guide("guided_json", field_types.json_schema), "json_schema", "The same as guided_json.", (LLAMA, SGLANG)),
    Name(Door.HTTP, field_types.guide("guided_regex", field_types.grammar), "regex", "The same as guided_regex.", (SGLANG,)),
    Name(Door.HTTP, field_types.guide("guided_grammar", field_types.grammar), "ebnf", "The same as guided_grammar.", (SGLANG,)),
)

# Names that become no attribute: they are joined to others (``server/api/parsing.py``, ``server/proxy/tokenization.py``), or say nothing.
_OTHERS = (
    Name(Door.HTTP, integer(1, MAX_SAMPLES), "best_of", "Must equal n: there is no choice among samples.", (OPENAI, SGLANG)),
    Name(Door.HTTP, field_types.unused(field_types.string), "user", "Not used."),
    Name(
        Door.COMPLETIONS,
        only("", because="is not supported: the model continues text, it does not insert"),
        "suffix",
        "Not supported.",
    ),
    Name(Door.CHAT, integer(0, MAX_TOP_LOGPROBS), "top_logprobs", "Alternatives of each token, with logprobs."),
    Name(
        Door.CHAT,
        chat_types.reasoning_effort,
        "reasoning_effort",
        "The variables reasoning_effort and enable_thinking (false for none) of the model's chat template, unless chat_template_kwargs "
        "has them.",
        (OPENAI, VLLM, LLAMA),
    ),
    Name(Door.CHAT, chat_types.documents, "documents", "A variable of the model's chat template.", (VLLM,)),
    Name(Door.CHAT, only([], because="is not supported; use tools"), "functions", "Not supported; use tools."),
    Name(Door.CHAT, only("none", because="is not supported; use tool_choice"), "function_call", "Not supported; use tool_choice."),
    Name(Door.TOKENIZE, field_types.string, "text", "The text to tokenize; one of text, prompt, content and messages is required."),
    Name(Door.TOKENIZE, field_types.string, "content", "The text to tokenize, as llama.cpp's clients spell it."),
    Name(
        Door.TOKENIZE, boolean, "add_special", "llama.cpp's name of add_special_tokens; absent with content: false."
    ),
    Name(
        Door.TOKENIZE, boolean, "return_token_strs", "The answer has token_strs, the tokens as the vocabulary spells them."
    ),
    Name(
        Door.TOKENIZE, boolean, "with_pieces", "The answer has each token as its id and its text, or its bytes where they are no text."
    ),
    Name(
        Door.TOKENIZE,
        only(because="is not supported: the server renders chats by the model's"),
        "chat_template",
        "Not supported.",
    ),
    Name(Door.DETOKENIZE, field_types.token_ids, "tokens", "Token ids.", required=True),
)


class Field(NamedTuple):
    """A field as a client spells it at one door: what it becomes in `RequestFields` (or in the values that are joined to others), how
    it is checked, and what it means."""

    target: str
    check: Check
    about: str
    of: tuple[str, ...]
    required: bool


Table = dict[str, Field]  # by the names at one door; never changed

DESCRIPTIONS: dict[str, Description] = descriptions(RequestFields)


def _table(door: Door) -> Table:
    """The fields that may come in at one door, by name.

    Raises:
        ValueError: a name is described twice for this door, or not how it is checked.
    """
    made: Table = {}

    def add(target: str, name: Name, check: Check | None, about: str) -> None:
        spelled = name.name or target
        if spelled in made or check is None:
            raise ValueError(f"{spelled} at {door}: {'no check' if check is None else 'described twice'}")
        made[spelled] = Field(target, check, name.about or about, name.of, name.required)

    for target, description in DESCRIPTIONS.items():
        here = [name for name in description.names if door in name.at]
        own = next((name.check for name in here if not name.name), None)
        for name in here:
            add(target, name, name.check or own, description.about)
    for name in (*_GUIDES, *_OTHERS):
        if door in name.at:
            add(name.name, name, name.check, "")
    return made


GENERATE, COMPLETIONS, CHAT, GRPC, TOKENIZE, DETOKENIZE = map(
    _table, (Door.GENERATE, Door.COMPLETIONS, Door.CHAT, Door.GRPC, Door.TOKENIZE, Door.DETOKENIZE)
)

GUIDED = ("guided_json", "guided_regex", "guided_grammar", "guided_choice")
GUIDE_SPELLINGS = tuple(name.name for name in _GUIDES)  # which become one of those
SPELLINGS = ("text", "prompt", "content", "messages")  # of what is tokenized: ours, vLLM's, llama.cpp's, vLLM's chat

OPTIONS = {target: description.option for target, description in DESCRIPTIONS.items() if description.option}  # of the sampler
