from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from trivet._log import get_logger

logger = get_logger("trivet.test")


def test_logging_is_imported_when_there_is_something_to_log() -> None:
    code = (
        "import sys; from trivet._log import get_logger; logger = get_logger('x'); "
        "logger.info('unseen'); print('logging' in sys.modules); "
        "logger.warning('seen %d', 1); print('logging' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    assert done.stderr.strip() == "seen 1"


@pytest.mark.parametrize("method", ["info", "warning", "error"])
def test_records_name_the_logger_and_the_caller(method: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trivet.test"):
        getattr(logger, method)("%s of %d", "one", 2)
    (record,) = caplog.records
    assert (record.name, record.getMessage(), record.levelname) == ("trivet.test", "one of 2", method.upper())
    assert record.pathname == __file__
