"""Fields that other servers know and this one does not have: which are refused, and which may be ignored.

A client that was written for vLLM, SGLang, llama-server, TGI or OpenAI sends its server's own fields. One that would change
the answer is refused by name, but for the values that ask for nothing (`null` always does); one that cannot change it is
ignored. Fields that nobody knows are ignored too. What is honoured is in ``server/api/fields.py``, which goes first.

These two tables are all there is to say: ``make docs`` writes them into ``docs/api.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from server.api.field_types import Check, neutral

VLLM, SGLANG, LLAMA, TGI, OPENAI = "vLLM", "SGLang", "llama-server", "TGI", "OpenAI"


class Refused(NamedTuple):
    """Fields, each with the values that ask for nothing; ``why`` ends the sentence "<field> is not supported: "."""

    of: tuple[str, ...]
    why: str
    names: Mapping[str, tuple[object, ...]]


class Ignored(NamedTuple):
    """Fields that do not change the answer, whatever they say."""

    of: tuple[str, ...]
    why: str
    names: tuple[str, ...]


REFUSED = (
    Refused(
        (LLAMA, TGI),
        "there is no such sampler; temperature, top_n_sigma, top_k, top_p and min_p are there",
        {
            "mirostat": (0,),
            "typical_p": (1,),
            "dynatemp_range": (0,),
            "xtc_probability": (0,),
            "dry_multiplier": (0,),
            "adaptive_target": (-1,),
            "tfs_z": (1,),
            "min_keep": (0,),
        },
    ),
    Refused((LLAMA,), "samplers come in one order, see docs/api.md", {"samplers": ()}),
    Refused(
        (LLAMA,),
        "use repetition_penalty, which counts the whole prompt and answer and not the last tokens only",
        {"repeat_penalty": (1,)},
    ),
    Refused((VLLM,), "there is no beam search", {"use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,)}),
    Refused((VLLM,), "use logit_bias, or guided_choice", {"allowed_token_ids": (), "bad_words": ([],)}),
    Refused((TGI,), "say temperature; 0 is greedy", {"do_sample": ()}),
    Refused((VLLM, TGI), "answers have no watermark", {"watermarking": (False,), "watermark": (False,)}),
    Refused((VLLM, TGI), "send a prompt that fits", {"truncate_prompt_tokens": (), "truncate": ()}),
    Refused((SGLANG,), "use stop or guided_regex", {"stop_regex": ("", [])}),
    Refused((VLLM,), "use stop, or a repetition_penalty", {"repetition_detection": ()}),
    Refused((LLAMA,), "use max_tokens, stop, or --request-timeout", {"n_indent": (0,), "t_max_predict_ms": (0, -1)}),
    Refused((LLAMA,), "use n", {"n_cmpl": (1,)}),
    Refused((SGLANG, LLAMA, TGI), "name the adapter in model", {"lora": ([],), "lora_path": (), "adapter_id": ()}),
    Refused(
        (VLLM, SGLANG, LLAMA, TGI),
        "answers have OpenAI's fields, usage and logprobs",
        {
            "return_token_ids": (False,),
            "return_tokens": (False,),
            "return_prompt_token_ids": (False,),
            "return_prompt_text": (False,),
            "return_tokens_as_token_ids": (False,),
            "return_meta_info": (False,),
            "return_hidden_states": (False,),
            "return_routed_experts": (False,),
            "return_cached_tokens_details": (False,),
            "return_progress": (False,),
            "timings_per_token": (False,),
            "verbose": (False,),
            "response_fields": ([],),
            "details": (False,),
        },
    ),
    Refused(
        (VLLM, LLAMA, TGI),
        "use logprobs, or prompt_logprobs",
        {
            "n_probs": (0,),
            "post_sampling_probs": (False,),
            "logprob_token_ids": (),
            "top_n_tokens": (0,),
            "decoder_input_details": (False,),
        },
    ),
    Refused((TGI,), "use echo on /v1/completions", {"return_full_text": (False,)}),
    Refused(
        (VLLM, SGLANG, LLAMA),
        "what a model thinks is not told apart from what it answers",
        {
            "reasoning_format": ("none", "auto"),
            "include_reasoning": (True,),
            "separate_reasoning": (False,),
            "reasoning_control": (False,),
            "thinking_token_budget": (-1,),
            "thinking_budget_tokens": (-1,),
            "reasoning_budget_tokens": (-1,),
            "reasoning_budget_message": ("",),
        },
    ),
    Refused(
        (LLAMA, TGI),
        "tools are shown by the model's chat template and guided by their own grammar",
        {
            "grammar_lazy": (False,),
            "grammar_triggers": ([],),
            "preserved_tokens": ([],),
            "parse_tool_calls": (True,),
            "tool_prompt": ("",),
        },
    ),
    Refused(
        (VLLM, LLAMA, TGI),
        "chats are rendered by the server's template; use messages and chat_template_kwargs",
        {"chat_template": ("",), "system_prompt": ("",), "guideline": ("",), "generation_prompt": ("",), "task": ()},
    ),
    Refused((VLLM,), "use response_format", {"guided_json_object": (False,), "guided_whitespace_pattern": ("",)}),
    Refused(
        (VLLM, SGLANG),
        "prefixes are shared by all who use this server",
        {"cache_salt": ("",), "extra_key": ("",), "session_params": ({},), "kv_transfer_params": ({},), "ec_transfer_params": ({},)},
    ),
    Refused(
        (VLLM, SGLANG),
        "no code of a client's runs here",
        {"custom_logit_processor": ("",), "custom_params": ({},), "vllm_xargs": ({},)},
    ),
    Refused((VLLM, SGLANG, LLAMA), "use prompt, or messages", {"prompt_embeds": (), "input_ids": (), "image_data": ([],)}),
    Refused((TGI, SGLANG), "send prompt and the sampling fields themselves", {"inputs": (), "parameters": ({},), "sampling_params": ({},)}),
    Refused(
        (OPENAI,),
        "the model reads and writes text, as long as max_tokens allows, and nothing else",
        {"modalities": (["text"],), "audio": (), "web_search_options": (), "moderation": (), "verbosity": ("medium",)},
    ),
    # Fields that are this server's too, of other routes.
    Refused(
        (OPENAI, VLLM, SGLANG),
        "use /v1/chat/completions",
        {
            "messages": ([],),
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "parallel_tool_calls": (True, False),
            "functions": ([],),
            "function_call": ("none", "auto"),
            "top_logprobs": (0,),
            "reasoning_effort": (),
            "documents": ([],),
            "chat_template_kwargs": ({},),
            "add_generation_prompt": (True,),
            "continue_final_message": (False,),
        },
    ),
    Refused(
        (OPENAI, VLLM, SGLANG),
        "use /v1/completions",
        {"prompt": ("",), "echo": (False,), "suffix": ("",), "stream_options": ({}, {"include_usage": False})},
    ),
)

IGNORED = (
    Ignored(
        (OPENAI,),
        "nothing is stored, and all are served alike",
        ("store", "metadata", "service_tier", "safety_identifier", "prediction"),
    ),
    Ignored(
        (OPENAI, SGLANG, LLAMA),
        "prefixes are cached anyway; tokens are the same with and without",
        ("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_prompt", "n_cache_reuse", "ngram_corpus_id"),
    ),
    Ignored(
        (LLAMA,),
        "parameters of samplers and penalties that are off",
        (
            "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length",
            "dry_penalty_last_n", "dry_sequence_breakers", "adaptive_decay", "repeat_last_n", "penalize_nl",
        ),
    ),
    Ignored(
        (VLLM, SGLANG, LLAMA),
        "parameters of what is off",
        (
            "stream_reasoning", "reasoning_budget_start_tag", "reasoning_budget_end_tag", "reasoning_budget_end_tags",
            "truncation_side", "routed_experts_prompt_start", "routed_experts_start_len", "return_token_offsets",
            "return_mm_kwargs",
        ),
    ),
    Ignored((LLAMA,), "a text that is too long is refused, never shifted", ("n_keep", "n_discard")),
    Ignored(
        (VLLM, SGLANG),
        "the model reads text only",
        (
            "mm_processor_kwargs", "media_io_kwargs", "images_config", "max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video",
        ),
    ),
    Ignored(
        (VLLM, SGLANG),
        "the header x-request-id names a request",
        ("request_id", "rid", "session_id", "custom_labels"),
    ),
    Ignored(
        (VLLM, SGLANG, LLAMA),
        "where and how it is computed is the server's",
        (
            "id_slot", "slot_id", "backend_sampling", "speculative.n_max", "speculative.n_min", "speculative.p_min",
            "guided_decoding_backend", "stream_interval", "sse_ping_interval", "routed_dp_rank", "data_parallel_rank",
            "disagg_prefill_dp_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room", "chat_format", "chat_parser",
        ),
    ),
    Ignored((VLLM,), "control tokens that are shown stand as they are", ("spaces_between_special_tokens",)),
)


def _ignore(value: object) -> None:
    return None


FIELDS: Mapping[str, Check] = {
    **{name: _ignore for row in IGNORED for name in row.names},
    **{name: neutral(*values, because=row.why) for row in REFUSED for name, values in row.names.items()},
}
