"""Parallel strategies of a head in training: replicated in every process, or sharded over them.

| strategy     | weights      | optimizer's state | launch                           |
|--------------|--------------|-------------------|----------------------------------|
| Replicated   | whole        | whole             | one process, or DDP              |
| FullySharded | parts        | parts             | FSDP2, torch's `fully_shard`     |
| Zero         | whole, parts | parts             | DeepSpeed's ZeRO, stages 1 to 3  |

The strategies make the same steps: they divide, clip and apply the gradients in the same way. A checkpoint holds whole
tensors, so each strategy can read the checkpoints of all. Under ZeRO the optimizer is always AdamW: DeepSpeed's Muon
clips its updates instead of the gradients and scales them otherwise, so a recipe's learning rate does not fit it.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from heads.core.contract import Batch, HeadLoss
from train.recipe.recipe import Train
from train.steps.accelerate_launch import wanted_mode
from train.steps.optimizer import make_optimizer

Tensors = dict[str, Tensor]
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""Whole tensors, in the main process's memory. The other processes get none."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's entries of the shape of their parameter."""


class LossModule(nn.Module):
    """The module that DDP, FSDP and DeepSpeed wrap: its forward pass is the head's loss."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head: Any = head

    def forward(self, batch: Batch, scale: Tensor, touch_all: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the fields of `HeadLoss`. `touch_all`: give every parameter a gradient."""
        result: HeadLoss = self.head.loss(batch, scale)
        loss = result.loss
        if touch_all or not loss.requires_grad:  # otherwise DDP would wait for gradients that never arrive
            loss = loss + sum(parameter.sum() * 0 for parameter in self.parameters() if parameter.requires_grad)
        return loss, result.sums, result.correct, result.weight


class Replicated:
    """Every process holds the whole head and the whole state of its optimizer."""

    needs_all_gradients = True
    """True if the backward pass waits for a gradient of every parameter."""

    def __init__(self, module: LossModule, settings: Train, accelerator: Accelerator, passes: int) -> None:
        """`passes`: forward passes of each process in one step."""
        self.module = module
        self.settings = settings
        self.accelerator = accelerator
        self.passes = passes
        self.head = module.head
        self.loss_factor = accelerator.num_processes
        """Factor of the loss that undoes the averaging of gradients over processes."""
        self.prepare()

    def prepare(self) -> None:
        self.optimizer = self.make_optimizer()
        self.model: nn.Module = self.accelerator.prepare(self.module)

    def make_optimizer(self) -> torch.optim.Optimizer:
        products = torch.bfloat16 if self.accelerator.mixed_precision == "bf16" else torch.float32
        return make_optimizer(self.head, self.settings, products)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context of a pass that is not the last of its step: DDP reduces gradients only in the last one.
        Sharded strategies reduce them in each pass, since a process has no room for whole gradients."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a pass to those of the step, which are summed over processes and passes."""
        torch.autograd.backward(self.loss_factor * loss)

    def divide_grads(self, weight: Tensor) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(weight)

    def update(self) -> Tensor:
        """Clip the gradients, update the weights, and return () the norm of the gradients before clipping."""
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def weights(self) -> Tensors:
        """Return the head's whole state dict. Only the main process gets it."""
        return cast(Tensors, get_model_state_dict(self.head, options=WHOLE))

    def optimizer_state(self) -> Tensors:
        """Return the optimizer's whole state, each tensor named PARAMETER.ENTRY. Only the main process gets it."""
        state: Any = get_optimizer_state_dict(self.head, self.optimizer, options=WHOLE)
        return flatten_state(state.get("state", {}))

    def load(self, weights: Tensors, optimizer_state: Tensors) -> None:
        """Load whole tensors of any strategy. ValueError if they are not this head's."""
        state: Any = get_optimizer_state_dict(self.head, self.optimizer)  # creates it by a step that changes nothing
        check_alike(self.head.state_dict(), weights)
        check_alike(flatten_state(state["state"]), optimizer_state)
        for name, entries in state["state"].items():
            state["state"][name] = {entry: optimizer_state[f"{name}.{entry}"] for entry in entries}
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.head, dict(weights), options=options)
        set_optimizer_state_dict(self.head, self.optimizer, state, options=options)


class FullySharded(Replicated):
    """FSDP2: every process holds its rows of each parameter, and gathers the rest during a pass."""

    def prepare(self) -> None:
        mesh = init_device_mesh(self.accelerator.device.type, (self.accelerator.num_processes,))
        reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"
        model = self.head.language_model
        names = () if model is None else model._no_split_modules or ()
        for layer in [layer for layer in self.head.modules() if type(layer).__name__ in names]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(self.module, mesh=mesh)
        self.model = self.module
        self.optimizer = self.make_optimizer()

    def update(self) -> Tensor:
        norm: Any = super().update()
        full: Tensor = norm.full_tensor()
        return full


class Zero(Replicated):
    """DeepSpeed's engine, which keeps float32 weights and the optimizer's state in flat partitions."""

    needs_all_gradients = False  # nor could stage 3 read a parameter outside its module

    def prepare(self) -> None:
        config: dict[str, Any] = self.accelerator.state.deepspeed_plugin.deepspeed_config
        config["gradient_clipping"] = self.settings.max_grad_norm
        config["gradient_accumulation_steps"] = self.passes
        config["train_micro_batch_size_per_gpu"] = self.settings.batch_size
        self.stage = config["zero_optimization"]["stage"]
        self.loss_factor *= self.passes  # the engine divides by the number of passes
        self.optimizer = make_optimizer(self.head, self.settings.model_copy(update={"optimizer": "adamw"}))
        self.engine, _ = self.accelerator.prepare(self.module, self.optimizer)
        self.model = self.engine
        # Before stage 3, DeepSpeed takes up the state once, in its first step, when only the first group has one.
        for partition in (p for group in self.optimizer.param_groups for p in group["params"]):
            zeros = {entry: torch.zeros_like(partition) for entry in MOMENTS}
            self.optimizer.state[partition] = {"step": torch.zeros(()), **zeros}
        self.parameters = {name: p for name, p in self.head.named_parameters() if p.requires_grad}

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(self.loss_factor * loss)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def divide_grads(self, weight: Tensor) -> None:
        from deepspeed.utils.tensor_fragment import safe_update_full_grad_vectorized

        safe_update_full_grad_vectorized(list(self.parameters.values()), lambda grad, _: grad / weight)

    def update(self) -> Tensor:
        self.engine.step()
        return torch.as_tensor(self.engine.get_global_grad_norm(), device=self.accelerator.device)

    def weights(self) -> Tensors:
        from deepspeed.utils import safe_get_full_fp32_param

        weights: Tensors = {}
        with self._gathered():
            for name, tensor in self.head.state_dict().items():
                self._hand_over(weights, name, tensor)
        for name, parameter in self.parameters.items():
            self._hand_over(weights, name, safe_get_full_fp32_param(parameter))
        return weights

    def optimizer_state(self) -> Tensors:
        from deepspeed.utils import safe_get_full_optimizer_state

        state: Tensors = {}
        steps = next(iter(self.optimizer.state.values()))["step"]
        for name, parameter in self.parameters.items():
            self._hand_over(state, f"{name}.step", steps)
            for entry in MOMENTS:
                self._hand_over(state, f"{name}.{entry}", safe_get_full_optimizer_state(parameter, entry))
        return state

    @torch.no_grad()
    def load(self, weights: Tensors, optimizer_state: Tensors) -> None:
        with self._gathered():
            check_alike(self.head.state_dict(), weights)
            shapes = {f"{name}.{entry}": p for name, p in self.parameters.items() for entry in MOMENTS}
            check_alike(shapes | {f"{name}.step": torch.zeros(()) for name in self.parameters}, optimizer_state)
        with torch.enable_grad():  # DeepSpeed creates the optimizer's state in its first step
            for _ in range(self.passes):
                with self._gathered():
                    self.backward(torch.stack([0 * p.sum() for p in self.parameters.values()]).sum())
        self.engine.step()
        with self._gathered(modifier_rank=0):
            for name, tensor in self.head.state_dict().items():
                tensor.copy_(weights[name])
        for name, parameter in self.parameters.items():
            self._set(parameter, None, weights[name])
            for entry in MOMENTS:
                self._set(parameter, entry, optimizer_state[f"{name}.{entry}"])
        steps = optimizer_state[f"{next(iter(self.parameters))}.step"]  # every parameter has made as many
        for state in self.optimizer.state.values():
            state["step"].copy_(steps)

    def _set(self, parameter: nn.Parameter, entry: str | None, whole: Tensor) -> None:
        """Set a parameter's entry of the optimizer's state, or its float32 values, from a tensor that all processes
        have."""
        from deepspeed import utils

        name = "full"
        values = whole.to(self.accelerator.device)
        if self.stage == 3:  # DeepSpeed's function for whole values fails where they cannot be divided equally
            world = self.accelerator.num_processes
            rank = self.accelerator.process_index
            share = -(-values.numel() // world)
            padded = nn.functional.pad(values.flatten(), (0, share * world - values.numel()))
            name = "local"
            values = padded[rank * share : (rank + 1) * share]
        if entry is None:
            getattr(utils, f"safe_set_{name}_fp32_param")(parameter, values)
        else:
            getattr(utils, f"safe_set_{name}_optimizer_state")(parameter, values, entry)

    def _hand_over(self, tensors: Tensors, name: str, whole: Tensor) -> None:
        """Store a whole tensor on the main process only. The other processes need no room for all tensors."""
        if self.accelerator.is_main_process:
            tensors[name] = whole.detach().to("cpu", copy=True)

    def _gathered(self, modifier_rank: int | None = None) -> AbstractContextManager[None]:
        """Return a context in which parameters are whole. Changes made by process `modifier_rank` are kept. It has no
        effect before stage 3."""
        import deepspeed

        whole = deepspeed.zero.GatheredParameters
        context: AbstractContextManager[None] = whole(list(self.module.parameters()), modifier_rank=modifier_rank)
        return context


def make_strategy(module: LossModule, settings: Train, accelerator: Accelerator, passes: int) -> Replicated:
    mode = wanted_mode()
    if mode == "fsdp" and accelerator.num_processes == 1:
        mode = "ddp"  # the shard of a single process is the whole head
    return {"ddp": Replicated, "fsdp": FullySharded, "deepspeed": Zero}[mode](module, settings, accelerator, passes)


def flatten_state(state: dict[str, Tensors]) -> Tensors:
    """Return an optimizer's state with one name, PARAMETER.ENTRY, for each tensor."""
    return {f"{name}.{entry}": tensor for name, entries in state.items() for entry, tensor in entries.items()}


def check_alike(expected: Tensors, saved: Tensors) -> None:
    """Raise ValueError if tensors of a checkpoint have other names or shapes than this run's."""
    if odd := sorted(expected.keys() ^ saved.keys()):
        raise ValueError(f"{odd[0]} is in only one of the checkpoint and this run")
    for name, tensor in expected.items():
        if saved[name].shape != tensor.shape:
            raise ValueError(f"{name} has shape {tuple(saved[name].shape)}, this run's {tuple(tensor.shape)}")
