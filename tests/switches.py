"""Switches between the forms of a forward pass, for tests that compare them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from heads.backends.base import Backend
from heads.backends.cpu import compiling, library
from heads.backends.triton import availability
from heads.target.frozen import FrozenTarget

LOADERS = (compiling.find_compiler, library.load)


@contextmanager
def without_c() -> Iterator[None]:
    """Hide the C compiler: everything built inside uses torch's operations."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CC", "none")
            forget_libraries()
            yield
    finally:
        forget_libraries()


def forget_libraries() -> None:
    """Clear the caches of the compiler and the library, so that both are searched for again."""
    for loader in LOADERS:
        loader.cache_clear()


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Run Triton's kernels on CPU tensors in its interpreter, without C. A kernel that fails is not replaced."""
    with without_c(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(availability, "ON_CPU", True)
        patch.setattr("eval.runtime.engine.without_kernels", raise_error)
        yield


def raise_error(target: FrozenTarget, backend: Backend, error: Exception) -> Backend:
    """Raise the error of a kernel, so that a test does not compare torch's operations with themselves."""
    raise error


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Take the same code path as on a GPU: no C, and heads do not read the lengths of their texts."""
    with without_c(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("heads.recurrent.draft.RecurrentState.extent", lambda state, tokens: len(state.slot))
        yield


def need_c() -> None:
    """Skip a test if there is no C compiler."""
    if library.load() is None:
        pytest.skip("no C compiler")
