"""EngineCore: the loop of schedule, execute, update. One thread owns it (engine/core_client.py says which)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from ..request import Request, RequestStatus

if TYPE_CHECKING:
    from ..runner.model_runner import ModelRunner
    from ..scheduler.output import EngineCoreOutputs, SchedulerStats
    from ..scheduler.scheduler import Scheduler
    from .messages import EngineCoreRequest


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot that any thread may read. Counters count from the start of the engine."""

    scheduler: SchedulerStats
    num_steps: int
    num_computed_tokens: int  # tokens run through the graph, recomputed ones included
    num_generated_tokens: int


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        close_model: Callable[[], None],
        interrupt_model: Callable[[], None] = lambda: None,
    ) -> None:
        """`close_model` frees weights and KV cache; called once, by close(). `interrupt_model`: see interrupt()."""
        self.interrupt = interrupt_model  # ends the step under way with an exception; from any thread, before close()
        self._scheduler = scheduler
        self._runner = runner
        self._close_model: Callable[[], None] | None = close_model
        self.stats = EngineStats(scheduler.make_stats(), 0, 0, 0)

    def add_request(self, request: EngineCoreRequest) -> None:
        self._scheduler.add_request(
            Request(
                request.request_id,
                request.prompt_token_ids,
                request.sampling_params,
                arrival_time=request.arrival_time,
                priority=request.priority,
                cache_salt=request.cache_salt,
                eos_token_ids=request.sampling_params.eos_token_ids,
            )
        )

    def abort_requests(self, request_ids: Iterable[str] | None) -> None:
        """End requests (None: all) without an output. Their blocks are free when this returns."""
        if self._scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED):
            self._refresh_stats()

    def has_requests(self) -> bool:
        """Whether step() has something to do."""
        return self._scheduler.has_requests()

    def has_unfinished_requests(self) -> bool:
        return self._scheduler.get_num_unfinished_requests() > 0

    def step(self) -> EngineCoreOutputs:
        """One pass of the model over the scheduled tokens. After an exception the engine must not be used again."""
        scheduler_output = self._scheduler.schedule()
        runner_output = self._runner.execute(scheduler_output)
        outputs = self._scheduler.update_from_output(scheduler_output, runner_output)
        old = self.stats
        self.stats = EngineStats(
            outputs.scheduler_stats,
            old.num_steps + 1,
            old.num_computed_tokens + scheduler_output.total_num_scheduled_tokens,
            old.num_generated_tokens + sum(len(output.new_token_ids) for output in outputs.outputs),
        )
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False: requests are running, nothing was done."""
        done = self._scheduler.reset_prefix_cache()
        self._refresh_stats()
        return done

    def close(self) -> None:
        """Abort everything and free the model. Idempotent."""
        close_model, self._close_model = self._close_model, None
        if close_model is not None:
            try:
                self.abort_requests(None)
            finally:
                close_model()

    def _refresh_stats(self) -> None:
        self.stats = msgspec.structs.replace(self.stats, scheduler=self._scheduler.make_stats())
