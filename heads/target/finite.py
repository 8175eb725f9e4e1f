"""The reason for states that are not finite: the layer with which they begin, and what helps."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@torch.no_grad()
def why_not_finite(model: PreTrainedModel, layers: nn.ModuleList, arguments: dict[str, Tensor]) -> str:
    """Return the end of an error message for a model whose output for `arguments` is not finite."""
    first = len(layers)

    def look(number: int, output: Any) -> None:
        nonlocal first
        hidden = output[0] if isinstance(output, tuple) else output
        if not bool(hidden.isfinite().all()):
            first = min(first, number)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        look(-1, args[0] if args else kwargs["hidden_states"])

    hooks = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    for number, layer in enumerate(layers):
        hooks.append(layer.register_forward_hook(lambda _, __, output, number=number: look(number, output)))
    try:
        model(**arguments, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    place = "from the embeddings on" if first < 0 else f"from layer {first} on"
    if first == len(layers):
        place = "after the last layer"
    plain = {name: weight for name, weight in model.named_parameters() if type(weight.data) is Tensor}
    wrong = [name for name, weight in plain.items() if not weight.is_meta and not bool(weight.isfinite().all())]
    cause = f", and {wrong[0]} holds such values" if wrong else ""
    if model.dtype == torch.float16:
        remedy = "float16 overflows above 65504: ask for bfloat16 or float32"
    elif wrong:
        remedy = "its weights are damaged: fetch or make them again"
    else:
        remedy = "use another target" if model.dtype.itemsize > 2 else f"{model.dtype} may not suffice: ask for float32"
    return f"the target's states are not finite {place}{cause}; {remedy.removeprefix('torch.')}"
