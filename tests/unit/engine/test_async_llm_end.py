"""How an AsyncLLM ends: a failing step, shutdown, ^C, event loops that come and go; and that it rests meanwhile."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
import types
from typing import Any

import pytest
from trivet import AsyncLLM, RequestOutput
from trivet.runtime.errors import EngineDeadError

from .async_driver import PROMPTS, collect, greedy, idle, run, slowly


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
