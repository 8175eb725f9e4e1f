"""Targets whose decoder layers are not whole in the memory of one process.

Either every process of a launch holds a shard of each layer, and all processes run a forward pass together. Or no
process holds any layer, and features come from elsewhere (`FrozenTarget.remote`). Every process holds the whole
embeddings, final norm and output head, which heads and losses read.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from heads.errors import UserError
from heads.target.frozen import FrozenTarget
from heads.target.mapped_files import MappedFiles


def shard_layers(target: FrozenTarget, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Keep this process's shard of each decoder layer on the mesh's device: FSDP, forward only. A layer is gathered
    while it computes. `dtype` widens narrower weights; None keeps their dtype. Every process must call this."""
    if target.start_token is not None or target.quantize or hasattr(target.config, "quantization_config"):
        what = "an encoder-decoder" if target.start_token is not None else "quantised"
        raise UserError(f"{target.name}: is {what}, whose layers are not sharded here; use features.kind=process")
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    _place_rest(target, device, dtype)
    files = MappedFiles()
    for layer in target.layers:
        stored = [parameter.data for parameter in layer.parameters()]
        _place(layer, torch.device("cpu"), dtype)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)  # by default, a root module does not reshard
        for tensor in stored:
            files.forget(tensor)
    if mesh.device_type != "cpu":  # with a root, the next layer is gathered while one computes
        fully_shard(target.base, mesh=mesh, ignored_params=set(_outside(target)))
    target.placement = "sharded"


def drop_layers(target: FrozenTarget, device: torch.device, dtype: torch.dtype | None) -> None:
    """Keep everything outside the decoder layers on `device`, and only the shapes of the layers. `dtype`: as in
    `shard_layers`."""
    _place_rest(target, device, dtype)
    target.layers.to("meta")
    target.placement = "absent"


def _outside(target: FrozenTarget) -> list[nn.Parameter]:
    inside = set(target.layers.parameters())
    return [parameter for parameter in target.model.parameters() if parameter not in inside]


def _place_rest(target: FrozenTarget, device: torch.device, dtype: torch.dtype | None) -> None:
    inside = set(target.layers.modules())
    for module in target.model.modules():
        if module not in inside:
            _place(module, device, dtype, recurse=False)


def _place(module: nn.Module, device: torch.device, dtype: torch.dtype | None, *, recurse: bool = True) -> None:
    """Move a module's tensors. Parameters that are narrower than `dtype` are widened. Buffers keep their dtype."""
    for parameter in module.parameters(recurse):
        wider = dtype is not None and parameter.dtype.itemsize < dtype.itemsize
        parameter.data = parameter.data.to(device, dtype if wider else None)
    for part in module.modules() if recurse else (module,):
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
