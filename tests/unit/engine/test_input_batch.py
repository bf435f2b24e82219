"""InputBatch: a step that repeats the last one has the inputs that a batch without a past builds for it."""

from __future__ import annotations

import numpy as np
from trivet import SamplingParams
from trivet.runtime.request import Request
from trivet.runtime.runner.input_batch import BatchInputs, InputBatch
from trivet.runtime.scheduler.output import ScheduledRequest, SchedulerOutput

BLOCK_SIZE = 4


def new_batch() -> InputBatch:
    return InputBatch(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64, block_size=BLOCK_SIZE, vocab_size=99)


def request_of(request_id: str, prompt: list[int], **params: float) -> Request:
    return Request(request_id, prompt, SamplingParams(temperature=0, seed=3, **params))  # type: ignore[arg-type]


def step_of(*scheduled: tuple[Request, int, list[int]], preempted: tuple[str, ...] = ()) -> SchedulerOutput:
    """Each: a request, its tokens of the step (its last ones), its blocks."""
    items = [ScheduledRequest(r, r.num_tokens - count, count, blocks) for r, count, blocks in scheduled]
    counts = {item.request.request_id: item.num_scheduled_tokens for item in items}
    return SchedulerOutput(
        scheduled=items,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_new_req_ids=[],
        scheduled_resumed_req_ids=[],
        scheduled_running_req_ids=[],
        preempted_req_ids=list(preempted),
        finished_req_ids=set(),
        block_copies=[],
    )


def build(batch: InputBatch, step: SchedulerOutput) -> BatchInputs:
    """The inputs, which must be those of a new batch."""
    batch.forget(step)
    inputs, expected = batch.build(step), new_batch().build(step)
    assert inputs.rows == expected.rows
    assert inputs.errors == expected.errors
    assert inputs.arrays.keys() == expected.arrays.keys()
    for name, array in inputs.arrays.items():
        np.testing.assert_array_equal(array, expected.arrays[name], err_msg=name)
    return inputs


def test_steps_of_one_token_are_repeated_until_a_block_is_added() -> None:
    batch, first, second = new_batch(), request_of("a", [5, 6, 7, 8, 9]), request_of("b", [1, 2])
    last = build(batch, step_of((first, 5, [2, 4]), (second, 2, [3])))
    repeated = []
    for token in range(20, 40):
        first.append_output_token_ids(token)
        second.append_output_token_ids(token + 30)
        blocks = [range(i, 30, 2)[: -(-r.num_tokens // BLOCK_SIZE)] for i, r in ((2, first), (3, second))]
        inputs = build(batch, step_of((first, 1, list(blocks[0])), (second, 1, list(blocks[1]))))
        repeated.append(inputs.arrays is last.arrays)
        last = inputs
    assert repeated == [False, True, False, False] + [True, True, False, False] * 4


def test_rows_with_lists_are_built_anew() -> None:
    batch, request = new_batch(), request_of("a", [5, 6], repetition_penalty=1.5)
    for token in (7, 8, 9):
        build(batch, step_of((request, 1, [2, 3])))
        request.append_output_token_ids(token)


def test_what_a_request_had_before_its_preemption_is_forgotten() -> None:
    batch, request = new_batch(), request_of("a", [5, 6, 7])
    for token in (8, 9):
        build(batch, step_of((request, 1, [2, 3])))
        request.append_output_token_ids(token)
    batch.forget(step_of(preempted=("a",)))
    build(batch, step_of((request, 1, [7, 8])))
