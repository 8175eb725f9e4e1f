"""The plan of a training run: memory and disk in bytes, tokens, operations and hours."""

import math
import os
from dataclasses import dataclass

import numpy as np
import torch

from heads.recurrent.draft import total_memory
from train.data.corpus import TYPES
from train.fast_dtype import fastest_dtype, measured_tflops
from train.features.cache import stored_bytes
from train.features.settings import CacheFeatures
from train.planning.counting import HeadCount, TargetCount, count_run
from train.recipe import Recipe
from train.step import rows_per_step

TOKEN_BYTES = sum(np.dtype(TYPES[part]).itemsize for part in ("tokens", "labels"))
"""Bytes on disk of a tokenised token with its label."""
ANSWER_BYTES = 9
"""Bytes on disk of a token of an answer: in the store of answers, and in the documents with its label."""
CACHE_DTYPE: str = CacheFeatures.model_fields["dtype"].default
LIBRARIES = 2**30
"""Host memory of a process that has imported torch, transformers and accelerate."""
LARGE = 2048
"""Maximum rows and width of the product that is timed on a CPU."""
PER_NODE = 8
"""Maximum number of processes on one node, one per device."""


SHARINGS = {
    "ddp": "buckets of gradients",
    "fsdp": "gathered weights",
    "zero2": "working copy of the head",
    "zero3": "gathered weights",
}
"""Ways to share the head's training state between processes, each with the copy that every process of several holds
in addition to its part."""
STATE = ("head", "gradients", "optimizer")
"""Rows of the plan that are sharded over the processes. With ddp, each process holds all of them."""
FEATURES = ("process", "sharded", "vllm", "cache")
"""Places of the target: whole in each process, its layers sharded over the processes, on a server, or in a filled
folder. In the last two cases a process holds only the embeddings, the final norm and the output head."""


@dataclass(frozen=True)
class Launch:
    """The launch for which a run is planned."""

    processes: int = 1
    sharing: str = "ddp"
    features: str = "process"
    memory: float | None = None
    """Memory of a GPU in GiB. None: plan for this machine's device."""

    @property
    def device(self) -> str:
        return "cuda" if self.memory is not None or torch.cuda.is_available() else "cpu"

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of one device. On a CPU: all memory of this machine."""
        if self.memory is not None:
            return round(self.memory * 2**30)
        return total_memory(torch.device(self.device))

    def bf16(self, precision: str) -> bool:
        """Return True if matrix products are in bfloat16."""
        if precision != "auto":
            return precision == "bf16"
        return self.memory is not None or fastest_dtype(torch.device(self.device)) == torch.bfloat16


@dataclass(frozen=True)
class Plan:
    """The counts of a recipe, and the resources that follow from them for a launch."""

    recipe: Recipe
    launch: Launch
    target: TargetCount
    head: HeadCount

    def target_bytes(self) -> int:
        """Return the bytes of the target on one device."""
        match self.launch.features:
            case "process":
                return self.target.bytes
            case "sharded":
                divided = -(-self.target.bytes // self.launch.processes)
                return divided + (self.target.layer_bytes if self.launch.processes > 1 else 0)
            case _:
                return self.target.end_bytes

    def device(self) -> dict[str, int]:
        """Return the bytes on one device, by row of the plan."""
        head, launch = self.head, self.launch
        parts = 1 if launch.sharing == "ddp" else launch.processes
        rows = {"target": self.target_bytes()}
        for name, size in zip(STATE, (head.bytes, head.gradients, head.optimizer), strict=True):
            rows[name] = -(-size // parts)
        if launch.processes > 1:
            narrow = launch.bf16(self.recipe.train.precision)
            rows["extra"] = head.gradients if launch.sharing == "ddp" else head.bytes // (1 + narrow)
        rows["measured copy"] = head.copy_bytes
        rows["activations"] = max(head.activations, self.target_activations())
        return rows

    def target_activations(self) -> int:
        """Return the target's bytes of activations for one micro-batch, 0 if it runs outside the processes."""
        return self.target.activations if self.launch.features in ("process", "sharded") else 0

    def device_bytes(self) -> int:
        return sum(self.device().values())

    def host(self) -> dict[str, int]:
        """Return the peak bytes of host memory, of a process and of a node."""
        loaded = self.target.bytes if self.launch.features == "process" else self.target_bytes()
        written = 2 * self.head.checkpoint  # as tensors and as the bytes of a file
        beside = self.device_bytes() if self.launch.device == "cpu" else 0
        process = LIBRARIES + max(loaded + self.head.bytes, written, beside)
        return {"process": process, "node": process * min(self.launch.processes, PER_NODE)}

    def answer_tokens(self) -> int:
        """Return the maximum number of tokens of the target's answers, which are generated before training. All answers
        of a conversation except the last are in its longest prompt."""
        made, data = self.recipe.data.regenerate, self.recipe.data
        if made is None:
            return 0
        before = made.prompt_tokens if any(source.kind == "chat" for source in data.sources) else 0
        return (self.prompts() or 0) * (before + made.new_tokens)

    def prompts(self) -> int | None:
        """Return the maximum number of prompts that the target answers, or None if the recipe does not determine it."""
        made, limits = self.recipe.data.regenerate, [source.limit for source in self.recipe.data.sources]
        if made is None or made.prompts is not None:
            return None if made is None else made.prompts
        return None if None in limits else sum(limit or 0 for limit in limits)

    def data_tokens(self) -> int | None:
        """Return the maximum number of tokens of the training data, or None if the recipe does not determine it."""
        made, prompts = self.recipe.data.regenerate, self.prompts()
        if made is None or made.share < 1 or prompts is None:
            return None
        return prompts * (made.prompt_tokens + made.new_tokens)

    def disk(self) -> dict[str, int]:
        """Return the bytes on disk, by row of the plan."""
        keep, steps = self.recipe.train.keep_checkpoints, self.steps
        if steps is not None:
            keep = min(keep, -(-steps // self.recipe.train.checkpoint_every))
        rows = {f"{keep} checkpoints, and one being written": (keep + 1) * self.head.checkpoint}
        rows["the head's folder"] = self.head.copy_bytes
        if self.answer_tokens():
            rows["answers, at most"] = ANSWER_BYTES * self.answer_tokens()
        if self.launch.features == "cache":
            tokens = min((tokens for tokens in (self.data_tokens(), self.tokens) if tokens is not None), default=0)
            features = self.recipe.features
            dtype = features.dtype if isinstance(features, CacheFeatures) else CACHE_DTYPE
            rows["cache of features, at most"] = stored_bytes(
                tokens, self.head.aux_layers + 1, self.head.hidden_size, dtype
            )
        return rows

    @property
    def steps(self) -> int | None:
        """Optimizer steps, at most, or None if only the data determine them."""
        train, known = self.recipe.train, self.data_tokens()
        if train.epochs is None:
            return train.steps
        return None if known is None else math.ceil(train.epochs * known / self.step_tokens)

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step over all processes."""
        length = self.recipe.data.context_length
        return rows_per_step(self.recipe.train, length, self.launch.processes) * length

    @property
    def tokens(self) -> int | None:
        return None if self.steps is None else self.steps * self.step_tokens

    def flops_per_token(self) -> tuple[float, float]:
        """Return the operations per token of the target's forward pass and of the head's step, on these devices."""
        elsewhere = self.launch.features in ("vllm", "cache")
        return 0.0 if elsewhere else float(self.target.flops), self.head.flops

    def tflops(self) -> float:
        """Return the TFLOP/s of one device: on a GPU 40% of the dense bfloat16 peak of an H100; on a CPU, which all
        processes share, what a product of a micro-batch reaches here."""
        launch, train = self.launch, self.recipe.train
        if launch.device == "cuda":
            return 0.4 * 989
        dtype = torch.bfloat16 if launch.bf16(train.precision) else torch.float32
        rows = train.batch_size * self.recipe.data.context_length
        share = len(os.sched_getaffinity(0)) / (launch.processes * torch.get_num_threads())
        return measured_tflops(dtype, min(rows, LARGE), min(self.head.hidden_size, LARGE)) * min(1.0, share)

    def hours(self, tflops: float, tokens: float | None = None) -> float:
        """Return the hours that all steps, or steps of so many tokens, take if each device computes at `tflops`
        TFLOP/s."""
        tokens = self.tokens if tokens is None else tokens
        assert tokens is not None
        return tokens * sum(self.flops_per_token()) / (tflops * 1e12 * self.launch.processes) / 3600

    def advice(self) -> list[tuple[str, int]]:
        """Return changes that save memory, each with the bytes on one device after this change alone."""
        rows, whole, launch, train = self.device(), self.device_bytes(), self.launch, self.recipe.train
        found: list[tuple[str, int]] = []
        if train.batch_size > 1:
            less = rows["activations"] - rows["activations"] // train.batch_size
            more = "" if train.tokens_per_step else f" train.grad_accum={train.grad_accum * train.batch_size}"
            found.append((f"train.batch_size=1{more}, the same step", whole - less))
        else:
            length = self.recipe.data.context_length
            found.append((f"data.context_length={length // 2}", whole - rows["activations"] // 2))
        small = self.target.int8_bytes
        if small is not None and small < self.target.bytes and launch.features == "process":
            found.append(("target.quantize=int8", whole - self.target.bytes + small))
        if launch.features == "process":
            room = self.launch.memory_bytes - (whole - rows["target"]) - self.target.layer_bytes
            if room > 0:
                needed = max(2, math.ceil(self.target.bytes / room), launch.processes)
                left = -(-self.target.bytes // needed) + self.target.layer_bytes
                text = f"the target's layers divided among {needed} processes (--features sharded --processes {needed})"
                found.append((text, whole - rows["target"] + left))
            ends = whole - rows["target"] + self.target.end_bytes
            found.append(("the target on a server (--features vllm)", ends))
        if launch.processes > 1 and launch.sharing == "ddp":
            state = sum(rows[name] for name in STATE)
            found.append(("the head's state divided (--sharing fsdp)", whole - state + state // launch.processes))
        return found


def make_plan(recipe: Recipe, launch: Launch) -> Plan:
    """Return the plan of a recipe for a launch. UserError if the run would refuse it, too."""
    train = recipe.train
    rows = rows_per_step(train, recipe.data.context_length, launch.processes)
    passes = rows // (train.batch_size * launch.processes)
    counted = count_run(recipe, launch.device, launch.memory_bytes, passes, bf16=launch.bf16(train.precision))
    return Plan(recipe, launch, *counted)
