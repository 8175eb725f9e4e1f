"""Choice of a backend. Only this module checks a tensor's device, whether Triton runs and whether C was compiled."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from heads.backends.base import Backend, take_newest
from heads.backends.cpu import draws
from heads.backends.cpu.block import CpuBlock
from heads.backends.cpu.commit import CpuCommit
from heads.backends.cpu.compiling import find_compiler
from heads.backends.cpu.decoder import CpuDecoder, compiled_decoder
from heads.backends.cpu.kernels import draft_product
from heads.backends.cpu.library import load
from heads.backends.cpu.recurrent import CpuRecurrent
from heads.backends.huggingface import HFDecoder
from heads.backends.torch import accept as torch_accept
from heads.backends.torch import select as torch_select
from heads.backends.torch.architectures import native_decoder, why_not_native
from heads.backends.torch.block import TorchBlock
from heads.backends.torch.cached_decoder import TorchDecoder
from heads.backends.torch.commit import Commit
from heads.backends.torch.linear import Product
from heads.backends.torch.recurrent import TorchRecurrent
from heads.backends.torch.sampling import RowSampling
from heads.backends.torch.select import Select
from heads.backends.triton import accept, inputs, select
from heads.backends.triton.availability import failed_kernel, runs_kernels, why_not
from heads.backends.triton.commit import TritonCommit
from heads.backends.triton.decoder import DTYPES, TritonDecoder
from heads.backends.triton.pick import TritonSampling
from heads.backends.triton.recurrent import TritonRecurrent
from heads.errors import UserError, first_line, warn_once
from heads.target.frozen import FrozenTarget


def first(*forms: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the given functions in order and returns the first result that is not None."""
    return lambda *given: next(made for form in forms if (made := form(*given)) is not None)


TORCH = Backend(
    name="torch",
    native=native_decoder,
    decoder=first(TorchDecoder.of, HFDecoder),
    recurrent=TorchRecurrent,
    block=TorchBlock,
    product=partial(Product.of, draft=True),
    select=torch_select.TORCH,
    take_newest=take_newest,
    sampling=RowSampling,
    match=torch_accept.match,
    take_path=torch_accept.take_path,
    commit=Commit,
)
HUGGINGFACE = replace(TORCH, name="huggingface", native=lambda model: None, decoder=HFDecoder)
CPU = replace(
    TORCH,
    name="cpu",
    native=compiled_decoder,
    decoder=first(CpuDecoder.of, HFDecoder),
    recurrent=first(CpuRecurrent.of, TorchRecurrent),
    block=first(CpuBlock.of, TorchBlock),
    product=draft_product,
    take_newest=draws.take_newest,
    sampling=draws.CpuSampling,
    commit=CpuCommit,
)
TRITON = replace(
    TORCH,
    name="triton",
    has_kernels=True,
    on_host=False,
    decoder=first(TritonDecoder.of, TorchDecoder.of, HFDecoder),
    recurrent=first(TritonRecurrent.of, TorchRecurrent),
    select=Select(select.widen, select.prune, select.place),
    take_newest=inputs.take_newest,
    sampling=TritonSampling,
    match=accept.match,
    take_path=accept.take_path,
    commit=TritonCommit,
)
BACKENDS = {backend.name: backend for backend in (HUGGINGFACE, TORCH, CPU, TRITON)}


def select_backend(target: FrozenTarget, backend: str | None = None) -> Backend:
    """Return the named backend; by default the target's own choice, else the fastest one on its device. Raises
    UserError if the named backend is unavailable."""
    backend = backend or target.backend
    on_host = target.device.type != "cuda"
    if backend is None:
        if (reason := why_not_native(target)) is not None:
            warn_once(f"{target.name}: decoded by its Hugging Face model, slower: {reason}")
        return replace(fastest(target), on_host=on_host)
    if backend not in BACKENDS:
        raise UserError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if (reason := why_not_backend(target, backend)) is not None:
        raise UserError(f"{target.name}: backend {backend} cannot decode it here: {reason}; name another, or none")
    return replace(BACKENDS[backend], is_required=True, on_host=on_host)


def without_kernels(target: FrozenTarget, backend: Backend, error: Exception) -> Backend:
    """Return the backend to take after an error of a Triton kernel: one that does not compile, fit or run on this
    device. Warns once. Raises UserError if the backend was requested by name, and any other error as it is."""
    kernel = failed_kernel(error) if backend.has_kernels else None
    if kernel is None or isinstance(error, UserError | torch.OutOfMemoryError):
        raise error
    card = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else target.device
    what = f"{target.name}: the kernel of {kernel} fails on {card} ({type(error).__name__}: {first_line(error)})"
    if backend.is_required:
        raise UserError(f"{what}; name another backend than {backend.name}, or none") from error
    warn_once(f"{what}; torch's operations are used instead, slower")
    return replace(TORCH, on_host=backend.on_host)


def fastest(target: FrozenTarget) -> Backend:
    """Return the fastest backend on the target's device. Warns if a GPU runs without kernels."""
    if target.device.type == "cuda":
        if (reason := why_not_triton(target)) is not None:
            warn_once(f"{target.name}: decoded without kernels of its own, slower: {reason}")
        return TRITON if why_not(target.device) is None else TORCH
    if runs_kernels(target.head.weight):  # in the interpreter
        return TRITON
    return CPU if target.device.type == "cpu" and load() is not None else TORCH


def why_not_backend(target: FrozenTarget, name: str) -> str | None:
    """Return the reason why a backend cannot run a target, or None."""
    if name == "huggingface":
        return None
    if name == "cpu" and target.device.type != "cpu":
        return f"it lies on {target.device}"
    if name == "cpu" and load() is None:
        return "there is no C compiler" if find_compiler() is None else "the C library cannot be had"
    return why_not_native(target) or (why_not_triton(target) if name == "triton" else None)


def why_not_triton(target: FrozenTarget) -> str | None:
    """Return the reason why the Triton kernels cannot run a target, or None."""
    if target.device.type == "cuda":
        reason = why_not(target.device)
    else:
        reason = None if runs_kernels(target.head.weight) else f"it lies on {target.device}, and kernels need a GPU"
    return reason or (None if target.dtype in DTYPES else f"kernels take no {str(target.dtype).removeprefix('torch.')}")
