"""Request fields of OpenAI and vLLM that this version does not have: refused by name unless they ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import bad_request

_TOOLS = "tool calling comes in a later version"
_STRUCTURED = "structured output comes in a later version"
_BEAM = "beam search comes in a later version"
_STORAGE = "nothing is stored on this server"
_AUDIO = "the server generates text only"

# Field -> (values that ask for nothing, why anything else is refused). null asks for nothing everywhere.
_SHARED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (({"type": "text"},), _STRUCTURED),
    "structured_outputs": ((), _STRUCTURED),
    "guided_json": ((), _STRUCTURED),
    "guided_regex": ((), _STRUCTURED),
    "guided_choice": ((), _STRUCTURED),
    "guided_grammar": ((), _STRUCTURED),
    "use_beam_search": ((False,), _BEAM),
    "length_penalty": ((1.0,), _BEAM),
    "priority": ((0,), "requests are served first come, first served in this version"),
    "truncate_prompt_tokens": ((), "prompts are never truncated here; shorten the prompt"),
    "truncation_side": ((), "prompts are never truncated here"),
    "logprob_token_ids": ((), "logprobs of chosen tokens come in a later version; use top_logprobs"),
    "thinking_token_budget": ((), "reasoning control comes in a later version"),
    "repetition_detection": ((), "repetition detection comes in a later version"),
    "kv_transfer_params": ((), "KV transfer comes in a later version"),
    "vllm_xargs": ((), "extension arguments of vLLM have no meaning here"),
    "mm_processor_kwargs": ((), "the server takes text only"),
    "store": ((False,), _STORAGE),
    "metadata": ((), _STORAGE),
    "service_tier": (("auto", "default"), "there is one service tier"),
}

CHAT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **_SHARED,
    "tools": ((), _TOOLS),
    "tool_choice": (("none",), _TOOLS),
    "parallel_tool_calls": ((), _TOOLS),
    "functions": ((), _TOOLS),
    "function_call": (("none",), _TOOLS),
    "best_of": ((), "best_of belongs to /v1/completions"),
    "echo": ((False,), "echo belongs to /v1/completions"),
    "include_reasoning": ((True,), "reasoning parsers come in a later version"),
    "reasoning_effort": ((), "pass what the chat template understands in chat_template_kwargs"),
    "modalities": ((["text"],), _AUDIO),
    "audio": ((), _AUDIO),
    "prediction": ((), "predicted outputs are not supported"),
    "verbosity": ((), "say it in the messages"),
    "web_search_options": ((), "the server has no web access"),
    "prompt_cache_key": ((), "prefixes are cached by their content; cache_salt keeps callers apart"),
    "safety_identifier": ((), _STORAGE),
}

COMPLETION: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **_SHARED,
    "suffix": (("",), "insertion is not supported: the models of this version only continue a text"),
    "best_of": ((), "best_of comes in a later version; ask for n completions and choose"),
    "prompt_embeds": ((), "embeddings as prompts come in a later version"),
}


def refuse_unsupported(content: Any, table: Mapping[str, tuple[tuple[Any, ...], str]]) -> Any:
    """A copy of the request without the fields of `table`; APIError 400 when one of them asks for something."""
    if not isinstance(content, dict):
        return content
    for name in content.keys() & table.keys():
        inert, reason = table[name]
        value = content[name]
        if value is not None and not any(value == item and type(value) is type(item) for item in inert):
            hint = f" or {' or '.join(map(repr, inert))}" if inert else ""
            raise bad_request(f"{name} is not supported: {reason}; accepted is leaving it out{hint}", name)
    return {name: value for name, value in content.items() if name not in table}
