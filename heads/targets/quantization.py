"""Targets whose decoder layers store their matrices in int8: a quarter of float32's memory, half of bfloat16's.

    w_ij ~ s_i * round(w_ij / s_i)        each row i of a matrix has its own scale s_i

Only weights are quantised. Activations are not rounded, so that no row of a batch depends on another and drafts are
verified as exactly as on any target. Embeddings, norms and the output head, which draft heads start from, are not
changed. Quantisation uses torchao, an optional package.
"""

import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from heads.core.errors import UserError

MIN_SHARE = 0.5
"""Minimum share of the layers' weights that must be in linear layers. With less, little memory would be saved."""


def quantize_layers(layers: nn.ModuleList, scheme: str, name: str) -> None:
    """Quantise the linear layers inside `layers` in place; `scheme` is int8. UserError as by `quantizer`."""
    quantizer(layers, scheme, name)(layers)


def quantizer(layers: nn.ModuleList, scheme: str, name: str) -> Callable[[nn.ModuleList], None]:
    """Return the function that quantises the linear layers inside `layers` in place. UserError if their share is too
    small (`MIN_SHARE`), or if torchao is missing."""
    logging.disable(logging.WARNING)  # importing torchao logs four, about kernels for other machines
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise UserError(
            f"target.quantize: {scheme} needs the package torchao, which is not installed; pip install -e '.[quant]'"
        ) from error
    finally:
        logging.disable(logging.NOTSET)
    linear = sum(module.weight.numel() for module in layers.modules() if isinstance(module, nn.Linear))
    share = linear / sum(parameter.numel() for parameter in layers.parameters())
    if share < MIN_SHARE:
        raise UserError(
            f"{name}: target.quantize reaches linear layers only, which hold {share:.0%} of its layers' weights "
            "(experts kept in one tensor, and GPT-2's layers, are none); leave it out"
        )
    return lambda layers: quantize_(layers, Int8WeightOnlyConfig(set_inductor_config=False))


def weight_bytes(module: nn.Module) -> int:
    """Return the size of a module's weights in memory, in bytes. Tied weights count once."""
    return sum(_bytes(parameter) for parameter in module.parameters())


def _bytes(tensor: Any) -> int:
    if not is_traceable_wrapper_subclass(tensor):
        return int(tensor.numel() * tensor.element_size())
    names, _ = tensor.__tensor_flatten__()  # the parts of a quantised tensor
    return sum(_bytes(getattr(tensor, name)) for name in names)
