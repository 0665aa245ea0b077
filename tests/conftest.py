"""What holds for all tests."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when triton is imported, which already torch's compiler does.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from seloptim import _execute


@pytest.fixture(autouse=True)
def only_the_kernel_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """fused=None takes the eager path: whether a test before this one has built the kernel must not decide what is tested."""
    is_ready = _execute.native_is_ready
    monkeypatch.setattr(
        _execute, "native_is_ready", lambda device, *, compile: compile and is_ready(device, compile=True)
    )
