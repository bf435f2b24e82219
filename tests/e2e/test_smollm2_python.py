"""The Python API on SmolLM2-135M-Instruct: the README's embedding example, and every way to run it gives one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from trivet import LLM, AsyncLLM, SamplingParams
from trivet.runtime.sampling_params import RequestOutputKind

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29,",
    "Grüße aus Zürich! Я люблю",
]
OPTIONS = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(smollm2_path, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[str]:
    """Greedy completions of PROMPTS, each alone."""
    return [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in PROMPTS]


def test_completions_make_sense(texts: list[str]) -> None:
    assert texts[0].startswith(" Paris")
    assert texts[2].startswith(" 30")
    assert "\ufffd" not in "".join(texts)


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM, texts: list[str]) -> None:
    assert [o.outputs[0].text for o in llm.generate(PROMPTS, GREEDY)] == texts


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"num_gpu_blocks_override": 10, "max_model_len": 128},
        {"num_threads": 1, "enable_prefix_caching": False},
    ],
    ids=["chunks_of_7", "preemption", "one_thread"],
)
def test_chunks_preemption_and_threads_change_nothing(
    smollm2_path: Path, texts: list[str], options: dict[str, int]
) -> None:
    with LLM(smollm2_path, **{**OPTIONS, **options}) as other:
        assert [o.outputs[0].text for o in other.generate(PROMPTS, GREEDY)] == texts
        assert (other.get_stats()["num_preemptions"] > 0) == ("num_gpu_blocks_override" in options)


def test_streams_of_async_llm_give_the_same_texts(smollm2_path: Path, texts: list[str]) -> None:
    params = GREEDY.clone(output_kind=RequestOutputKind.DELTA)

    async def text(engine: AsyncLLM, prompt: str) -> str:
        return "".join([o.outputs[0].text async for o in engine.generate(prompt, params)])

    async def main() -> list[str]:
        async with AsyncLLM(str(smollm2_path), **OPTIONS) as engine:
            return await asyncio.gather(*(text(engine, prompt) for prompt in PROMPTS))

    assert asyncio.run(main()) == texts


def test_chat_stops_at_the_end_of_the_turn(llm: LLM) -> None:
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
        SamplingParams(temperature=0, max_tokens=40),
    )
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.prompt is not None
    assert output.prompt.startswith("<|im_start|>system")
    assert output.prompt_token_ids[:2].count(1) == 1  # one <|im_start|>, no second bos


def test_logprobs_agree_between_sampling_and_teacher_forcing(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5)
    output = llm.generate(PROMPTS[0], params)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    whole = [*output.prompt_token_ids, *completion.token_ids]
    forced = llm.generate([whole], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5))[0].prompt_logprobs
    assert forced is not None
    assert forced[-6:] == completion.logprobs


def test_a_seed_gives_the_same_text_again(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12)
    first, second = (llm.generate(PROMPTS[1], params)[0].outputs[0].text for _ in range(2))
    assert first == second
    other = llm.generate(PROMPTS[1], SamplingParams(temperature=1.0, seed=12, max_tokens=12))[0].outputs[0].text
    assert other != first
