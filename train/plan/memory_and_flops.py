"""The memory and the operations of a run, by formulas from the shapes of its target and its head.

Rows are full, with one document each, and every token is a label, so the counts are upper bounds. Letters: B batch,
T tokens, N = B * T, D hidden, I intermediate, V vocabulary, Vd draft vocabulary, L auxiliary layers, K depth; w bytes
of a number. A target's forward pass of a micro-batch, with w bytes of its own dtype:

    FLOP per token = 2 * active parameters of the layers + 2 * T * heads * (key width + value width) * attention layers
    bytes          = N w ((2 + L) D + widest)                       two residuals, L auxiliary hidden states
                   + B T^2 (1 + w)                                  the mask twice, in families that need it whole
    widest         = the larger of 3 I, or k (3 I + 2 D) with k experts per token, and twice a layer's queries, keys
                     and values

A head's layers count their own cost (`DraftHead.step_cost`). The loss forms logits in chunks of rows, of which several
tensors exist at a time.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads.core.contract import ACTIVATION_SHARE
from heads.methods.state_recycling import device_memory
from heads.parts.losses import CHUNK_BYTES, MIN_ROWS
from heads.parts.part_settings import LABELS
from heads.saved import check_unsaved
from heads.targets.families import attention_widths, layer_setting
from heads.targets.hf_forward import takes_block_masks
from heads.targets.shape_target import load_shape
from train.recipe.head_section import make_head
from train.recipe.recipe import Recipe
from train.steps.draft_lora import add_adapters
from train.steps.fast_dtype import fastest_dtype
from train.steps.optimizer import make_optimizer
from train.steps.stepper import rows_per_step

GIB = 2**30
aten = torch.ops.aten
COPIES = {
    "ddp": "buckets of gradients",
    "fsdp": "gathered weights",
    "zero2": "working copy of the head",
    "zero3": "gathered weights",
}
"""The copy that every process of several holds in addition to its part, by the way to share the training state."""
STATE = ("head, float32", "gradients, float32", "optimizer")
"""Rows of the plan that are sharded over the processes. With ddp, each process holds all of them."""
ACTIVATIONS = "activations of a micro-batch"
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
"""Names that configs use for the number of experts."""


@dataclass(frozen=True)
class Launch:
    processes: int = 1
    sharing: str = "ddp"
    features: str = "process"
    memory: float | None = None
    """Memory of a GPU in GiB. None: plan for this machine's device."""

    @property
    def device(self) -> str:
        return "cuda" if self.memory is not None or torch.cuda.is_available() else "cpu"

    def optimizer(self, wanted: Literal["adamw", "muon"]) -> Literal["adamw", "muon"]:
        """Return the optimizer of a run that wants one: under ZeRO always AdamW (`train.steps.parallel`)."""
        return "adamw" if self.sharing.startswith("zero") else wanted

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of one device. On a CPU: all memory of this machine or container."""
        return device_memory(torch.device(self.device)) if self.memory is None else round(self.memory * GIB)


class Plan:
    """The resources that a recipe's run needs. Its target and its head are built without memory, once: the recipe may
    be replaced by one with other rows or steps."""

    def __init__(self, recipe: Recipe, launch: Launch) -> None:
        self.recipe = recipe
        self.launch = launch
        self.likely_steps: int | None = None
        """Steps of the run if the answers are half as long as they may be, where the data are known."""
        settings = recipe.target
        section = recipe.head
        self.bf16 = recipe.train.precision == "bf16"
        if recipe.train.precision == "auto":
            fastest = torch.bfloat16 if launch.memory else fastest_dtype(torch.device(launch.device))
            self.bf16 = fastest == torch.bfloat16
        if section.init_from is None and getattr(section, "mask_token_id", 0) is None:
            section = section.model_copy(update={"mask_token_id": 0})  # any id: it would be chosen from the tokenizer
        dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
        if settings.dtype == "auto" and launch.device == "cpu":
            dtype = torch.float32
        with Shapes():
            files = settings.model_dump(include={"trust_remote_code", "gguf_file"})
            target = load_shape(settings.path, dtype=dtype, **files)
            self.head = make_head(section, target, torch.zeros(target.vocab_size, dtype=torch.int64))
            weights: dict[str, Tensor] = self.head.to_checkpoint()
            self.verdicts = check_unsaved(self.head, target)
            """What engines will make of the head."""
            add_adapters(self.head)
            optimizer = launch.optimizer(recipe.train.optimizer)
            groups = make_optimizer(self.head, recipe.train.model_copy(update={"optimizer": optimizer})).param_groups
        self.target = target
        self.copy_bytes = sum(_size(tensor, target.dtype.itemsize) for tensor in weights.values())
        width = getattr(torch, recipe.train.save_dtype).itemsize
        self.saved_bytes = sum(_size(tensor, width) for tensor in weights.values())
        self.trained = [p for p in self.head.parameters() if p.requires_grad]
        self.gradients = sum(map(_size, self.trained))
        # Muon has one moment, AdamW two and a count of the steps.
        self.optimizer = sum(_size(p) * (1 if "momentum" in group else 2) for group in groups for p in group["params"])
        self.optimizer += sum(4 * len(group["params"]) for group in groups if "momentum" not in group)
        in_layers = {name: p.numel() for name, p in target.layers.named_parameters()}
        self.parameters = sum(p.numel() for p in target.model.parameters())
        """Of the target, as are the following."""
        self.end_bytes = (self.parameters - sum(in_layers.values())) * target.dtype.itemsize
        """Bytes outside the layers: embeddings, final norm, output head."""
        experts: int = next((count for name in EXPERTS if (count := getattr(target.config, name, None))), 0)
        self.experts_per_token: int = (getattr(target.config, "num_experts_per_tok", None) or 0) if experts else 0
        routed = sum(size for name, size in in_layers.items() if ".experts." in name)
        idle = round(routed * (1 - self.experts_per_token / experts)) if experts else 0
        self.active = self.parameters - idle
        """Parameters without the experts to which a token is not routed."""
        self.layers_active = sum(in_layers.values()) - idle

    def layer_bytes(self, quantize: str | None) -> list[int]:
        """Return the bytes of each layer of the target. A quantised matrix has one byte per weight, and a scale per
        row."""
        width = self.target.dtype.itemsize
        sizes = []
        for layer in self.target.layers:
            matrices = [m.weight.shape for m in layer.modules() if quantize and isinstance(m, nn.Linear)]
            saved = sum(rows * (columns * (width - 1) - width) for rows, columns in matrices)
            sizes.append(sum(p.numel() for p in layer.parameters()) * width - saved)
        return sizes

    @property
    def target_bytes(self) -> int:
        return self.end_bytes + sum(self.layer_bytes(self.recipe.target.quantize))

    @property
    def rows(self) -> int:
        """Rows of one optimizer step over all processes."""
        return rows_per_step(self.recipe.train, self.recipe.data.context_length, self.launch.processes)

    @property
    def step_tokens(self) -> int:
        return self.rows * self.recipe.data.context_length

    @property
    def features_bytes(self) -> int:
        """Bytes of the target's features of one micro-batch, as the loss reads them."""
        tokens = self.recipe.train.batch_size * self.recipe.data.context_length
        return 4 * tokens * (2 + len(self.head.aux_layer_ids)) * self.target.hidden_size

    def device(self) -> dict[str, int]:
        """Return the bytes on one device, by row of the plan."""
        launch = self.launch
        parts = 1 if launch.sharing == "ddp" else launch.processes
        head_bytes = sum(map(_size, self.head.parameters()))
        sharded = -(-self.target_bytes // launch.processes)
        if launch.processes > 1:
            sharded += max(self.layer_bytes(self.recipe.target.quantize))
        rows = {"target": {"process": self.target_bytes, "sharded": sharded}.get(launch.features, self.end_bytes)}
        for name, size in zip(STATE, (head_bytes, self.gradients, self.optimizer), strict=True):
            rows[name] = -(-size // parts)
        if launch.processes > 1:
            rows[COPIES[launch.sharing]] = self.gradients if launch.sharing == "ddp" else head_bytes // (1 + self.bf16)
        rows["the head as it is measured"] = self.copy_bytes
        target_pass = self.target_cost()[0] if launch.features in ("process", "sharded") else 0
        rows[ACTIVATIONS] = max(self.head_cost()[0], target_pass)
        return rows

    def disk(self) -> dict[str, int]:
        """Return the bytes in the run's folder, by row of the plan. Each file is written beside the one it replaces."""
        kept, whole = self.recipe.train.keep_checkpoints, sum(map(_size, self.head.state_dict().values()))
        return {
            f"{kept} checkpoints, and one being written": (kept + 1) * (whole + self.optimizer),
            "the head, and one being written": 2 * self.saved_bytes,
        }

    def target_cost(self) -> tuple[int, float]:
        """Return the bytes of activations of a micro-batch's forward pass, and the operations of one token's pass
        through the layers, by the formulas above. Logits are counted with the head's loss."""
        target = self.target
        config = self.target.config
        L = len(self.head.aux_layer_ids)
        B = self.recipe.train.batch_size
        T = self.recipe.data.context_length
        D = target.hidden_size
        w = target.dtype.itemsize
        key_width, value_width, heads, key_heads = attention_widths(config, D)
        intermediate: int = layer_setting(config, "intermediate_size") or 4 * D
        widest = max(3 * intermediate, 2 * (heads + key_heads) * (key_width + value_width))
        if self.experts_per_token:
            inner = layer_setting(config, "moe_intermediate_size") or intermediate
            widest = max(widest, self.experts_per_token * (3 * inner + 2 * D))
        mask = 0 if takes_block_masks(target.base, config) else B * T**2 * (1 + w)
        flops = 2 * self.layers_active + 2 * T * heads * (key_width + value_width) * target.attention_layers
        return B * T * w * ((2 + L) * D + widest) + mask, flops

    def head_cost(self) -> tuple[int, float]:
        """Return the bytes of a micro-batch's loss and gradient at their peak, with the target's features and without
        weights and gradients, and the operations of one token, with the target's logits."""
        head = self.head
        target = self.target
        B = self.recipe.train.batch_size
        T = self.recipe.data.context_length
        D = target.hidden_size
        V = target.vocab_size
        K = head.depth
        w = 2 if self.bf16 else 4
        cost = head.step_cost(B, T, width=w, most=round(ACTIVATION_SHARE * self.launch.memory_bytes))
        R = cost.rows
        Vd = cost.logits
        outputs = cost.outputs
        read = outputs[0].in_features if outputs else D  # width of the states of the loss
        trained = [end.weight for end in outputs if end.weight.requires_grad]
        kept = cost.kept + 2 * K * R * read * w  # these and their gradient
        if self.bf16:  # autocast's copies of the weights
            linear = {m for m in head.modules() if isinstance(m, nn.Linear)}
            kept += 2 * sum(m.weight.numel() for m in linear - {*outputs})
        if (4 if trained else target.dtype.itemsize) != w:  # an output head, in the states' dtype
            kept += w * Vd * read
        narrow = min(w, target.dtype.itemsize)
        if narrow < target.dtype.itemsize:  # the target's output head, in bfloat16
            kept += narrow * V * D
        flops = cost.flops + K * R * (6 if trained else 4) * read * Vd
        if getattr(head.config, "loss", None) != LABELS:
            flops += 2 * D * V * cost.target_rows
        rows = min(cost.chunked, max(MIN_ROWS, CHUNK_BYTES[self.launch.device] // (4 * V)))
        widened = V * (4 + narrow % 4) + 3 * 4 * Vd  # the target's logits, in float32 and in its dtype
        compared = (22 if cost.chunked == R else 31) * Vd  # two distributions, a divergence or more, and the gradient
        loss = rows * max(widened, compared)
        if trained:
            loss = max(loss, rows * 20 * Vd + _size(trained[0]))  # a chunk's gradient of the output head
        kept += sum(map(_size, trained)) + max(loss, cost.backward)
        if self.rows == B * self.launch.processes:  # one pass: the gradients are not there yet at the peak
            kept -= self.gradients
        return self.features_bytes + max(0, kept), flops / (B * T)


def _size(tensor: Tensor, width: int | None = None) -> int:
    """Return the bytes of a tensor. `width`: bytes per number, for a floating-point tensor."""
    return tensor.numel() * (width if width and tensor.is_floating_point() else tensor.element_size())


class Shapes(TorchDispatchMode):
    """A mode in which modules are built without memory: floating-point tensors have shapes and no values. Ids and
    other integers are real, since they choose rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        without_values = any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)
        if without_values and func is aten._local_scalar_dense.default:
            return 1.0  # scales of initial weights, whose values do not matter here
        if without_values and func is aten.equal.default:
            return True  # only compares a head file's copy of the target's tables, which is usually equal
        makes_numbers = not tensors and func._overloadpacket is not aten.arange and _is_float(kwargs)
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
