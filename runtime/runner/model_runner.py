"""Runs the scheduled tokens of a step through the model graph and maps the sampled rows back to requests.

A model is a session that takes the contract's graph inputs, of whatever shape: no code here may ask what model it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..._log import get_logger
from ...backends.contract.opset import NO_TOKEN
from ...backends.errors import DeviceMemoryError
from ..scheduler.output import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from .input_batch import InputBatch, SampleRow

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = get_logger(__name__)

_TOKENS: Final = ("sampled_token_ids",)
_TOKENS_AND_LOGPROBS: Final = (
    "sampled_token_ids",
    "sampled_logprobs",
    "sampled_ranks",
    "top_token_ids",
    "top_logprobs",
)
_NO_MEMORY: Final = (
    "the device ran out of memory in a step with this request; a later one may succeed. Lower max_num_batched_tokens "
    "or the KV cache (kv_cache_memory_bytes, gpu_memory_utilization) to leave more room"
)
NO_USABLE_LOGITS: Final = (
    "the model computed no usable scores for the next token: one is NaN or infinite, or all are -inf. Either values "
    "of this prompt overflow the type of the KV cache (try kv_cache_dtype float32 or bfloat16), or the checkpoint is "
    "damaged"
)


class GraphSession(Protocol):
    """The part of backends.session.ModelSession that the runner uses."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None: ...

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]: ...


class ModelRunner:
    """One per engine, called by its thread only."""

    def __init__(self, session: GraphSession, batch: InputBatch) -> None:
        self._session = session
        self._batch = batch

    @property
    def num_tracked_requests(self) -> int:
        return len(self._batch.states)

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. A step without tokens never runs the graph; one without memory fails its requests alone."""
        self._batch.forget(scheduler_output)
        if not scheduler_output.scheduled:
            return ModelRunnerOutput(sampled_token_ids={})
        arrays, rows, wants_logprobs, errors = self._batch.build(scheduler_output)
        if scheduler_output.block_copies:
            self._session.copy_blocks(scheduler_output.block_copies)
        try:
            results = self._session.run(arrays, _TOKENS_AND_LOGPROBS if wants_logprobs else _TOKENS)
        except DeviceMemoryError as error:
            logger.error("The requests of a step fail: %s", error)
            failed = dict.fromkeys(scheduler_output.num_scheduled_tokens, f"{_NO_MEMORY}: {error}")
            return ModelRunnerOutput(sampled_token_ids={}, errors=failed, completed=False)
        token_ids: list[int] = results["sampled_token_ids"].tolist()
        for row, token in zip(rows, token_ids, strict=True):
            if token == NO_TOKEN:
                errors.setdefault(row.request_id, NO_USABLE_LOGITS)
        output = ModelRunnerOutput(
            sampled_token_ids={
                row.request_id: [token]
                for row, token in zip(rows, token_ids, strict=True)
                if not row.is_prompt and row.request_id not in errors
            },
            errors=errors,
        )
        if wants_logprobs:
            _add_logprobs(output, rows, token_ids, results)
        return output


def _add_logprobs(
    output: ModelRunnerOutput, rows: list[SampleRow], token_ids: list[int], results: dict[str, NDArray[Any]]
) -> None:
    logprobs, ranks = results["sampled_logprobs"].tolist(), results["sampled_ranks"].tolist()
    for index, row in enumerate(rows):
        if row.num_logprobs < 0:
            continue
        target = output.prompt_logprobs if row.is_prompt else output.logprobs
        target.setdefault(row.request_id, []).append(
            TokenLogprobs(
                token_id=token_ids[index],
                logprob=logprobs[index],
                rank=ranks[index],
                top_token_ids=results["top_token_ids"][index, : row.num_logprobs].tolist(),
                top_logprobs=results["top_logprobs"][index, : row.num_logprobs].tolist(),
            )
        )
