"""Detection of operations that would make the host wait for a GPU."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

WAITS = {
    *("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::equal"),
    *("aten::is_nonzero", "aten::unique_dim", "aten::_unique2", "aten::bincount"),
}
"""Operations for which the host waits, since they need sizes or values that only the GPU knows."""


class NoWaiting(TorchDispatchMode):
    """A mode that fails at the first operation for which the host would wait."""

    def __init__(self, *, constants: bool = True) -> None:
        """`constants`: allow constants that the host creates, which it would copy to a GPU."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits = WAITS if constants else WAITS | {"aten::lift_fresh"}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert name not in self.waits, f"{name} waits for the device"
        if name in ("aten::index", "aten::index_put", "aten::index_put_"):
            masks = [x for x in tree_flatten(args[1])[0] if isinstance(x, Tensor) and x.dtype == torch.bool]
            assert not masks, f"{name} by a mask waits for the device"
        if name == "aten::repeat_interleave":
            assert (kwargs or {}).get("output_size") is not None or not isinstance(args[-1], Tensor), f"{name} waits"
        return func(*args, **(kwargs or {}))
