"""LLM on the toy model: failures, interrupts, shutting down, and checkpoints that change."""

from __future__ import annotations

import os
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from trivet import LLM, SamplingParams
from trivet.runtime.errors import EngineDeadError, ModelLoadError, TrivetError

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[40 + (7 * i + j) % 80 for j in range(3 + 11 * i)] for i in range(8)]  # 3 .. 80 tokens


def test_a_failed_step_kills_this_engine_only(package: str, toy: types.SimpleNamespace) -> None:
    def fail(session: Any) -> None:
        if session is toy.Session.instances[0] and session.num_runs == 3:
            raise RuntimeError("kernel trouble")

    toy.Session.before_run = fail
    with LLM(package) as broken, LLM(package) as well:
        with pytest.raises(EngineDeadError, match=r"ENGINE_CORE_DEAD.*kernel trouble"):
            broken.generate(PROMPTS, GREEDY)
        with pytest.raises(EngineDeadError):
            broken.generate("a")
        assert well.generate(PROMPTS[1], GREEDY)[0].outputs[0].token_ids == toy.greedy(PROMPTS[1], 24)


def test_interrupt_between_steps_leaves_the_engine_usable(package: str, toy: types.SimpleNamespace) -> None:
    import signal

    def interrupt(session: Any) -> None:
        if session.num_runs == 3:
            signal.raise_signal(signal.SIGINT)  # in the middle of a step

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with LLM(package) as llm:
        toy.Session.before_run = interrupt
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
        toy.Session.before_run = None
        assert toy.Session.instances[0].num_runs == 4  # the step went to its end
        assert llm.get_stats()["kv_cache_usage"] == 0
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [toy.greedy(p, 24) for p in PROMPTS]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_within_a_step_ends_the_engine(package: str, toy: types.SimpleNamespace) -> None:
    """The program's own handler raised: the step did not write what the prefix cache counts on."""

    def interrupt(session: Any) -> None:
        raise KeyboardInterrupt

    with LLM(package) as llm:
        toy.Session.before_run = interrupt
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
        toy.Session.before_run = None
        with pytest.raises(EngineDeadError, match=r"ENGINE_CORE_DEAD.*KeyboardInterrupt"):
            llm.generate(PROMPTS, GREEDY)


def test_shutdown_cuts_a_step_of_another_thread_short(package: str, toy: types.SimpleNamespace) -> None:
    """It used to free the memory that the step was computing with."""
    running = threading.Event()
    seen: list[Any] = []

    def wait(session: Any) -> None:
        running.set()
        seen.append((session.interrupted.wait(10), session.closed))

    def ask() -> None:
        with pytest.raises(EngineDeadError, match="was shut down"):
            llm.generate(PROMPTS, GREEDY)
        seen.append("refused")

    toy.Session.before_run = wait
    llm = LLM(package)
    asking = threading.Thread(target=ask)
    asking.start()
    assert running.wait(10)
    llm.shutdown()
    assert toy.Session.instances[0].closed
    asking.join(10)
    assert seen == [(True, False), "refused"]


def test_create_and_destroy_leaves_nothing(package: str, toy: types.SimpleNamespace) -> None:
    threads = threading.active_count()
    for _ in range(20):
        with LLM(package) as llm:
            llm.generate("a", GREEDY)
        with pytest.raises(TrivetError, match="shut down"):
            llm.generate("a")
    llm = LLM(package)
    del llm
    assert threading.active_count() == threads
    assert len(toy.Session.instances) == 21
    assert all(s.closed and s.kv is None for s in toy.Session.instances)


def test_a_checkpoint_replaced_while_the_session_opens_is_refused(
    package: str, toy: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Path(package) / "toy.gguf"
    start = toy.Session.__init__

    def late(session: Any, *args: Any, **kwargs: Any) -> None:
        checkpoint.write_bytes(b"other weights")
        start(session, *args, **kwargs)

    monkeypatch.setattr(toy.Session, "__init__", late)
    with pytest.raises(ModelLoadError, match="has changed since"):
        LLM(package)
    assert toy.Session.instances[-1].closed


def test_a_changed_or_missing_checkpoint_is_refused(package: str) -> None:
    checkpoint = Path(package) / "toy.gguf"
    os.utime(checkpoint, (1, 1))  # touched or copied back: the same bytes still do
    LLM(package).shutdown()
    checkpoint.write_bytes(b"other")
    with pytest.raises(ModelLoadError, match="has changed since"):
        LLM(package)
    checkpoint.unlink()
    with pytest.raises(ModelLoadError, match="cannot be read"):
        LLM(package)
    for text in ("{}", "[1]", "not JSON"):
        (Path(package) / "trivet.json").write_text(text)
        with pytest.raises(ModelLoadError, match="not a model package"):
            LLM(package)
    (Path(package) / "trivet.json").write_text('{"schema_version": 1}')  # its graph has other inputs of ops
    with pytest.raises(
        ModelLoadError, match=r"schema_version 1, this trivet reads 2\): make it anew with `trivet export`"
    ):
        LLM(package)
