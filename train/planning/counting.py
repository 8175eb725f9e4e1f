"""Counts for a plan: parameters, bytes and operations of the target and the head, from shapes alone.

Head: the loss of one micro-batch, its gradient and one optimizer step are run in `Shapes`. The rows are full, with one
document each, and every token is a label, so the counts are upper bounds.

Target: formulas for the forward pass of a micro-batch with N = B * T tokens and w bytes per number:

    FLOP per token = 2 * active parameters of the layers + 2 * T * heads * (key width + value width) * attention layers
    bytes          = N w ((2 + L) D + widest)                       two residuals, L auxiliary hidden states
                   + B T^2 (1 + w)                                  the mask twice, in families that need it whole
    widest         = the larger of 3 I, or k (3 I + 2 D) with k experts per token, and twice a layer's queries, keys
                     and values

Letters: B batch, T tokens, D hidden, I intermediate, L auxiliary layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor, nn

from heads.base import KEPT_SHARE
from heads.errors import UserError
from heads.formats.source import without_pickle
from heads.losses import CHUNK_BYTES, LEAST_ROWS
from heads.target.families import layer_setting
from heads.target.forward import takes_block_masks
from heads.target.hub import is_hub_id, repo_and_revision
from heads.target.quantization import LEAST_SHARE
from heads.target.shape import ShapeTarget, load_shape
from train.adapter import add_adapters
from train.data.packing import Rows
from train.features.batch import make_batch
from train.head_settings import make_head
from train.optim import make_optimizer
from train.parallel import Trained
from train.planning.shapes import Shapes
from train.recipe import Recipe

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
"""Names that configs use for the number of experts."""


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
    frozen: int
    bytes: int
    """Bytes in float32."""
    copy_bytes: int
    """Bytes in the target's dtype: the size of the measured copy and of the head's folder."""
    gradients: int
    optimizer: int
    checkpoint: int
    """Bytes of one checkpoint's tensors."""
    features: int
    """Bytes of the target's features of one micro-batch, as the loss reads them."""
    activations: int
    """Peak bytes in addition to weights and gradients, including features."""
    flops: float
    """Operations of one token: loss and gradient, including the target's logits."""
    chunk: int
    """Bytes of one chunk of the target's logits, part of the activations. A few such chunks exist at a time."""
    aux_layers: int
    hidden_size: int


def count_run(recipe: Recipe, device: str, memory: int, passes: int, *, bf16: bool) -> tuple[TargetCount, HeadCount]:
    """Count a recipe's target and head for a device of type `device` with `memory` bytes, and `passes` per step.
    `bf16`: matrix products are in bfloat16, as under autocast."""
    settings, train, T = recipe.target, recipe.train, recipe.data.context_length
    wanted = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if settings.dtype == "auto" and device == "cpu":
        wanted = torch.float32
    with Shapes() as shapes, _chunks_as_on(device):
        target = load_shape(settings.path, dtype=wanted, trust_remote_code=settings.trust_remote_code)
        head: Any = make_head(_section(recipe), target, torch.zeros(target.vocab_size, dtype=torch.int64))
        head.most_kept = round(KEPT_SHARE * memory)
        copy_bytes = sum(_size(tensor, target.dtype.itemsize) for tensor in head.to_checkpoint().values())
        about_target = count_target(target, train.batch_size, T, len(head.aux_layer_ids), settings.quantize)
        add_adapters(head)
        trained = Trained(head)
        optimizer = make_optimizer(head, train)
        row = 4 * target.vocab_size  # of float32 logits
        parameters = [p for p in trained.parameters() if p.requires_grad]
        gradients = sum(p.numel() * p.element_size() for p in parameters)
        if passes > 1:  # gradients of earlier micro-batches exist already
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        rows = full_rows(train.batch_size, T)
        scale = torch.ones(len(head.depth_weights))
        before = shapes.restart()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            batch = make_batch(target, rows, head.aux_layer_ids, torch.float32)
            features = shapes.live - before
            loss = trained(batch, scale, False)[0]
        loss.backward()
        activations, flops = shapes.peak - before, shapes.flops
        if passes == 1:
            activations = max(features, activations - gradients)
        del batch, loss
        optimizer.step()
        state = sum(_size(value) for entry in optimizer.state_dict()["state"].values() for value in entry.values())
        return about_target, HeadCount(
            trained=sum(p.numel() for p in parameters),
            frozen=sum(p.numel() for p in head.parameters() if not p.requires_grad),
            bytes=sum(_size(p) for p in trained.parameters()),
            copy_bytes=copy_bytes,
            gradients=gradients,
            optimizer=state,
            checkpoint=sum(_size(tensor) for tensor in head.state_dict().values()) + state,
            features=features,
            activations=activations,
            flops=flops / (train.batch_size * T),
            chunk=min(rows.tokens.numel(), max(LEAST_ROWS, CHUNK_BYTES[device] // row)) * row,
            aux_layers=len(head.aux_layer_ids),
            hidden_size=target.hidden_size,
        )


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


def _section(recipe: Recipe) -> Any:
    """Return the recipe's head section, changed to need no download. A missing mask token id becomes 0, since it does
    not affect shapes."""
    changes: dict[str, Any] = {}
    if recipe.head.init_from is not None:
        changes["init_from"] = _here(recipe.head.init_from)
    elif getattr(recipe.head, "mask_token_id", 0) is None:
        changes["mask_token_id"] = 0
    return recipe.head.model_copy(update=changes)


def _here(path: str) -> str:
    """Return a head's path on this machine. UserError if it would have to be downloaded."""
    folder, pickle = without_pickle(path)
    if not is_hub_id(folder):
        return path
    repo, revision = repo_and_revision(folder)
    try:
        folder = snapshot_download(repo, revision=revision, local_files_only=True)
    except LocalEntryNotFoundError:
        raise UserError(
            f"head.init_from: {path} decides the head's shape and is not on this machine, and a plan downloads "
            f"nothing; fetch it first: hf download {repo}{f' --revision {revision}' if revision else ''}"
        ) from None
    return folder if pickle is None else f"{folder}/{pickle}"


def full_rows(B: int, T: int) -> Rows:
    """Return rows of one document each, in which every token is a label."""
    tokens = torch.zeros(B, T, dtype=torch.int64)
    positions = torch.arange(T).expand(B, T)
    return Rows(tokens, torch.ones(B, T, dtype=torch.bool), positions, torch.zeros_like(tokens))


@contextmanager
def _chunks_as_on(device: str) -> Iterator[None]:
    """Use the chunk size of another device in the losses, for tensors without values, which report a CPU."""
    own = CHUNK_BYTES["cpu"]
    CHUNK_BYTES["cpu"] = CHUNK_BYTES[device]
    try:
        yield
    finally:
        CHUNK_BYTES["cpu"] = own


def _size(tensor: Tensor, width: int | None = None) -> int:
    """Return the bytes of a tensor. `width`: bytes per number, for a floating-point tensor."""
    return tensor.numel() * (width if width and tensor.is_floating_point() else tensor.element_size())
