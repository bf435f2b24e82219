"""The official client against our server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from fake_engine import MAX_MODEL_LEN, REPLY, FakeEngine

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)


def test_chat(client: openai.OpenAI, server: Any) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "fake"
    choice = answer.choices[0]
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", REPLY)
    assert choice.finish_reason == "stop" and choice.logprobs is None
    prompt = server.engine.calls[0]["prompt"]
    rendered = server.engine.tokenizer.decode(prompt, skip_special_tokens=False)
    assert rendered == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(REPLY.encode())
    assert answer.usage.total_tokens == len(prompt) + len(REPLY.encode())
    # the default of a chat is what the context leaves
    assert server.engine.calls[0]["params"].max_tokens == MAX_MODEL_LEN - len(prompt)


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == REPLY
    assert not any("�" in text for text in texts)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert chunks[-1].choices == [] and usage is not None and usage.completion_tokens == len(REPLY.encode())
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat_async(server: Any) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="EMPTY") as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(model="fake", messages=HELLO) for _ in range(20))
            )
            stream = await client.chat.completions.create(model="fake", messages=HELLO, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return [str(a.choices[0].message.content) for a in answers] + ["".join(pieces)]

    assert asyncio.run(ask()) == [REPLY] * 21


def test_completion(client: openai.OpenAI, server: Any) -> None:
    answer = client.completions.create(model="fake", prompt="Once", max_tokens=5)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    assert answer.choices[0].text == REPLY.encode()[:5].decode(errors="replace")
    assert answer.choices[0].finish_reason == "length"
    assert server.engine.tokenizer.decode(server.engine.calls[0]["prompt"]) == "Once"
    client.completions.create(model="fake", prompt="Once")
    assert server.engine.calls[1]["params"].max_tokens == 16


@pytest.mark.parametrize("prompt", [["a", "bc"], [[64], [65, 66]], [64, 65]])
def test_completion_prompts(client: openai.OpenAI, server: Any, prompt: Any) -> None:
    answer = client.completions.create(model="fake", prompt=prompt, n=2, max_tokens=3, temperature=1)
    count = 1 if isinstance(prompt[0], int) else len(prompt)
    assert [choice.index for choice in answer.choices] == list(range(2 * count))
    assert answer.usage is not None and answer.usage.completion_tokens == 3 * 2 * count
    assert len(server.engine.calls) == count


def test_completion_stream_of_several_prompts(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="fake", prompt=["a", "b"], stream=True, max_tokens=40, n=2)
    texts = dict.fromkeys(range(4), "")
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [REPLY] * 4


def test_echo_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="ab", echo=True, logprobs=2, max_tokens=2)
    choice = answer.choices[0]
    assert choice.text == "ab" + "Gr" and choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "G", "r"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    only = client.completions.create(model="fake", prompt="ab", echo=True, max_tokens=0)
    assert only.choices[0].text == "ab" and only.usage is not None and only.usage.completion_tokens == 0


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO, logprobs=True, top_logprobs=3, max_tokens=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["G", "r"]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [3, 3]
    assert logprobs.content[0].bytes == [71]


def test_models(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [(m.id, m.object, m.owned_by) for m in models] == [("fake", "model", "trivet")]
    extra: Any = models[0]
    assert extra.max_model_len == MAX_MODEL_LEN and extra.root == "fake" and extra.parent is None
    assert client.models.retrieve("fake") == models[0]
    with pytest.raises(openai.NotFoundError, match="The model `other/one` does not exist"):
        client.models.retrieve("other/one")


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="other", messages=HELLO)
    assert not_found.value.body == {
        "message": "The model `other` does not exist. This server has fake.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    with pytest.raises(openai.BadRequestError, match="in \\[0, 2\\]"):
        client.chat.completions.create(model="fake", messages=HELLO, temperature=3)


def test_api_key(start_server: Callable[..., Any]) -> None:
    server = start_server(api_keys=("secret", "other"))
    for key in ("secret", "other"):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key)
        assert client.chat.completions.create(model="fake", messages=HELLO).choices[0].message.content == REPLY
    with pytest.raises(openai.AuthenticationError) as error:
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").models.list()
    assert error.value.status_code == 401


def test_several_served_names(start_server: Callable[..., Any]) -> None:
    server = start_server(served_model_names=("one", "two"))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    assert [m.id for m in client.models.list()] == ["one", "two"]
    assert client.models.retrieve("two").id == "two"
    assert client.chat.completions.create(model="two", messages=HELLO).model == "two"


def test_warnings_are_reported(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(model="fake", messages=HELLO, temperature=0.001)
    assert "temperature 0.001" in answer.warnings[0]


def test_engine_error_is_a_500(start_server: Callable[..., Any]) -> None:
    engine = FakeEngine()
    engine.fail = "the model gave NaN"
    client = openai.OpenAI(base_url=f"{start_server(engine).url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.InternalServerError, match="the model gave NaN"):
        client.chat.completions.create(model="fake", messages=HELLO)
    with pytest.raises(openai.APIError, match="the model gave NaN"):
        list(client.chat.completions.create(model="fake", messages=HELLO, stream=True))
