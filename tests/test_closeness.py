"""The rule of closeness: another order of the sums passes, another result does not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_close

WRONG: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one term too few": lambda x, weight: x[:, 1:] @ weight[1:],
    "another factor": lambda x, weight: 1.001 * (x @ weight),
    "the next row": lambda x, weight: (x @ weight).roll(1, 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("terms", [10, 4000])
def test_another_order_is_close_and_another_result_is_not(dtype: torch.dtype, terms: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((7, terms), (terms, 9)))
    order, exact = torch.randperm(terms, generator=draw), x.double() @ weight.double()
    assert_close(x[:, order] @ weight[order], exact)
    one_by_one = torch.zeros(7, 9, dtype=dtype)
    for n in range(terms):
        one_by_one += x[:, n, None] * weight[n]
    assert_close(one_by_one, exact)
    for wrong in WRONG.values():
        with pytest.raises(AssertionError):
            assert_close(wrong(x, weight), exact, roundings=1024)
