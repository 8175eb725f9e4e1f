"""Where a target's weights lie: memory-mapped files, shards, or nowhere in this process.

Weights in their stored dtype are memory-mapped from their files, so that all processes of a machine share the pages.

Decoder layers need not be whole in a process: either every process of a launch holds a shard of each layer and all
processes run a forward pass together, or none holds any layer and features come from elsewhere (`FrozenTarget.remote`).
Embeddings, final norm and output head, which heads and losses read, are whole in every process.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from heads.core.errors import UserError

if TYPE_CHECKING:
    from heads.targets.frozen_target import FrozenTarget, Placement


def shard_layers(target: "FrozenTarget", mesh: DeviceMesh, dtype: torch.dtype | None) -> "Placement":
    """Keep this process's shard of each decoder layer on the mesh's device, with FSDP for forward passes only. A layer
    is gathered while it computes. `dtype`: a wider dtype for the weights, None to keep theirs. Every process must call
    this."""
    if target.start_token is not None or target.quantize or hasattr(target.config, "quantization_config"):
        what = "an encoder-decoder" if target.start_token is not None else "quantised"
        raise UserError(f"{target.name}: is {what}, whose layers are not sharded here; use features.kind=process")
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    _place_rest(target, device, dtype)
    for layer in target.layers:
        _place(layer, torch.device("cpu"), dtype)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)  # not the default for a root
    if mesh.device_type != "cpu":  # with a common root, the next layer is gathered while one computes
        inside = set(target.layers.parameters())
        fully_shard(target.base, mesh=mesh, ignored_params=set(target.model.parameters()) - inside)
    return "sharded"


def drop_layers(target: "FrozenTarget", device: torch.device, dtype: torch.dtype | None) -> "Placement":
    """Move everything outside the decoder layers to `device`, and keep only the shapes of the layers. `dtype`: as in
    `shard_layers`."""
    _place_rest(target, device, dtype)
    target.layers.to("meta")
    return "absent"


def _place_rest(target: "FrozenTarget", device: torch.device, dtype: torch.dtype | None) -> None:
    inside = set(target.layers.modules())
    for module in target.model.modules():
        if module not in inside:
            _place(module, device, dtype, recurse=False)


def _place(module: nn.Module, device: torch.device, dtype: torch.dtype | None, *, recurse: bool = True) -> None:
    """Move a module's tensors to `device`. Parameters narrower than `dtype` are widened; buffers keep their dtype."""
    for parameter in module.parameters(recurse):
        wider = dtype is not None and parameter.dtype.itemsize < dtype.itemsize
        parameter.data = parameter.data.to(device, dtype if wider else None)
    for part in module.modules() if recurse else (module,):
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
