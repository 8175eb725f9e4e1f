"""Switches between the forms of a forward pass, for tests that compare them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from heads.backends.cpu import compiling, library
from heads.backends.triton import availability

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
    """Run Triton's kernels on CPU tensors in its interpreter, without C."""
    before = availability.ON_CPU
    with without_c():
        availability.ON_CPU = True
        try:
            yield
        finally:
            availability.ON_CPU = before


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
