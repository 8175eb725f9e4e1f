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

A head's loss and gradient: a matrix of n numbers takes 2 n FLOP a row forward, and as many for each of the gradients of
its input and, if it is trained, of itself. A layer keeps for its backward pass, of each row, the inputs of its norms,
of its products and of SiLU, and the queries, keys, values and output of its attention: `KEPT`. The loss forms logits in
chunks of C rows, of which several tensors exist at a time.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads.core.contract import KEPT_SHARE
from heads.methods.losses import CHUNK_BYTES, LEAST_ROWS
from heads.methods.recycling import Recycling
from heads.methods.settings import LABELS
from heads.registry import kind_of
from heads.targets.families import layer_setting
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
KEPT = {
    "eagle3": (6, 3, 2),
    "mtp": (9, 3, 2),
    "dflash": (4, 4, 3),
    "dflash2": (4, 4, 3),
    "dspark": (4, 4, 3),
    "draft": (6, 4, 4),
}
"""By kind, the numbers that a layer keeps of each row, in multiples of D, A and G; and 4 of I."""
ATTENTION_PRODUCTS = {"eagle3": 7, "mtp": 7, "draft": 7, "dflash": 8, "dflash2": 8, "dspark": 8}
"""Products of queries and keys' size: 2 forward, 1 or 2 computed again, 4 or 5 backward."""


@dataclass(frozen=True)
class TargetCount:
    """The counts of a target: parameters, bytes and operations."""

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
    """The counts of a head: parameters, and the cost of one micro-batch and one optimizer step."""

    trained: int
    bytes: int
    """Bytes in float32."""
    copy_bytes: int
    """Bytes in the target's dtype: the size of the measured copy and of the head's folder."""
    gradients: int
    optimizer: int
    features: int
    """Bytes of the target's features of one micro-batch, as the loss reads them."""
    activations: int
    """Peak bytes in addition to weights and gradients, including features."""
    flops: float
    """Operations of one token: loss and gradient, including the target's logits."""
    hidden_size: int


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
        copy_bytes = sum(_size(tensor, target.dtype.itemsize) for tensor in head.to_checkpoint().values())
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
        trained=sum(p.numel() for p in trained),
        bytes=sum(map(_size, head.parameters())),
        copy_bytes=copy_bytes,
        gradients=gradients,
        optimizer=optimizer,
        features=features,
        activations=features + max(0, kept),
        flops=flops / (train.batch_size * T),
        hidden_size=target.hidden_size,
    )


def head_work(
    head: Any, target: ShapeTarget, B: int, T: int, *, bf16: bool, most: int, chunk: int
) -> tuple[int, float]:
    """Return the bytes that exist while the loss of a micro-batch is formed, without features and weights, and the
    operations of loss and gradient. `most`: bytes above which a head that can recompute its steps does so; `chunk`:
    bytes of a chunk of the target's logits."""
    kind, config, N, D, V = kind_of(head), head.config, B * T, target.hidden_size, target.vocab_size
    K, w, kept_ids = len(head.depth_weights), 2 if bf16 else 4, getattr(head, "kept", None)
    Vd = V if kept_ids is None else len(kept_ids)
    outputs = _outputs(head)
    inner = [m.weight for m in head.modules() if isinstance(m, nn.Linear) and all(m is not end for end in outputs)]
    products = sum(_flops(weight) for weight in inner)  # of one row that passes through every layer
    R = rows = N  # of the loss at each depth, and of a layer
    at_once = N  # rows of the loss of which chunks are made
    flops: float
    backward = 0  # bytes of the widest gradients of a layer, beyond what a chunk of the loss needs
    if kind == "medusa":
        flops = N * products
        kept = K * N * D * (4 + 2 * w * config.num_layers)
    else:
        wide, A, G, layers = _layer_sizes(head)
        d, a, g = KEPT[kind]
        row = w * (d * D + a * A + g * G + 4 * wide)
        if isinstance(head, Recycling):
            start = sum(p.numel() for module in head.starting for p in module.parameters() if p.dim() == 2)
            flops = N * (K * (products - 6 * start) / head.num_modules + 4 * start)
            flops += K * N * 2 * ATTENTION_PRODUCTS[kind] * A * T / 2
            kept = K * N * (row + (4 - w) * D)  # embeddings stay in float32
            if K * N * w * (4 * wide + 10 * D) > most:  # only the states, keys and values of every step are kept
                flops *= 4 / 3
                kept, backward = K * N * w * 2 * (D + G), N * row
        elif kind == "draft":
            Vd = config.common_size
            flops = N * (products + layers * 2 * ATTENTION_PRODUCTS[kind] * A * T)
            kept = layers * N * row
        else:
            R = B * min(config.num_anchors, T)
            rows, at_once = R * config.block_size, R * K
            context_read = [part for name, part in head.named_modules() if name.endswith(("k_proj", "v_proj"))]
            fuse, context = head.fc.weight, sum(_flops(part.weight) for part in context_read)
            flops = rows * (products - _flops(fuse)) + N * (context + 4 * fuse.numel())
            flops += layers * rows * 2 * ATTENTION_PRODUCTS[kind] * A * (T / 2 + config.block_size)
            kept = layers * (rows * row + N * w * 3 * G) + N * w * (2 + len(head.aux_layer_ids)) * D
            kept += sum(_size(p) for p in head.parameters() if len(p) == V)  # the loss forms their gradients
        kept += 2 * K * R * D * w  # the states of the loss and their gradient
        backward += 2 * w * wide * rows
    trained = [end.weight for end in outputs if end.weight.requires_grad]
    if bf16:  # autocast's copies of the weights
        kept += 2 * sum(weight.numel() for weight in inner)
    if kind != "medusa" and (4 if trained else target.dtype.itemsize) != w:  # the output head, in the states' dtype
        kept += w * Vd * D
    flops += K * R * (6 if trained else 4) * D * Vd
    if getattr(config, "loss", None) != LABELS:  # the target's logits
        flops += 2 * D * V * (R if isinstance(head, Recycling) else K * R)
    chunk_rows = min(at_once, max(LEAST_ROWS, chunk // (4 * V)))
    widened = V * (4 + target.dtype.itemsize % 4) + 3 * 4 * Vd  # the target's logits, in float32 and in its own dtype
    compared = (22 if at_once == R else 31) * Vd  # two distributions, a divergence or more, and the gradient
    loss = chunk_rows * max(widened, compared)
    if trained:
        loss = max(loss, chunk_rows * 20 * Vd + _size(trained[0]))  # a chunk's gradient of the output head
    return kept + sum(map(_size, trained)) + max(loss, backward), flops


def _outputs(head: Any) -> list[nn.Linear]:
    """Return the head's own output heads, whose products the loss forms."""
    match kind_of(head):
        case "medusa":
            return [made[-1] for made in head.heads]
        case "eagle3":
            return [head.lm_head]
        case "draft":
            return [head.output.head]
    return []


def _layer_sizes(head: Any) -> tuple[int, int, int, int]:
    """Return I, A, G and the number of layers of a head."""
    config = head.text_config if kind_of(head) == "draft" else head.config
    width, _, heads, key_heads = _attention_widths(config, config.hidden_size)
    layers = layer_setting(config, "num_hidden_layers") or getattr(config, "num_layers", 1)
    return (
        layer_setting(config, "intermediate_size") or 4 * config.hidden_size,
        heads * width,
        key_heads * width,
        layers,
    )


def _flops(weight: Tensor) -> int:
    """Return the operations of a row's product with a matrix, and of its gradients."""
    return (6 if weight.requires_grad else 4) * weight.numel()


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
    key_width, value_width, heads, key_heads = _attention_widths(config, D)
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


def _attention_widths(config: Any, hidden_size: int) -> tuple[int, int, int, int]:
    """Return the widths of a key and of a value of one head, and the numbers of query heads and of key heads."""
    heads: int = layer_setting(config, "num_attention_heads")
    width: int = layer_setting(config, "head_dim") or hidden_size // heads
    key_heads: int = layer_setting(config, "num_key_value_heads") or heads
    nope = getattr(config, "qk_nope_head_dim", None)
    if nope is None:
        return width, width, heads, key_heads
    return nope + config.qk_rope_head_dim, config.v_head_dim, heads, heads  # latent attention


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
