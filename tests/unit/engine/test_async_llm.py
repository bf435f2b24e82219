"""AsyncLLM on the toy model: concurrency, aborts, slow consumers, death and shutdown of the engine."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import threading
import time
import types
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from trivet import LLM, AsyncLLM, RequestOutput, SamplingParams
from trivet.runtime.errors import EngineDeadError, InvalidRequestError
from trivet.runtime.sampling_params import RequestOutputKind

PROMPTS = [[40 + (7 * i + j) % 80 for j in range(3 + 5 * i)] for i in range(16)]


def greedy(num_tokens: int, kind: RequestOutputKind = RequestOutputKind.DELTA, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=kind, **options)


async def collect(engine: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, request_id)]


def run(package: str, use: Callable[[AsyncLLM], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run `use` with an engine; afterwards nothing may be left in it."""

    async def main() -> None:
        async with AsyncLLM(package, **options) as engine:
            await asyncio.wait_for(use(engine), timeout=60)
            await idle(engine)

    asyncio.run(main())


def slowly(session: Any) -> None:
    """A toy's step, that a busy machine does not get ahead of the test with."""
    time.sleep(0.005)


async def idle(engine: AsyncLLM) -> None:
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and not engine.errored:
        stats = engine.get_stats()
        if not any(stats[k] for k in ("num_requests_running", "num_requests_waiting", "kv_cache_usage")):
            assert engine._output_processor.num_unfinished_requests == 0
            return
        await asyncio.sleep(0.002)
    assert engine.errored, f"requests are left: {engine.get_stats()}"


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


def test_engine_death_reaches_everyone(package: str, toy: types.SimpleNamespace) -> None:
    def fail(session: Any) -> None:
        if session.num_runs == 5:
            raise RuntimeError("kernel trouble")

    async def use(engine: AsyncLLM) -> None:
        toy.Session.before_run = fail
        engine.check_health()
        results = await asyncio.gather(
            *(collect(engine, p, greedy(400), str(i)) for i, p in enumerate(PROMPTS)), return_exceptions=True
        )
        assert all(isinstance(r, EngineDeadError) and "kernel trouble" in str(r) for r in results)
        with pytest.raises(EngineDeadError, match="ENGINE_CORE_DEAD"):
            await collect(engine, "abc", greedy(5), "late")
        with pytest.raises(EngineDeadError):
            engine.check_health()
        with pytest.raises(EngineDeadError):
            engine.reset_prefix_cache()
        assert engine.errored
        assert not engine.is_running
        assert isinstance(engine.dead_error, EngineDeadError)

    run(package, use)
    assert toy.Session.instances[0].closed


def test_a_call_that_death_overtakes_is_answered(package: str, toy: types.SimpleNamespace) -> None:
    in_step, called = threading.Event(), threading.Event()
    answers: list[Exception] = []

    def fail(session: Any) -> None:
        in_step.set()
        called.wait(5)
        time.sleep(0.05)  # the call is in the queue by now
        raise RuntimeError("kernel trouble")

    async def use(engine: AsyncLLM) -> None:
        def call() -> None:
            try:
                engine.reset_prefix_cache()
            except EngineDeadError as error:
                answers.append(error)

        toy.Session.before_run = fail
        request = asyncio.create_task(collect(engine, "abc", greedy(5), "a"))
        await asyncio.to_thread(in_step.wait, 5)
        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        await asyncio.sleep(0.01)
        called.set()
        with pytest.raises(EngineDeadError, match="kernel trouble"):
            await request
        await asyncio.to_thread(caller.join, 5)
        assert [str(answer) for answer in answers] == [str(engine.dead_error)]

    run(package, use)


def test_shutdown_ends_or_drains_requests(package: str, toy: types.SimpleNamespace) -> None:
    async def main(drain: bool) -> list[RequestOutput]:
        engine = AsyncLLM(package)
        task = asyncio.create_task(collect(engine, PROMPTS[0], greedy(100), "a"))
        await asyncio.sleep(0.01)
        if drain:
            await asyncio.to_thread(engine.shutdown, drain=True)
        else:
            engine.shutdown()
        outputs = await asyncio.wait_for(task, 5)
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(engine, "abc", greedy(5), "late")
        return outputs

    threads = threading.active_count()
    drained = asyncio.run(main(drain=True))
    assert [t for o in drained for t in o.outputs[0].token_ids] == toy.greedy(PROMPTS[0], 100)
    toy.Session.before_run = slowly
    assert asyncio.run(main(drain=False))[-1].outputs[0].finish_reason == "abort"
    toy.Session.before_run = None
    for _ in range(20):
        AsyncLLM(package).shutdown()
    assert threading.active_count() <= threads + 1  # asyncio's own executor thread
    forgotten = AsyncLLM(package)
    del forgotten
    gc.collect()
    assert all(s.closed and s.kv is None for s in toy.Session.instances)


def test_one_engine_serves_one_event_loop_after_another(package: str, toy: types.SimpleNamespace) -> None:
    engine = AsyncLLM(package)

    async def leave_behind() -> None:
        await anext(engine.generate(PROMPTS[1], greedy(400), "left"))

    asyncio.run(leave_behind())
    outputs = asyncio.run(collect(engine, PROMPTS[1], greedy(10), "next"))
    assert [t for o in outputs for t in o.outputs[0].token_ids] == toy.greedy(PROMPTS[1], 10)
    asyncio.run(idle(engine))
    engine.shutdown()


def test_requests_of_a_closed_event_loop_are_not_computed_to_the_end(package: str, toy: types.SimpleNamespace) -> None:
    toy.Session.before_run = slowly
    with_engine = AsyncLLM(package)
    loop = asyncio.new_event_loop()
    stream = with_engine.generate(PROMPTS[1], greedy(400), "left")
    loop.run_until_complete(anext(stream))
    loop.close()
    deadline = time.monotonic() + 5
    while with_engine.get_stats()["num_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.002)
    stats = with_engine.get_stats()
    assert stats["kv_cache_usage"] == 0
    assert stats["num_generated_tokens"] < 400
    with_engine.shutdown()


def test_idle_engine_does_not_spin(package: str) -> None:
    async def use(engine: AsyncLLM) -> None:
        await collect(engine, "abc", greedy(5), "a")
        await asyncio.sleep(0.05)
        steps, cpu = engine.get_stats()["num_steps"], time.process_time()
        await asyncio.sleep(0.3)
        assert engine.get_stats()["num_steps"] == steps
        assert time.process_time() - cpu < 0.1

    run(package, use)


def test_shutdown_cuts_a_step_short(package: str, toy: types.SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Quietly: its engine was not broken."""
    running, interrupted = threading.Event(), []

    def wait(session: Any) -> None:
        running.set()
        interrupted.append(session.interrupted.wait(30))

    async def use() -> None:
        engine = AsyncLLM(package)
        answer = asyncio.create_task(collect(engine, PROMPTS[0], greedy(4), "a"))
        while not running.is_set():
            await asyncio.sleep(0.002)
        engine.shutdown()
        assert interrupted == [True]
        assert not engine._client.is_alive and toy.Session.instances[-1].closed
        assert (await answer)[-1].outputs[0].finish_reason == "abort"
        with pytest.raises(EngineDeadError, match="was shut down"):
            engine.check_health()

    toy.Session.before_run = wait
    asyncio.run(use())
    assert not caplog.records


def test_a_shutdown_is_not_interrupted(package: str, toy: types.SimpleNamespace) -> None:
    """As at the end of a process: it must not go away while a step is under way."""
    running, may_end = threading.Event(), threading.Event()

    def wait(session: Any) -> None:
        running.set()
        may_end.wait(10)

    async def use() -> AsyncLLM:
        engine = AsyncLLM(package)
        answer = asyncio.create_task(collect(engine, PROMPTS[0], greedy(4), "a"))
        while not running.is_set():
            await asyncio.sleep(0.002)
        answer.cancel()
        return engine

    toy.Session.before_run = wait
    engine = asyncio.run(use())
    threading.Timer(0.2, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
    threading.Timer(0.6, may_end.set).start()
    with pytest.raises(KeyboardInterrupt):
        engine.shutdown()
    assert may_end.is_set() and toy.Session.instances[-1].closed


def test_a_callback_that_an_interrupt_took_away(package: str, toy: types.SimpleNamespace) -> None:
    """The second ^C of a user ends the loop wherever it is; the session goes on with the same one."""
    engine = AsyncLLM(package)
    queue = engine._output_queue
    drain = queue._drain

    def interrupted() -> None:
        queue._drain = drain  # type: ignore[method-assign]
        raise KeyboardInterrupt

    queue._drain = interrupted  # type: ignore[method-assign]
    with asyncio.Runner() as runner:
        with pytest.raises(KeyboardInterrupt):
            runner.run(collect(engine, PROMPTS[0], greedy(20), "first"))
        outputs = runner.run(asyncio.wait_for(collect(engine, PROMPTS[1], greedy(20), "second"), timeout=20))
        engine.shutdown()
    assert [t for o in outputs for t in o.outputs[0].token_ids] == toy.greedy(PROMPTS[1], 20)
