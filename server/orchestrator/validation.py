"""The half of validation that needs the model, and the making of a `GenerateRequest`.

`server.api.parsing.parse` has checked types and ranges; here token ids meet the vocabulary, lengths meet ``--max-len``, and
what the request left out gets its default. Runs in the orchestrator's process, for every front door alike.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from engine.api import MAX_SUPPRESSED, SamplingParams
from server.api import fields
from server.api.fields import RequestFields
from server.api.parsing import check_model_name
from server.errors import InvalidRequest, StartError
from server.orchestrator.request import GenerateRequest

GREEDY_BELOW = 1e-5  # temperatures under this are greedy: dividing float32 logits by them overflows
SMALLEST_FLOAT = float(np.finfo(np.float32).tiny)
MAX_CHARACTERS_PER_TOKEN = 512  # a longer text cannot fit, and is refused without tokenizing it


@dataclasses.dataclass(frozen=True)
class ModelLimits:
    """What requests are checked against."""

    name: str  # served model name
    max_len: int  # prompt and generated tokens of one sequence
    vocab_size: int  # of the model: ids from 0 below it
    eos_token_ids: tuple[int, ...] = ()
    defaults: RequestFields = RequestFields()  # what ``generation_config.json`` asks for, where requests over ``/v1/*`` are silent
    adapters: tuple[str, ...] = ()  # names of the LoRA adapters, in the engine's order


def sampling_defaults(generation_config: Mapping[str, object], source: str = "generation_config.json") -> RequestFields:
    """Reads a model's own sampling defaults, as if a request had asked for them.

    Raises:
        StartError: a value is not allowed; requests that are silent would fail because of it.
    """
    values: dict[str, Any] = {}
    for name, option in fields.OPTIONS.items():
        value = generation_config.get(name)
        if option.of_model and value is not None:
            try:
                values[name] = fields.GRPC[name].check(value)
            except ValueError as error:
                raise StartError(f"{source}: {name} {error}, not {value!r}: correct or remove it") from None
    return RequestFields(**values)


def find_adapter(parsed: RequestFields, limits: ModelLimits) -> int:
    """Which adapter a request asks for, by ``model`` or ``lora_adapter_id``: its number from 1, 0 for the model itself."""
    check_model_name(parsed.model, limits.name, limits.adapters)
    wanted, by_id = parsed.model if parsed.model in limits.adapters else None, parsed.lora_adapter_id
    if by_id is not None and by_id not in limits.adapters:
        served = f"served are {', '.join(limits.adapters)}" if limits.adapters else "this server has none"
        raise InvalidRequest(f"lora_adapter_id {ascii(by_id)[:80]} is no adapter here: {served}", param="lora_adapter_id")
    if wanted is not None and by_id is not None and wanted != by_id:
        raise InvalidRequest(f"model asks for the adapter {wanted!r}, lora_adapter_id for {by_id!r}", param="lora_adapter_id")
    name = wanted or by_id
    return 0 if name is None else 1 + limits.adapters.index(name)


def check_text_length(text: str, limits: ModelLimits) -> None:
    """Refuses a text that cannot fit, before time is spent on tokenizing it."""
    if len(text) > limits.max_len * MAX_CHARACTERS_PER_TOKEN:
        raise _too_long(
            f"prompt of {len(text)} characters is longer than the {limits.max_len} tokens of --max-len", "prompt"
        )


def build_request(
    parsed: RequestFields,
    prompt: Sequence[int],
    limits: ModelLimits,
    *,
    request_id: str,
    detokenize: bool = True,
    deadline: float = math.inf,
) -> GenerateRequest:
    """Makes the request that the orchestrator runs.

    Args:
        parsed: the checked fields.
        prompt: token ids of the prompt.
        limits: of the served model.
        request_id: for logs.
        detokenize: text is wanted.
        deadline: `time.monotonic` seconds.

    Raises:
        InvalidRequest: an id is not of the vocabulary, or lengths do not fit.
        ModelNotFound: another model is asked for.
    """
    adapter = find_adapter(parsed, limits)
    check_ids("prompt", prompt, limits)
    check_ids("stop_token_ids", parsed.stop_token_ids, limits)
    check_ids("logit_bias", (token for token, _ in parsed.logit_bias), limits)
    max_tokens = _max_tokens(parsed, len(prompt), limits)
    if parsed.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens {parsed.min_tokens} is more than max_tokens, {max_tokens}", param="min_tokens"
        )
    sampling = dataclasses.replace(_sampling(parsed, limits), adapter=adapter)
    return GenerateRequest(
        id=request_id,
        prompt=tuple(prompt),
        sampling=tuple(dataclasses.replace(sampling, sample=sample) for sample in range(parsed.n)),
        max_tokens=max_tokens,
        stop=parsed.stop,
        stop_token_ids=frozenset(parsed.stop_token_ids),
        ignore_eos=parsed.ignore_eos,
        detokenize=detokenize,
        prompt_logprobs=parsed.prompt_logprobs is not None,
        deadline=deadline,
        adapter=limits.adapters[adapter - 1] if adapter else None,
        priority=parsed.priority,
    )


def _max_tokens(parsed: RequestFields, prompt_tokens: int, limits: ModelLimits) -> int:
    if prompt_tokens == 0:
        raise InvalidRequest("prompt must have at least one token", param="prompt")
    if prompt_tokens > limits.max_len:
        raise _too_long(f"prompt has {prompt_tokens} tokens, more than the {limits.max_len} of --max-len", "prompt")
    room = limits.max_len - prompt_tokens
    if parsed.max_tokens is None:
        if room == 0:
            raise _too_long(
                f"prompt has {prompt_tokens} tokens, which leaves no room in the {limits.max_len} of --max-len",
                "prompt",
            )
        return room
    if parsed.max_tokens > room:
        raise _too_long(
            f"prompt ({prompt_tokens} tokens) and max_tokens ({parsed.max_tokens}) are "
            f"{prompt_tokens + parsed.max_tokens} tokens, more than the {limits.max_len} of --max-len: max_tokens can be at most {room}",
            "max_tokens",
        )
    return parsed.max_tokens


def _sampling(parsed: RequestFields, limits: ModelLimits) -> SamplingParams:
    suppressed: tuple[int, ...] = ()
    if parsed.min_tokens:
        eos = () if parsed.ignore_eos else limits.eos_token_ids
        suppressed = tuple(sorted({*eos, *parsed.stop_token_ids}))
        if len(suppressed) > MAX_SUPPRESSED:
            raise InvalidRequest(
                f"stop_token_ids must be at most {MAX_SUPPRESSED - len(eos)} token ids with min_tokens",
                param="stop_token_ids",
            )
    asked = SamplingParams(
        **_options(parsed, limits.defaults),
        seed=_seed(parsed.seed),
        logit_bias=parsed.logit_bias,
        min_tokens=parsed.min_tokens,
        suppressed=suppressed,
        logprobs=parsed.logprobs is not None,
    )
    return dataclasses.replace(
        asked,
        temperature=0.0 if asked.temperature < GREEDY_BELOW else asked.temperature,
        top_k=asked.top_k if 0 < asked.top_k < limits.vocab_size else 0,  # as many as there are, or all: the same as off
        top_p=max(asked.top_p, SMALLEST_FLOAT),  # not 0, which would keep no token
        top_n_sigma=max(asked.top_n_sigma, SMALLEST_FLOAT) if asked.top_n_sigma > 0 else 0.0,  # not 0, which would keep all
    )


def _options(parsed: RequestFields, defaults: RequestFields) -> dict[str, Any]:
    """The numbers of the sampler: what the request says, else (over ``/v1/*``) the model, else what their descriptions say."""
    values = {}
    for name, option in fields.OPTIONS.items():
        value = getattr(parsed, name)
        if value is None and parsed.model_defaults:
            value = getattr(defaults, name)
        if value is None:
            value = option.neutral if parsed.model_defaults else option.plain
        values[name] = value
    return values


def _seed(asked: int | None) -> int:
    """The seed as 64 unsigned bits. -1 is what clients of vLLM and llama.cpp send for none; other negative numbers are seeds
    like any, as in OpenAI's API and vLLM."""
    return secrets.randbits(63) if asked in (None, -1) else asked % 2**64


def check_ids(name: str, ids: Iterable[int], limits: ModelLimits) -> None:
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequest(
                f"{name} has the token id {token}; the model's are from 0 to {limits.vocab_size - 1}", param=name
            )


def _too_long(message: str, param: str) -> InvalidRequest:
    error = InvalidRequest(message, param=param)
    error.code = "context_length_exceeded"  # OpenAI's
    return error
