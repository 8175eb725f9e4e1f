"""Switches between the forms of a forward pass, for tests that compare them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from heads.kernels import compiled, noisy_argmax, product, triton_support
from heads.targets import native_decoder as decoder


@contextmanager
def without_c() -> Iterator[None]:
    """Hide the C compiler: products built inside are oneDNN's."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CC", "none")
            forget_library()
            yield
    finally:
        forget_library()


def forget_library() -> None:
    """Forget the compiler, the library and the products made with it, so that all are made anew."""
    for loader in (compiled.find_compiler, compiled.compiled, product.load, noisy_argmax.load):
        loader.cache_clear()
    decoder._stacks.clear()


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Run Triton's kernels on CPU tensors in its interpreter."""
    before = triton_support.ON_CPU
    triton_support.ON_CPU = True
    try:
        yield
    finally:
        triton_support.ON_CPU = before


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Take the same code path as on a GPU: no C, experts' weights gathered for each row, and heads do not read the
    lengths of their texts nor look for matches."""
    with without_c(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("heads.parts.slot_state.SlotState.extent", lambda state, tokens: len(state.slot))
        patch.setattr(decoder.Experts, "by_expert", decoder.Experts.gathered)
        patch.setattr("heads.methods.two_drafts.LookupFirst.skips", False)
        yield


def need_c() -> None:
    if product.load() is None:
        pytest.skip("no C compiler")
