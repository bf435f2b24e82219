from __future__ import annotations

import numpy as np
import pytest
from trivet.runtime.outputs import FinishReason
from trivet.runtime.request import Request, RequestStatus
from trivet.runtime.sampling_params import SamplingParams


def test_token_views_agree_while_the_buffer_grows() -> None:
    request = Request("r", [5, 6, 7], SamplingParams())
    for token in range(500):
        request.append_output_token_ids(token)
    request.append_output_token_ids([1, 2])
    assert request.num_tokens == 505 and request.num_output_tokens == 502
    assert request.token_ids_np.dtype == np.int32
    assert request.token_ids_np.tolist() == list(request.all_token_ids) == [5, 6, 7, *request.output_token_ids]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="'r': the prompt has no tokens"):
        Request("r", [], SamplingParams())


def test_every_final_status_has_a_reason() -> None:
    reasons = {status.name: status.finish_reason for status in RequestStatus if status.is_finished}
    assert reasons == {
        "FINISHED_STOPPED": FinishReason.STOP,
        "FINISHED_LENGTH_CAPPED": FinishReason.LENGTH,
        "FINISHED_ABORTED": FinishReason.ABORT,
        "FINISHED_ERROR": FinishReason.ERROR,
    }
    assert RequestStatus.PREEMPTED.finish_reason is None
