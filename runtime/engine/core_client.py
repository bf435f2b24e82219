"""How callers reach an EngineCore: in their own thread (LLM) or through queues to a thread of its own (AsyncLLM)."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from ..._log import get_logger
from ..errors import EngineDeadError
from ..interrupts import uninterrupted
from ..outputs import FinishReason
from ..scheduler.output import EngineCoreOutput, EngineCoreOutputs

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

    from .core import EngineCore, EngineStats
    from .messages import EngineCoreRequest

logger = get_logger(__name__)

ENGINE_CORE_DEAD: Final = "ENGINE_CORE_DEAD"
_SHUT_DOWN: Final = "the engine was shut down; make a new one to go on"
_JOIN_SECONDS: Final = 60.0  # no step takes this long, and on the CPU it is cut short


def engine_dead_error(cause: BaseException) -> EngineDeadError:
    """The error of every pending and future request."""
    error = EngineDeadError(
        f"{ENGINE_CORE_DEAD}: the engine stopped after {type(cause).__name__}: {cause}. "
        "Its requests are lost; make a new engine, or restart the server, to go on"
    )
    error.__cause__ = cause
    return error


class InprocClient:
    """The core in the caller's thread: a step runs when outputs are asked for. Other threads may shut it down."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._lock = threading.RLock()  # again by a signal handler of the program, between two lines of a step
        self.dead_error: EngineDeadError | None = None

    @property
    def stats(self) -> EngineStats:
        return self._core.stats

    def add_request(self, request: EngineCoreRequest) -> None:
        with self._lock:
            self._check()
            self._core.add_request(request)

    def abort_requests(self, request_ids: list[str] | None) -> None:
        with self._lock:
            if self.dead_error is None:
                self._core.abort_requests(request_ids)

    def get_outputs(self) -> EngineCoreOutputs:
        """Run one step. EngineDeadError if it, or an earlier one, failed.

        What is no Exception (raised by a signal handler of the program) ends the engine, too, unchanged.
        """
        with self._lock:
            self._check()
            try:
                return self._core.step()
            except BaseException as exc:
                self.dead_error = self.dead_error or engine_dead_error(exc)  # a shutdown interrupts the step
                if isinstance(exc, Exception):
                    raise self.dead_error from exc
                raise

    def finish_step(self) -> None:
        """Let the core tell the runner about ended requests, when nothing else will. Nothing happens if it is dead."""
        while self.dead_error is None and self._core.has_requests() and not self._core.has_unfinished_requests():
            self.get_outputs()

    def reset_prefix_cache(self) -> bool:
        with self._lock:
            self._check()
            return self._core.reset_prefix_cache()

    def shutdown(self) -> None:
        """Free the model; a step of another thread is cut short first."""
        if self.dead_error is None:
            self.dead_error = EngineDeadError(_SHUT_DOWN)
        self._core.interrupt()
        if self._lock.acquire(timeout=_JOIN_SECONDS):  # a forked process may have inherited it, never to be released
            try:
                self._core.close()
            finally:
                self._lock.release()

    def _check(self) -> None:
        if self.dead_error is not None:
            raise self.dead_error


class Command(Enum):
    ADD = auto()  # payload: EngineCoreRequest
    ABORT = auto()  # payload: list of request ids, None = all
    UTILITY = auto()  # payload: (function of the core, Future of its result)
    WAKEUP = auto()  # look at the stop flag


class OutputQueue:
    """From the engine's thread to an event loop: a queue whose consumer is called on the loop, once per backlog."""

    def __init__(self) -> None:
        self._items: deque[EngineCoreOutputs | EngineDeadError] = deque()
        self._wakeup_pending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._consumer: weakref.WeakMethod[Callable[[EngineCoreOutputs | EngineDeadError], None]] | None = None

    def bind(
        self, loop: asyncio.AbstractEventLoop, consumer: Callable[[EngineCoreOutputs | EngineDeadError], None]
    ) -> None:
        """Deliver to `consumer`, a bound method that is held weakly, on `loop` from now on."""
        self._consumer = weakref.WeakMethod(consumer)
        self._items.clear()
        self._wakeup_pending = False
        self._loop = loop

    def put(self, item: EngineCoreOutputs | EngineDeadError) -> bool:
        """Called by the engine's thread. False: there is no open loop, nobody listens."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return False
        self._items.append(item)
        if not self._wakeup_pending:
            self._wakeup_pending = True
            try:
                loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # closed since we looked
                return False
        return True

    def wake(self) -> None:
        """On the loop's thread: deliver what waits. A ^C may have ended the loop with the callback that was to."""
        if self._loop is not None:
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._wakeup_pending = False  # before the queue is emptied: an item that comes later wakes us again
        consumer = None if self._consumer is None else self._consumer()
        while self._items:
            item = self._items.popleft()
            if consumer is not None:
                consumer(item)


class ThreadedClient:
    """The core on its own thread. Methods may be called from any thread and do not wait for a step (but for `call`)."""

    def __init__(self, core: EngineCore, output_queue: OutputQueue) -> None:
        self._core = core
        self._worker = _Worker(core, output_queue)
        self._thread = threading.Thread(target=self._worker.run, name="trivet-engine-core", daemon=True)
        self._thread.start()

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._worker.dead_error

    @property
    def stats(self) -> EngineStats:
        return self._core.stats

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def add_request(self, request: EngineCoreRequest) -> None:
        self._worker.inputs.put((Command.ADD, request))

    def abort_requests(self, request_ids: list[str] | None) -> None:
        self._worker.inputs.put((Command.ABORT, request_ids))

    def call(self, function: Callable[[EngineCore], Any]) -> Any:
        """Run `function` on the engine's thread between two steps and wait for its result."""
        from concurrent.futures import Future  # a start is faster without

        future: Future[Any] = Future()
        self._worker.inputs.put((Command.UTILITY, (function, future)))
        if self._worker.stopped.is_set():  # nobody may be left to take it from the queue
            self._worker.fail_utilities()
        return future.result()

    def shutdown(self, *, drain: bool = False) -> None:
        """End the thread: after the unfinished requests (drain), or within a step. Frees the model. Idempotent."""
        self._worker.stop(drain=drain)
        if self._thread is threading.current_thread() or not self._thread.is_alive():
            return
        # Not join() alone: one that is interrupted takes the thread for ended (CPython 3.11), and the next returns.
        if drain:
            self._worker.ended.wait()
        with uninterrupted():
            self._worker.ended.wait(_JOIN_SECONDS)
            self._thread.join(_JOIN_SECONDS)


class _Worker:
    """The engine's thread. Holds no reference to its client, so that a forgotten client can be collected."""

    def __init__(self, core: EngineCore, outputs: OutputQueue) -> None:
        self.inputs: SimpleQueue[tuple[Command, Any]] = SimpleQueue()
        self.dead_error: EngineDeadError | None = None
        self.stopped = threading.Event()
        self.ended = threading.Event()  # nothing is left to do, the model is free
        self._core = core
        self._outputs = outputs
        self._stopping = False
        self._draining = False

    def stop(self, *, drain: bool) -> None:
        self._draining = drain
        self._stopping = True
        if not drain:
            self._core.interrupt()
        self.inputs.put((Command.WAKEUP, None))

    def run(self) -> None:
        try:
            while self._take_inputs():
                outputs = self._core.step()
                if outputs.outputs and not self._outputs.put(outputs):
                    self._core.abort_requests(None)
            self.dead_error = EngineDeadError(_SHUT_DOWN)
        except BaseException as exc:
            if self._stopping and not self._draining:  # the step was interrupted
                self.dead_error = EngineDeadError(_SHUT_DOWN)
            else:
                logger.exception("%s", ENGINE_CORE_DEAD)
                self.dead_error = engine_dead_error(exc)
        self._outputs.put(self.dead_error)
        self.stopped.set()
        self.fail_utilities()
        try:
            self._core.close()
        except Exception:
            logger.exception("closing the model failed")
        finally:
            self.ended.set()

    def _take_inputs(self) -> bool:
        """Handle what has come; sleep while there is nothing to compute. False: the thread has to end."""
        while True:
            if self._stopping and not (self._draining and self._core.has_unfinished_requests()):
                return False
            try:
                command, payload = self.inputs.get(block=not self._core.has_requests())
            except Empty:
                return True
            self._handle(command, payload)

    def _handle(self, command: Command, payload: Any) -> None:
        if command is Command.ADD:
            self._add(payload)
        elif command is Command.ABORT:
            self._core.abort_requests(payload)
        elif command is Command.UTILITY:
            function, future = payload
            try:
                future.set_result(function(self._core))
            except Exception as exc:
                future.set_exception(exc)

    def _add(self, request: EngineCoreRequest) -> None:
        """One request that the scheduler refuses fails alone."""
        try:
            self._core.add_request(request)
        except Exception as exc:
            failed = EngineCoreOutput(request.request_id, [], FinishReason.ERROR, error=f"{type(exc).__name__}: {exc}")
            self._outputs.put(EngineCoreOutputs([failed], self._core.stats.scheduler, time.monotonic()))

    def fail_utilities(self) -> None:
        """Answer the calls that the thread did not live to take."""
        while True:
            try:
                command, payload = self.inputs.get_nowait()
            except Empty:
                return
            if command is Command.UTILITY:
                payload[1].set_exception(self.dead_error)
