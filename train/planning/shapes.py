"""Tensors without values, to count what a training step allocates and computes without running it.

Inside `Shapes`, floating-point tensors have shapes but no values. Token ids, masks and positions are real, since they
determine how many rows a loss reads. Operators are counted as on a CPU: the live bytes of storages, their peak, and the
operations of matrix products and attention, from torch's formulas.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
ITEM = aten._local_scalar_dense.default
EQUAL = aten.equal.default
FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(
        grad.shape, q.shape, k.shape, v.shape
    ),
}
"""Formulas for the operations of an operator from its arguments: torch's own, and two that torch lacks."""


class Shapes(TorchDispatchMode):
    """A mode in which floating-point tensors have no values. It counts their bytes and operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.live = self.peak = 0
        """Bytes of all living tensors that were created in this mode, and their maximum since `restart`."""
        self.flops = 0
        """Operations since `restart`. A multiplication and an addition count as two."""
        self.storages: dict[int, weakref.ref[Any]] = {}

    def restart(self) -> int:
        """Reset the peak and the operations, and return the bytes that are in use now."""
        self.peak, self.flops = self.live, 0
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        without_values = any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in given)
        if without_values and func is ITEM:
            return 1.0  # scales of initial weights, whose values do not matter here
        if without_values and func is EQUAL:
            return True  # only compares a head file's copy of the target's tables, which is usually equal
        if without_values or (not given and _makes_numbers(func, kwargs)):
            with self.fake:
                out = func(*args, **kwargs)
            self.fake.fake_tensor_converter.meta_converter.tensor_memo.clear()  # modules in the memo could not be moved
        else:
            out = func(*args, **kwargs)
        if (formula := FORMULAS.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self.watch(leaf.untyped_storage())
        return out

    def watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return

        def freed(_: Any) -> None:
            del self.storages[key]
            self.live -= size

        self.storages[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def _makes_numbers(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return True for an operator that creates floating-point numbers without input tensors. Draws with a generator
    choose real rows, and ranges are token ids or positions, so these keep their values."""
    if func._overloadpacket is aten.arange:
        return False
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    device = kwargs.get("device")
    on_meta = device is not None and torch.device(device).type == "meta"
    return kwargs.get("generator") is None and dtype.is_floating_point and not on_meta
