"""One warm parent of killed runs for all tests here: its imports take longer than a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()
