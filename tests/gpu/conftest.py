"""A fault of the device ends the process that met it, so that the tests after it are run by another. Warnings of
torch's CUDA build, which no other tests meet, fail no test. A kernel that fails is not replaced."""

import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.switches import raise_error


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.runtime.engine.without_kernels", raise_error)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo and "CUDA error" in str(call.excinfo.value) and "PYTEST_XDIST_WORKER" in os.environ:
        print(report.longreprtext, file=sys.__stderr__, flush=True)
        os._exit(1)  # before the report is sent: pytest-xdist names the test that was running
    return report
