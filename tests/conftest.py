"""What holds for all tests."""

import os
from collections.abc import Generator

import pytest
import torch

if not torch.cuda.is_available():
    # Read when triton is imported, which already torch's compiler does.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from seloptim import _execute


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fail-on-skip", action="store_true", help="a skipped test fails: for a run with every extra installed"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and item.config.getoption("--fail-on-skip"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and --fail-on-skip is set: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def only_the_kernel_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """fused=None takes the eager path: whether a test before this one has built the kernel must not decide what is tested."""
    is_ready = _execute.native_is_ready
    monkeypatch.setattr(
        _execute, "native_is_ready", lambda device, *, compile: compile and is_ready(device, compile=True)
    )
