"""Fixtures of the tests of heads/."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture
def largest_tensor() -> Callable[[Callable[[], object]], int]:
    """action -> the most elements of any tensor that an operation makes while it runs."""

    def measure(action: Callable[[], object]) -> int:
        most = 0

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal most
                out = func(*args, **(kwargs or {}))
                made = out if isinstance(out, (tuple, list)) else (out,)
                most = max([most, *(tensor.numel() for tensor in made if isinstance(tensor, Tensor))])
                return out

        watch: Any = Watch
        with watch():
            action()
        return most

    return measure
