"""Counts for a plan: parameters, bytes and operations of the target and the head, by formulas from their shapes.

The rows are full, with one document each, and every token is a label, so the counts are upper bounds. Letters: B batch,
T tokens, N = B * T, D hidden, I intermediate, A = query heads * width, G = key heads * width, V vocabulary, Vd draft
vocabulary, L auxiliary layers, K depth; w bytes of a number in a layer, 2 under autocast, else 4.

A target's forward pass of a micro-batch, with w bytes of its own dtype:

    FLOP per token = 2 * active parameters of the layers + 2 * T * heads * (key width + value width) * attention layers
    bytes          = N w ((2 + L) D + widest)                       two residuals, L auxiliary hidden states
                   + B T^2 (1 + w)                                  the mask twice, in families that need it whole
    widest         = the larger of 3 I, or k (3 I + 2 D) with k experts per token, and twice a layer's queries, keys
                     and values

A head's layers count their own cost (`DraftHead.step_cost`). The loss forms logits in chunks of rows, of which several
tensors exist at a time.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads.core.contract import KEPT_SHARE, StepCost
from heads.formats.engine_folder import check_contents, why_unserved
from heads.methods.losses import CHUNK_BYTES, LEAST_ROWS
from heads.methods.settings import LABELS
from heads.registry import HEADS
from heads.saved import target_record
from heads.targets.families import attention_widths, layer_setting
from heads.targets.forward import takes_block_masks
from heads.targets.load import ShapeTarget, load_shape
from heads.targets.quantization import LEAST_SHARE
from train.adapter import add_adapters
from train.head_settings import make_head
from train.optim import make_optimizer
from train.recipe import Recipe

aten = torch.ops.aten
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
"""Names that configs use for the number of experts."""


@dataclass(frozen=True)
class TargetCount:
    total: int
    active: int
    """All parameters, embeddings included, except those of the experts to which a token is not routed."""
    dtype: str
    bytes: int
    end_bytes: int
    """Bytes outside the layers: embeddings, final norm, output head."""
    layer_bytes: int
    """Bytes of the largest layer."""
    int8_bytes: int | None
    """Bytes of the target with `target.quantize: int8`; None if that does not apply."""
    flops: float
    """Operations of one token's pass through the layers. Logits are counted with the head's loss."""
    activations: int
    """Bytes of activations of one micro-batch's forward pass."""


@dataclass(frozen=True)
class HeadCount:
    depth: int
    """Depths of its loss."""
    trained: int
    bytes: int
    """Bytes in float32."""
    copy_bytes: int
    """Bytes in the target's dtype: the size of the measured copy."""
    gradients: int
    optimizer: int
    features: int
    """Bytes of the target's features of one micro-batch, as the loss reads them."""
    activations: int
    """Peak bytes in addition to weights and gradients, including features."""
    flops: float
    """Operations of one token: loss and gradient, including the target's logits."""
    hidden_size: int
    unserved: str | None
    """Why no engine will serve the head, or None."""


def count_run(recipe: Recipe, device: str, memory: int, passes: int, *, bf16: bool) -> tuple[TargetCount, HeadCount]:
    """Count a recipe's target and head for a device of type `device` with `memory` bytes, and `passes` per step.
    `bf16`: matrix products are in bfloat16, as under autocast."""
    settings, train, T, section = recipe.target, recipe.train, recipe.data.context_length, recipe.head
    if section.init_from is None and getattr(section, "mask_token_id", 0) is None:
        section = section.model_copy(update={"mask_token_id": 0})  # any id: it would be chosen from the tokenizer
    wanted = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if settings.dtype == "auto" and device == "cpu":
        wanted = torch.float32
    with Shapes():
        trusted, gguf_file = settings.trust_remote_code, settings.gguf_file
        target = load_shape(settings.path, dtype=wanted, trust_remote_code=trusted, gguf_file=gguf_file)
        head: Any = make_head(section, target, torch.zeros(target.vocab_size, dtype=torch.int64))
        saved: dict[str, Tensor] = head.to_checkpoint()
        copy_bytes = sum(_size(tensor, target.dtype.itemsize) for tensor in saved.values())
        record, form = target_record(target), HEADS[section.kind].format
        dtype = str(target.dtype).removeprefix("torch.")
        config = form.engine_config(head.config, record, dtype) | {"draftsmith": {"config": head.config.model_dump()}}
        shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        verdicts = check_contents(config, shapes, form, section.kind, record)
        add_adapters(head)
        groups = make_optimizer(head, train).param_groups
    L = len(head.aux_layer_ids)
    trained = [p for p in head.parameters() if p.requires_grad]
    gradients = sum(map(_size, trained))
    # Muon has one moment, AdamW two and a count of the steps.
    optimizer = sum(_size(p) * (1 if "momentum" in group else 2) for group in groups for p in group["params"])
    optimizer += sum(4 * len(group["params"]) for group in groups if "momentum" not in group)
    features = 4 * train.batch_size * T * (2 + L) * target.hidden_size
    kept, flops = head_work(
        head, target, train.batch_size, T, bf16=bf16, most=round(KEPT_SHARE * memory), chunk=CHUNK_BYTES[device]
    )
    if passes == 1:  # gradients are not there yet when the activations are most
        kept -= gradients
    return count_target(target, train.batch_size, T, L, settings.quantize), HeadCount(
        depth=len(head.depth_weights),
        trained=sum(p.numel() for p in trained),
        bytes=sum(map(_size, head.parameters())),
        copy_bytes=copy_bytes,
        gradients=gradients,
        optimizer=optimizer,
        features=features,
        activations=features + max(0, kept),
        flops=flops / (train.batch_size * T),
        hidden_size=target.hidden_size,
        unserved=why_unserved(verdicts),
    )


def head_work(
    head: Any, target: ShapeTarget, B: int, T: int, *, bf16: bool, most: int, chunk: int
) -> tuple[int, float]:
    """Return the bytes that exist while the loss of a micro-batch is formed, without features and weights, and the
    operations of loss and gradient. `most`: bytes above which a head that can recompute its steps does so; `chunk`:
    bytes of a chunk of the target's logits."""
    D, V, K, w = target.hidden_size, target.vocab_size, len(head.depth_weights), 2 if bf16 else 4
    cost: StepCost = head.step_cost(B, T, width=w, most=most)
    R, Vd, outputs = cost.rows, cost.logits, cost.outputs
    read = outputs[0].in_features if outputs else D  # width of the states of the loss
    kept = cost.kept + 2 * K * R * read * w  # these and their gradient
    trained = [end.weight for end in outputs if end.weight.requires_grad]
    inner = [m.weight for m in head.modules() if isinstance(m, nn.Linear) and all(m is not end for end in outputs)]
    if bf16:  # autocast's copies of the weights
        kept += 2 * sum(weight.numel() for weight in inner)
    if (4 if trained else target.dtype.itemsize) != w:  # an output head, in the states' dtype
        kept += w * Vd * read
    flops = cost.flops + K * R * (6 if trained else 4) * read * Vd
    if getattr(head.config, "loss", None) != LABELS:
        flops += 2 * D * V * cost.target_rows
    rows = min(cost.chunked, max(LEAST_ROWS, chunk // (4 * V)))
    widened = V * (4 + target.dtype.itemsize % 4) + 3 * 4 * Vd  # the target's logits, in float32 and in its own dtype
    compared = (22 if cost.chunked == R else 31) * Vd  # two distributions, a divergence or more, and the gradient
    loss = rows * max(widened, compared)
    if trained:
        loss = max(loss, rows * 20 * Vd + _size(trained[0]))  # a chunk's gradient of the output head
    return kept + sum(map(_size, trained)) + max(loss, cost.backward), flops


def count_target(
    target: ShapeTarget, batch_size: int, length: int, aux_layers: int, quantize: str | None = None
) -> TargetCount:
    """Count a target and one micro-batch's forward pass with the formulas above."""
    config, w, D = target.config, target.dtype.itemsize, target.hidden_size
    total = sum(p.numel() for p in target.model.parameters())
    in_layers = {name: p.numel() for name, p in target.layers.named_parameters()}
    experts: int = next((count for name in EXPERTS if (count := getattr(config, name, None))), 0)
    chosen: int = getattr(config, "num_experts_per_tok", None) or 0
    idle = sum(size for name, size in in_layers.items() if ".experts." in name) if experts else 0
    idle = round(idle * (1 - chosen / experts)) if experts else 0
    by_layer = [_layer_bytes(layer, w, quantize) for layer in target.layers]
    linear = sum(m.weight.numel() for m in target.layers.modules() if isinstance(m, nn.Linear))
    end_bytes = (total - sum(in_layers.values())) * w
    key_width, value_width, heads, key_heads = attention_widths(config, D)
    intermediate: int = layer_setting(config, "intermediate_size") or 4 * D
    mlp = 3 * intermediate
    if experts:
        mlp = max(mlp, chosen * (3 * (layer_setting(config, "moe_intermediate_size") or intermediate) + 2 * D))
    attention = 2 * (heads + key_heads) * (key_width + value_width)
    N = batch_size * length
    flops = 2 * (sum(in_layers.values()) - idle)
    flops += 2 * length * heads * (key_width + value_width) * target.attention_layers
    whole_mask = 0 if takes_block_masks(target.base, config) else batch_size * length**2 * (1 + w)
    return TargetCount(
        total=total,
        active=total - idle,
        dtype=str(target.dtype).removeprefix("torch.") + (f", {quantize} layers" if quantize else ""),
        bytes=end_bytes + sum(by_layer),
        end_bytes=end_bytes,
        layer_bytes=max(by_layer),
        int8_bytes=end_bytes + sum(_layer_bytes(layer, w, "int8") for layer in target.layers)
        if linear >= LEAST_SHARE * sum(in_layers.values())
        else None,
        flops=flops,
        activations=N * w * ((2 + aux_layers) * D + max(mlp, attention)) + whole_mask,
    )


def _layer_bytes(layer: nn.Module, width: int, quantize: str | None) -> int:
    """Return the bytes of a layer's weights, `width` bytes each. A quantised matrix has one byte per weight, and a
    scale per row."""
    whole = sum(p.numel() for p in layer.parameters()) * width
    if quantize is None:
        return whole
    matrices = [m.weight for m in layer.modules() if isinstance(m, nn.Linear)]
    return whole - sum(rows * (columns * (width - 1) - width) for rows, columns in (m.shape for m in matrices))


class Shapes(TorchDispatchMode):
    """A mode in which modules are built without memory: floating-point tensors have shapes and no values. Ids and
    other integers are real, since they choose rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        without_values = any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in given)
        if without_values and func is aten._local_scalar_dense.default:
            return 1.0  # scales of initial weights, whose values do not matter here
        if without_values and func is aten.equal.default:
            return True  # only compares a head file's copy of the target's tables, which is usually equal
        makes_numbers = not given and func._overloadpacket is not aten.arange and _is_float(kwargs)
        if not without_values and not makes_numbers:
            return func(*args, **kwargs)
        with self.fake:
            out = func(*args, **kwargs)
        self.fake.fake_tensor_converter.meta_converter.tensor_memo.clear()  # modules in the memo could not be moved
        return out


def _is_float(kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    on_meta = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"
    return kwargs.get("generator") is None and dtype.is_floating_point and not on_meta


def _size(tensor: Tensor, width: int | None = None) -> int:
    """Return the bytes of a tensor. `width`: bytes per number, for a floating-point tensor."""
    return tensor.numel() * (width if width and tensor.is_floating_point() else tensor.element_size())
