"""The device of the tests of a GPU: the accelerator that torch finds, else none and they are skipped.

`OFFLOADZ_REHEARSE=1 pytest tests/gpu` runs them on a rehearsed device instead, so that they are known to run at all.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from offloadz.runtime.chosen import device_named
from offloadz.runtime.rehearsal import Rehearsal


@pytest.fixture
def device() -> Any:
    """A fresh device each time: a run owns its streams."""
    if os.environ.get("OFFLOADZ_REHEARSE"):
        return Rehearsal(bfloat16=True)
    if not torch.accelerator.is_available():
        pytest.skip("torch finds no accelerator here; OFFLOADZ_REHEARSE=1 rehearses these tests on the CPU")
    return device_named("auto")
