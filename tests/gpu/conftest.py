"""A fault of the device ends the process that met it, so that the tests after it are run by another."""

import os
import sys
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo and "CUDA error" in str(call.excinfo.value) and "PYTEST_XDIST_WORKER" in os.environ:
        print(report.longreprtext, file=sys.__stderr__, flush=True)
        os._exit(1)  # before the report is sent: pytest-xdist names the test that was running
    return report
