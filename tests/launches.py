"""Launches on a GPU by a piece of work, counted where there is none: in Triton's interpreter, whose tensors may
be of no memory if nothing is run."""

from collections import Counter
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class Launches(TorchDispatchMode):
    """Counts kernels by name, torch's and our own; views, and memory from a pool, are nothing."""

    def __init__(self, *, runs: bool = True) -> None:
        """`runs`: whether our own kernels are run, too."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()
        self.runs = runs

    def __enter__(self) -> "Launches":
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def counted(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.names[executor.fn.__name__] += 1
            if self.runs:
                with _disable_current_modes():  # the interpreter is the host
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
