"""Products of a few rows, in C and by oneDNN, against float64, and the compiled library."""

import logging
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from heads.kernels.product import MAX_ROWS, Product, load
from tests.support.annotations import Log, Patch
from tests.support.switches import forget_library, need_c, without_c


@pytest.fixture(params=[True, False], ids=["C", "torch"])
def with_c(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Both products of a CPU: True with C, False without it."""
    if request.param:
        need_c()
        yield True
    else:
        with without_c():
            yield False


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
def test_a_product_is_that_of_float64(narrow: bool, with_c: bool, threads: int) -> None:
    for (inputs, outputs), R in product(((7, 3), (300, 129), (512, 640)), (1, 2, 3, 5, 6, 7, 9, 13, 25, 64, 70)):
        torch.manual_seed(R)
        x, weight = torch.randn(R, inputs + 5)[:, 2:-3], torch.randn(outputs, inputs)
        bias, residual = torch.randn(outputs), torch.randn(R, outputs)
        if narrow:
            weight = weight.bfloat16().float()
        packed, plain = Product(weight, bias), Product(weight)
        assert plain.bytes == (2 if narrow and with_c else 4) * weight.numel(), "halved where nothing is lost"
        wide, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        limit = 2.0**-24 * inputs  # the sum of as many roundings, relative to the sum of sizes
        assert (((plain(x) - wide).abs() / size) <= limit).all()
        assert (((packed(x, residual) - (wide + bias + residual)).abs() / (size + 10)) <= limit + 1e-6).all()
        if with_c and R <= MAX_ROWS:
            assert torch.equal(plain(x)[-1:], plain(x[-1:])), "a row depends on its neighbours"


def test_without_a_compiler_onednn_computes(caplog: Log) -> None:
    with without_c(), caplog.at_level(logging.INFO, "draftsmith"):
        assert load() is None and load() is None
    assert caplog.messages == ["no C compiler found: products on this CPU take oneDNN, which is slower"]


def test_a_compiler_that_fails_is_no_obstacle(tmp_path: Path, monkeypatch: Patch, caplog: Log) -> None:
    need_c()
    forget_library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CFLAGS", "--no-such-flag")
    with caplog.at_level(logging.INFO, "draftsmith"):
        assert load() is None
    assert "could not be compiled" in caplog.text and not list(tmp_path.rglob("*.so"))
    forget_library()
