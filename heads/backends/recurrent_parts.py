"""Parts of a head that recycles its state, for backends that compute it with their own kernels.

The CPU kernels (`heads.backends.cpu.recurrent`) and the GPU kernels (`heads.backends.triton.recurrent`) share this
description:

    x = [token_norm(e); state_norm(s)]                      concatenated; `state_first`: the other way round
    stream, x = s, x     or, with a projection,     stream = project(x), x = input_norm(stream)
                         or, with a normed residual, stream = state_norm(s)
    stream = stream + attention(x);  stream = stream + mlp(norm(stream))
    recycled = leave_norm(stream);   input of the output head = read_norm(recycled)

A missing norm is the identity.

Letters: R rows, D hidden, L auxiliary layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from heads.layers import MLP, Attention, RMSNorm


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleParts:
    """One module: a decoder block with grouped-query attention, and the norms around it."""

    attention: Attention
    mlp: MLP
    norm: nn.Module
    """Between attention and MLP; all norms are RMS norms."""
    token_norm: nn.Module
    state_norm: nn.Module
    input_norm: nn.Module | None = None
    project: nn.Linear | None = None
    """(D, 2 D); present only together with `input_norm`."""
    leave_norm: nn.Module | None = None
    read_norm: nn.Module | None = None
    state_first: bool = False
    zero_first: bool = False
    """True if e is zero for the token at position 0."""
    normed_residual: bool = False
    window: int | None = None
    """Number of positions that attention sees, including the token's own; None for all."""

    def __iter__(self) -> Iterator[nn.Module]:
        return (part for part in vars(self).values() if isinstance(part, nn.Module))


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadParts:
    """A whole head except its output head."""

    modules: Sequence[ModuleParts]
    fuse: nn.Linear | None = None
    """(D, L * D): projects the auxiliary hidden states to the first step's state; None if that state is the target's
    last hidden state."""
    aux_norms: Sequence[RMSNorm] = ()
    """Same as `heads.eagle3.Eagle3.aux_norms`."""

    @property
    def weight(self) -> Tensor:
        """One of the weights, for their dtype and device."""
        return self.modules[0].attention.q_proj.weight

    @property
    def plain(self) -> bool:
        """True if all linear layers are plain `nn.Linear`, and all weights have one dtype and one device."""
        parts = [part for module in self.modules for part in module] + [*self.aux_norms]
        parts += [] if self.fuse is None else [self.fuse]
        products = [module for part in parts for module in part.modules() if isinstance(module, nn.Linear)]
        kinds = {(weight.dtype, weight.device) for part in parts for weight in part.parameters()}
        return len(kinds) == 1 and all(type(product) is nn.Linear for product in products)

    @cached_property
    def aux_scales(self) -> Tensor:
        """(L * D,) scales of the normalized auxiliary hidden states."""
        return torch.cat([norm.weight.detach() for norm in self.aux_norms])

    def start(self, aux_hidden_states: Tensor, hidden: Tensor, fuse: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Return the state that the first step recycles (R, D), from the target's features (R, L * D) and (R, D).
        `fuse` multiplies by the weight of that name."""
        if fuse is None:
            return hidden.to(self.weight.dtype)
        aux_hidden_states = aux_hidden_states.to(self.weight.dtype)
        if self.aux_norms:
            apart = aux_hidden_states.unflatten(-1, (len(self.aux_norms), -1))
            aux_hidden_states = (
                rms_norm(apart, apart.shape[-1:], eps=self.aux_norms[0].eps).flatten(-2) * self.aux_scales
            )
        return fuse(aux_hidden_states)
