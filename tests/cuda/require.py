"""What tests of the CUDA back end need, and the reason for which they are skipped."""

from __future__ import annotations

from typing import Any

import pytest
from trivet.backends.cuda.device import describe_cuda


def missing() -> str:
    """ "" if there is a device that this library runs on, else what is missing."""
    facts: dict[str, Any] = describe_cuda()
    if facts["error"]:
        return str(facts["error"])
    return str(facts["devices"][0]["refused"]) if facts["devices"] else "CUDA offers no device"


needs_device = pytest.mark.skipif(bool(missing()), reason=f"needs a CUDA device: {missing()}")
