"""Counts of a GPU's kernel launches without a GPU, in Triton's interpreter. If no kernel is run, tensors need no
memory."""

from collections import Counter
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class Launches(TorchDispatchMode):
    """A mode that counts launches by name, of torch's kernels and our own. Views and allocations do not count."""

    def __init__(self, *, runs: bool = True) -> None:
        """`runs`: also run our own kernels."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()
        self.runs = runs

    def __enter__(self) -> "Launches":
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def counted(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.names[executor.fn.__name__] += 1
            if self.runs:
                with _disable_current_modes():  # operations of the interpreter are not launches
                    launch(executor, *args, **kwargs)

        self.patch: Any = patch.object(GridExecutor, "__call__", counted)
        self.patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        if not view and not name.startswith(("empty", "new_empty", "detach", "_unsafe_view")):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))
