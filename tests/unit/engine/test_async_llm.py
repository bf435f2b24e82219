"""Requests to AsyncLLM on the toy model: concurrency, aborts, slow consumers, refusals."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import types

import pytest
from trivet import LLM, AsyncLLM, SamplingParams
from trivet.runtime.errors import InvalidRequestError
from trivet.runtime.sampling_params import RequestOutputKind

from .async_driver import PROMPTS, collect, greedy, idle, run


def test_concurrent_requests_give_what_llm_gives(package: str, toy: types.SimpleNamespace) -> None:
    async def use(engine: AsyncLLM) -> None:
        results = await asyncio.gather(*(collect(engine, p, greedy(20), str(i)) for i, p in enumerate(PROMPTS)))
        for i, (outputs, prompt) in enumerate(zip(results, PROMPTS, strict=True)):
            assert [t for o in outputs for t in o.outputs[0].token_ids] == toy.greedy(prompt, 20)
            assert {o.request_id for o in outputs} == {str(i)}
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
            assert outputs[-1].outputs[0].finish_reason == "length"

    run(package, use, max_num_batched_tokens=32, max_num_seqs=8)
    assert threading.get_ident() not in toy.Session.instances[0].threads
    with LLM(package) as llm:
        texts = [o.outputs[0].text for o in llm.generate(PROMPTS, greedy(20))]

    async def same_texts(engine: AsyncLLM) -> None:
        for kind in RequestOutputKind:
            results = await asyncio.gather(
                *(collect(engine, p, greedy(20, kind), str(i)) for i, p in enumerate(PROMPTS))
            )
            if kind is RequestOutputKind.DELTA:
                assert ["".join(o.outputs[0].text for o in outputs) for outputs in results] == texts
            else:
                assert [outputs[-1].outputs[0].text for outputs in results] == texts
            if kind is RequestOutputKind.FINAL_ONLY:
                assert {len(outputs) for outputs in results} == {1}

    run(package, same_texts)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_n_completions_are_put_together(package: str, kind: RequestOutputKind) -> None:
    params = SamplingParams(n=3, temperature=1, seed=5, max_tokens=8, ignore_eos=True, output_kind=kind)
    with LLM(package) as llm:
        expected = [c.token_ids for c in llm.generate("abc", params)[0].outputs]

    async def use(engine: AsyncLLM) -> None:
        outputs = await collect(engine, "abc", params, "parent")
        got: list[list[int]] = [[], [], []]
        for output in outputs:
            for c in output.outputs:
                got[c.index] = got[c.index] + c.token_ids if kind is RequestOutputKind.DELTA else c.token_ids
        assert got == expected
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]

    run(package, use)


def test_a_slow_consumer_gets_merged_deltas(package: str, toy: types.SimpleNamespace) -> None:
    async def use(engine: AsyncLLM) -> None:
        outputs = []
        async for output in engine.generate(PROMPTS[3], greedy(60, logprobs=1), "slow"):
            outputs.append(output)
            await asyncio.sleep(0.02)
        assert len(outputs) < 60
        completions = [o.outputs[0] for o in outputs]
        assert [t for c in completions for t in c.token_ids] == toy.greedy(PROMPTS[3], 60)
        assert "".join(c.text for c in completions) == bytes(toy.greedy(PROMPTS[3], 60)).decode()
        assert [len(c.logprobs or []) for c in completions] == [len(c.token_ids) for c in completions]
        assert max(len(c.token_ids) for c in completions) > 1

    run(package, use)


def test_leaving_the_loop_aborts_within_a_step(package: str, toy: types.SimpleNamespace) -> None:
    async def use(engine: AsyncLLM) -> None:
        stream = engine.generate(PROMPTS[0], greedy(400), "left")
        await anext(stream)
        await stream.aclose()
        steps = engine.get_stats()["num_steps"]
        await idle(engine)
        assert engine.get_stats()["num_steps"] <= steps + 3

        task = asyncio.create_task(collect(engine, PROMPTS[0], greedy(400), "cancelled"))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(engine)

    run(package, use)


def test_abort_by_id_ends_the_consumer(package: str) -> None:
    async def use(engine: AsyncLLM) -> None:
        params = greedy(400, n=1)
        task = asyncio.create_task(collect(engine, PROMPTS[0], params, "a"))
        await asyncio.sleep(0.02)
        engine.abort(["a", "unknown"])
        outputs = await task
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"

    run(package, use)


def test_an_id_is_free_again_at_once(package: str, toy: types.SimpleNamespace) -> None:
    """Outputs of the aborted request that are still on their way must not reach the next one of that name."""

    async def use(engine: AsyncLLM) -> None:
        for turn in range(len(PROMPTS)):
            await anext(engine.generate(PROMPTS[turn], greedy(400), "a"))
            time.sleep(0.003)  # outputs pile up, the loop takes none
            engine.abort("a")
            outputs = await collect(engine, PROMPTS[turn], greedy(10), "a")
            assert [t for o in outputs for t in o.outputs[0].token_ids] == toy.greedy(PROMPTS[turn], 10)

    run(package, use)


def test_sixty_four_clients_come_and_go(package: str, toy: types.SimpleNamespace) -> None:
    rng = random.Random(0)
    expected = {i: toy.greedy(PROMPTS[i], 30) for i in range(len(PROMPTS))}

    async def client(engine: AsyncLLM, name: int) -> None:
        for turn in range(4):
            which, patience = rng.randrange(len(PROMPTS)), rng.choice([0, 1, 3, 10, 100])
            await asyncio.sleep(rng.random() * 0.05)
            stream, got = engine.generate(PROMPTS[which], greedy(30), f"{name}.{turn}"), []
            async for output in stream:
                got += output.outputs[0].token_ids
                patience -= 1
                if patience <= 0:
                    if rng.random() < 0.5:
                        engine.abort(f"{name}.{turn}")
                    break
            await stream.aclose()
            assert got == expected[which][: len(got)]
            assert patience <= 0 or len(got) == 30

    async def use(engine: AsyncLLM) -> None:
        await asyncio.gather(*(client(engine, name) for name in range(64)))
        assert engine.get_stats()["num_preemptions"] > 0
        await idle(engine)
        await asyncio.sleep(0.02)
        runner = engine._parts.core._runner
        assert runner.num_tracked_requests == 0
        assert engine.reset_prefix_cache()

    run(package, use, block_size=4, num_gpu_blocks_override=120, max_model_len=128, max_num_batched_tokens=64,
        max_num_seqs=32)  # fmt: skip


def test_a_bad_request_harms_nobody(package: str, toy: types.SimpleNamespace) -> None:
    async def use(engine: AsyncLLM) -> None:
        refused = threading.Event()
        toy.Session.before_run = lambda _: refused.wait(30)
        good = asyncio.create_task(collect(engine, PROMPTS[2], greedy(50), "good"))
        await asyncio.sleep(0)  # until it waits for its first output
        with pytest.raises(InvalidRequestError, match="empty"):
            await collect(engine, "", greedy(5), "bad")
        with pytest.raises(InvalidRequestError, match=r"'good' is in use"):
            await collect(engine, "abc", greedy(5), "good")
        refused.set()
        outputs = await good
        assert [t for o in outputs for t in o.outputs[0].token_ids] == toy.greedy(PROMPTS[2], 50)

    run(package, use)


def test_a_request_that_never_fits_fails_alone(package: str) -> None:
    async def use(engine: AsyncLLM) -> None:
        big = asyncio.create_task(collect(engine, list(range(32, 96)), greedy(100), "big"))
        small = await collect(engine, PROMPTS[0], greedy(5), "small")
        assert small[-1].outputs[0].finish_reason == "length"
        outputs = await big
        assert outputs[-1].outputs[0].finish_reason in ("length", "error")

    run(package, use, block_size=4, num_gpu_blocks_override=34, max_model_len=132)
