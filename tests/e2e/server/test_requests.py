"""What requests may say: honoured or refused by name, never dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import MAX_MODEL_LEN, REPLY, FakeEngine
from trivet.app.server.openai.requests import ChatCompletionRequest, CompletionRequest
from trivet.app.server.openai.unsupported import CHAT, COMPLETION

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CLIENT = httpx.Client(timeout=30)  # one: making a client costs a tenth of a second
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"


def post(server: Any, path: str, **body: Any) -> httpx.Response:
    base = HELLO if path == CHAT_PATH else {"prompt": "a"}
    return CLIENT.post(server.url + path, json={**base, **body})


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    return error


def test_sampling_fields_reach_the_engine(server: Any) -> None:
    sampling = {
        "frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5, "temperature": 0.7, "top_p": 0.9,
        "top_k": 7, "min_p": 0.1, "seed": 3, "stop": ["x", "yy"], "stop_token_ids": [5], "min_tokens": 2,
        "include_stop_str_in_output": True, "ignore_eos": True, "max_tokens": 9, "allowed_token_ids": [1, 2],
        "bad_words": ["bad"], "skip_special_tokens": False, "spaces_between_special_tokens": False, "n": 2,
    }  # fmt: skip
    for path in (CHAT_PATH, COMPLETION_PATH):
        assert post(server, path, **sampling, logit_bias={"4": 2.0}, cache_salt="salt", user="me").status_code == 200
        call = server.engine.calls[-1]
        assert {name: getattr(call["params"], name) for name in sampling} == sampling
        assert call["params"].logit_bias == {4: 2.0} and call["cache_salt"] == "salt"


def test_every_field_of_the_schemas_is_read() -> None:
    """Guards against a field that is accepted and then forgotten: each is named somewhere in the handlers."""
    from pathlib import Path

    import trivet.app.server.openai as package

    folder = Path(package.__file__).parent
    source = "\n".join((folder / f"{name}.py").read_text() for name in ("chat", "completions", "sampling", "service"))
    source += (folder.parent / "app.py").read_text()
    unused = {"user"}
    for model in (ChatCompletionRequest, CompletionRequest):
        assert {name for name in model.model_fields if f".{name}" not in source and f'"{name}"' not in source} == unused


@pytest.mark.parametrize(("path", "table"), [(CHAT_PATH, CHAT), (COMPLETION_PATH, COMPLETION)])
def test_unsupported_fields_are_refused_by_name(server: Any, path: str, table: Any) -> None:
    for name, (inert, _) in table.items():
        error = refused(post(server, path, **{name: {"some": "thing"}}))
        assert name in error["message"] and error["param"] == name
        for value in (None, *inert):
            assert post(server, path, **{name: value}).status_code == 200, name


def test_empty_tools_are_refused(server: Any) -> None:
    assert refused(post(server, CHAT_PATH, tools=[]))["param"] == "tools"


def test_unknown_fields_are_refused_by_name(server: Any) -> None:
    assert "'temprature'" in refused(post(server, CHAT_PATH, temprature=1))["message"]
    nested = {"messages": [{"role": "user", "content": "x", "wrong": 1}]}
    assert "messages.0.wrong" in refused(post(server, CHAT_PATH, **nested))["message"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", "hot", "temperature"),
        ("temperature", 2.5, "in [0, 2]"),
        ("temperature", -1, "temperature"),
        ("temperature", True, "temperature"),
        ("top_p", 0, "top_p"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", -3, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("max_tokens", MAX_MODEL_LEN, "maximum context length is 256 tokens"),
        ("n", 0, "n must be"),
        ("n", "2", "n:"),
        ("stop", "", "empty string"),
        ("stop", [1], "stop"),
        ("logit_bias", {"a": 1}, "logit_bias"),
        ("logit_bias", {"1": "x"}, "logit_bias"),
        ("seed", 2**70, "seed"),
        ("stream", "yes", "stream"),
        ("stream_options", {"include_usage": True}, "Stream options can only be defined when `stream=True`."),
        ("stream_options", {"wrong": True}, "stream_options.wrong"),
        ("cache_salt", "", "cache_salt"),
        ("model", 3, "model"),
    ],
)
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
def test_bad_values(server: Any, path: str, field: str, value: Any, says: str) -> None:
    assert says in refused(post(server, path, **{field: value}))["message"]


@pytest.mark.parametrize("field", ["documents", "chat_template_kwargs"])
def test_deep_template_variables_are_refused(server: Any, field: str) -> None:
    deep: Any = 1
    for _ in range(500):
        deep = {"a": deep}
    body = {field: [deep] if field == "documents" else deep}
    assert "nested deeper than 100 levels" in refused(post(server, CHAT_PATH, **body))["message"]


def test_template_variables_may_have_any_name_but_the_conversation_s(server: Any) -> None:
    names = {"self": 1, "range": 2, "namespace": 3, "a b": 4, "": 5}
    assert post(server, CHAT_PATH, chat_template_kwargs=names).status_code == 200


def test_prompts_times_n_is_bounded(server: Any) -> None:
    body = {"prompt": ["a"] * 1024, "n": 64, "temperature": 1.0}
    assert "1024 prompts with n=64" in refused(post(server, COMPLETION_PATH, **body))["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({}, "'messages' is missing"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({**HELLO, "top_logprobs": 2}, "logprobs"),
        ({**HELLO, "add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({**HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({**HELLO, "chat_template": "x"}, "--trust-request-chat-template"),
        ({**HELLO, "chat_template_kwargs": {"chat_template": "x"}}, "--trust-request-chat-template"),
        ({**HELLO, "chat_template_kwargs": {"messages": []}}, "messages"),
        ({**HELLO, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "maximum context length is 256 tokens"),
        ({"messages": [{"role": "user", "content": "x" * 50_000}]}, "bytes"),
    ],
)
def test_bad_chats(server: Any, body: Any, says: str) -> None:
    assert says in refused(CLIENT.post(server.url + CHAT_PATH, json=body))["message"]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        ([], "empty list"),
        ([[]], "empty"),
        (["a"] * 1025, "at most 1024"),
        ([1, 258], "258"),
        ([1, -1], "-1"),
        (["a", 1], "prompt"),
        (None, "prompt"),
        ({"a": 1}, "prompt"),
        ("x" * MAX_MODEL_LEN, "maximum context length is 256 tokens"),
        ("x" * 50_000, "bytes"),
        ("\ud800", "surrogate"),
    ],
)
def test_bad_prompts(server: Any, prompt: Any, says: str) -> None:
    body = json.dumps({"prompt": prompt}).encode()
    response = CLIENT.post(server.url + COMPLETION_PATH, content=body, headers={"Content-Type": "application/json"})
    assert says in refused(response)["message"]


def test_continuation_and_template_variables(server: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert CLIENT.post(server.url + CHAT_PATH, json=body).status_code == 200
    decode = server.engine.tokenizer.decode
    assert decode(server.engine.calls[-1]["prompt"], skip_special_tokens=False).endswith("<|im_start|>assistant\nWell,")
    assert post(server, CHAT_PATH, chat_template_kwargs={"suffix": "!!"}).status_code == 200
    assert decode(server.engine.calls[-1]["prompt"]).endswith("!!")


def test_default_template_kwargs_and_trusted_templates(start_server: Callable[..., Any]) -> None:
    server = start_server(default_chat_template_kwargs={"suffix": "??"}, trust_request_chat_template=True)
    decode = server.engine.tokenizer.decode
    post(server, CHAT_PATH)
    assert decode(server.engine.calls[-1]["prompt"]).endswith("??")
    post(server, CHAT_PATH, chat_template_kwargs={"suffix": "!!"})
    assert decode(server.engine.calls[-1]["prompt"]).endswith("!!")
    post(server, CHAT_PATH, chat_template="T{{ messages[0].content }}")
    assert decode(server.engine.calls[-1]["prompt"]) == "THello"
    assert "not valid Jinja" in refused(post(server, CHAT_PATH, chat_template="{% if %}"))["message"]


def test_no_chat_template_is_a_400(start_server: Callable[..., Any]) -> None:
    server = start_server(FakeEngine(chat_template=None))
    assert "no chat template" in refused(post(server, CHAT_PATH))["message"]
    assert post(server, COMPLETION_PATH).status_code == 200
    assert post(start_server(FakeEngine(chat_template=None), chat_template="{{ 1 }}"), CHAT_PATH).status_code == 200


def test_token_ids_in_answers(server: Any) -> None:
    answer = post(server, CHAT_PATH, return_token_ids=True, max_tokens=2).json()
    assert answer["prompt_token_ids"] == server.engine.calls[-1]["prompt"]
    assert server.engine.tokenizer.decode(answer["choices"][0]["token_ids"]) == "Gr"
    answer = post(server, COMPLETION_PATH, logprobs=1, return_tokens_as_token_ids=True, max_tokens=1).json()
    assert answer["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
    assert "token_ids" not in answer["choices"][0]


def test_request_id(server: Any) -> None:
    assert post(server, CHAT_PATH, request_id="mine").json()["id"] == "chatcmpl-mine"
    assert post(server, COMPLETION_PATH, request_id="mine").json()["id"] == "cmpl-mine"
    assert server.engine.calls[0]["id"] != server.engine.calls[1]["id"]


def test_prompt_logprobs(server: Any) -> None:
    answer = post(server, CHAT_PATH, prompt_logprobs=1).json()
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert post(server, CHAT_PATH).json()["prompt_logprobs"] is None


def test_forced_usage_and_prompt_details(start_server: Callable[..., Any]) -> None:
    server = start_server(enable_force_include_usage=True, enable_prompt_tokens_details=True)
    with CLIENT.stream("POST", server.url + CHAT_PATH, json={**HELLO, "stream": True}) as response:
        payloads = [line[6:] for line in response.iter_lines() if line]
    chunks = [json.loads(payload) for payload in payloads[:-1]]
    assert payloads[-1] == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == len(REPLY.encode())
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_continuous_usage_needs_include_usage(server: Any) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    for path in (CHAT_PATH, COMPLETION_PATH):
        text = post(server, path, stream=True, stream_options=options).text
        assert '"usage"' not in text and text.endswith("data: [DONE]\n\n")
        text = post(server, path, stream=True, stream_options={**options, "include_usage": True}).text
        assert text.count('"usage":{') == text.count("data: {")
