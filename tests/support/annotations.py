"""Short names of the types of fixtures."""

from collections.abc import Callable
from pathlib import Path

import pytest

Capture = pytest.CaptureFixture[str]
Log = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch
Once = Callable[[str, Callable[[Path], None]], Path]
"""The fixture `once`."""
