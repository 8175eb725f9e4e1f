"""Parallel forms of a head in training: replicated in every process, or sharded over them.

| form         | weights      | optimizer's state | launch                           |
|--------------|--------------|-------------------|----------------------------------|
| Replicas     | whole        | whole             | one process, or DDP              |
| FullySharded | parts        | parts             | FSDP2, torch's `fully_shard`     |
| Zero         | whole, parts | parts             | DeepSpeed's ZeRO, stages 1 to 3  |

The forms make the same steps: they divide, clip and apply the gradients in the same way. Each form can read the
checkpoints of all forms.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from heads.errors import UserError
from train.launch import wanted_mode
from train.optim import Muon, make_optimizer
from train.recipe import Train
from train.trained import Trained

Tensors = dict[str, Tensor]
Read = Callable[[Tensors], None]
"""Fills tensors with the tensors of the same names in a checkpoint."""
PARTITIONS = {
    False: frozenset({"single_partition_of_fp32_groups", "bit16_groups", "_hp_mapping"}),
    True: frozenset({"fp32_partitioned_groups_flat", "fp16_groups", "grad_position", "get_param_id", "ds_numel"}),
}
"""Attributes of DeepSpeed's optimizer and parameters that are read here; True: in stage 3, False: before it."""


class Replicas:
    """The replicated form: every process holds the whole head and the whole state of its optimizer."""

    in_parts = False
    """True if every process writes its own part of a checkpoint."""
    touches = True
    """False if a parameter cannot be read outside its module."""

    def __init__(self, trained: Trained, settings: Train, accelerator: Accelerator, passes: int) -> None:
        """`passes`: forward passes of each process in one step."""
        self.trained, self.settings, self.accelerator, self.passes = trained, settings, accelerator, passes
        self.loss_factor = accelerator.num_processes
        """Factor of the loss that undoes the averaging of gradients over processes."""
        self.prepare()

    def prepare(self) -> None:
        """Create `optimizer` and `model`, whose forward pass is that of `trained`."""
        self.optimizer = self.make_optimizer()
        self.model: nn.Module = self.accelerator.prepare(self.trained)

    def make_optimizer(self) -> torch.optim.Optimizer:
        products = torch.bfloat16 if self.accelerator.mixed_precision == "bf16" else torch.float32
        return make_optimizer(self.trained.parts(), self.settings, products)

    def one_pass(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of one forward and backward pass of a step. DDP reduces gradients only in the last pass.
        Sharded forms reduce them in each pass, since a process has no room for whole gradients."""
        if last or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        context: AbstractContextManager[None] = self.model.no_sync()
        return context

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a pass to those of the step, which are summed over processes and passes."""
        torch.autograd.backward(self.loss_factor * loss)

    def divide(self, weight: Tensor) -> None:
        """Divide the step's gradients by `weight` ()."""
        for parameter in self.trained.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(weight)

    def update(self) -> Tensor:
        """Clip the gradients, update the weights, and return () the norm of the gradients before clipping."""
        norm = nn.utils.clip_grad_norm_(self.trained.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def head_weights(self) -> Tensors:
        """Return the head's whole state dict. In a sharded form, only the main process gets it."""
        return self.trained.head.state_dict()

    def weights(self) -> Tensors:
        """Return the weights that a checkpoint holds."""
        return self.trained.stored.state_dict()

    def moments(self) -> Tensors:
        """Return the optimizer's state. Each name is the parameter's number and the tensor's name, joined by a dot."""
        states = enumerate(self.optimizer.state[parameter] for parameter in _numbered(self.optimizer))
        return {f"{number}.{name}": value for number, state in states for name, value in state.items()}

    def _hand_over(self, tensors: Tensors, name: str, whole: Tensor) -> None:
        """Store a whole tensor on the main process only. The other processes need no room for all tensors."""
        if self.accelerator.is_main_process:
            tensors[name] = whole.detach().to("cpu", copy=True)

    def take_up(self, read: Read, moments: Iterable[str]) -> None:
        """Load a checkpoint's weights and its optimizer state, whose names are `moments`."""
        read(self.trained.stored.state_dict())
        numbered = _numbered(self.optimizer)
        tensors = {name: _moment_like(name, numbered) for name in moments}
        read(tensors)
        for name, tensor in tensors.items():
            number, entry = name.split(".", 1)
            self.optimizer.state[numbered[int(number)]][entry] = tensor


class FullySharded(Replicas):
    """The form of FSDP2: every process holds its rows of each parameter, and gathers the rest during a pass."""

    in_parts = True

    def prepare(self) -> None:
        mesh = init_device_mesh(self.accelerator.device.type, (self.accelerator.num_processes,))
        reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"
        for layer in _layers(self.trained.drafts.language_model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(self.trained, mesh=mesh)
        self.model, self.optimizer = self.trained, self.make_optimizer()

    def update(self) -> Tensor:
        norm: Any = super().update()
        full: Tensor = norm.full_tensor()
        return full

    def head_weights(self) -> Tensors:
        weights: Tensors = {}
        for name, tensor in super().head_weights().items():
            self._hand_over(weights, name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        return weights


class Zero(Replicas):
    """The form of DeepSpeed's engine. Its optimizer sees one flat float32 partition of the parameters of each group.

    DeepSpeed's public `safe_get_full_*` and `safe_set_full_*` do not suffice: a resumed run has to fill an optimizer
    state that no step has created yet, and Muon has to know the parameters in a partition. So this class reads the
    partitions directly.
    """

    touches = False

    def prepare(self) -> None:
        plugin = self.accelerator.state.deepspeed_plugin
        config: dict[str, Any] = plugin.deepspeed_config
        config["gradient_clipping"] = self.settings.max_grad_norm
        config["gradient_accumulation_steps"] = self.passes
        config["train_micro_batch_size_per_gpu"] = self.settings.batch_size
        config["zero_allow_untested_optimizer"] = True  # Muon
        self.stage = config["zero_optimization"]["stage"]
        self.loss_factor *= self.passes  # the engine divides by the number of passes
        self.optimizer = self.make_optimizer()
        self.numbered = _numbered(self.optimizer)
        self.numbers = {id(parameter): number for number, parameter in enumerate(self.numbered)}
        self.names = {id(parameter): name for name, parameter in self.trained.stored.named_parameters()}
        self.engine, _ = self.accelerator.prepare(self.trained, self.optimizer)
        self.model, self.zero = self.engine, self.engine.optimizer
        self._check_partitions()
        if isinstance(self.optimizer, Muon):
            self.optimizer.apply = self._apply

    def _check_partitions(self) -> None:
        """Raise UserError for a version of DeepSpeed whose partitions cannot be read."""
        import deepspeed

        trained = next(parameter for parameter in self.trained.parameters() if parameter.requires_grad)
        if lacking := sorted(PARTITIONS[self.stage == 3] - {*dir(self.zero), *dir(trained)}):
            raise UserError(
                f"DeepSpeed {deepspeed.__version__}: ZeRO stage {self.stage} has no {lacking[0]}, by which a head is "
                "saved and gone on with; install deepspeed 0.19, or launch with recipes/accelerate/fsdp.yaml"
            )

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(self.loss_factor * loss)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def divide(self, weight: Tensor) -> None:
        from deepspeed.utils.tensor_fragment import safe_update_full_grad_vectorized

        trained = [parameter for parameter in self.trained.parameters() if parameter.requires_grad]
        safe_update_full_grad_vectorized(trained, lambda grad, _: grad / weight)

    def update(self) -> Tensor:
        self.engine.step()
        return torch.as_tensor(self.engine.get_global_grad_norm(), device=self.accelerator.device)

    def head_weights(self) -> Tensors:
        return self.weights()

    def weights(self) -> Tensors:
        weights: Tensors = {}
        with self._gathered():
            for name, tensor in self.trained.stored.state_dict().items():
                self._hand_over(weights, name, tensor)
        for flat, parameters in self._partitions():
            for parameter in parameters:
                self._hand_over(weights, self.names[id(parameter)], self._whole(flat, parameter))
        return weights

    def moments(self) -> Tensors:
        tensors: Tensors = {}
        for flat, parameters in self._partitions():
            for name, state in sorted(self.optimizer.state[flat].items()):  # the same order in all processes
                for parameter in parameters:
                    whole = state if state.dim() == 0 else self._whole(state, parameter)
                    self._hand_over(tensors, f"{self.numbers[id(parameter)]}.{name}", whole)
        return tensors

    @torch.no_grad()
    def take_up(self, read: Read, moments: Iterable[str]) -> None:
        with self._gathered(modifier_rank=0):
            own = self.trained.stored.state_dict()
            weights = {
                name: torch.empty_like(tensor, dtype=torch.float32 if tensor.is_floating_point() else None)
                for name, tensor in own.items()
            }
            read(weights)
            for name, tensor in own.items():
                tensor.copy_(weights[name])
            tensors = {name: _moment_like(name, self.numbered, torch.float32) for name in moments}
        read(tensors)
        flats = {}
        for flat, parameters in self._partitions():
            for parameter in parameters:
                self._keep(weights[self.names[id(parameter)]], flat.data, parameter)
                flats[id(parameter)] = flat
        for name, whole in tensors.items():
            number, entry = name.split(".", 1)
            owner = self.numbered[int(number)]
            flat = flats[id(owner)]
            if whole.dim() == 0:
                self.optimizer.state[flat][entry] = whole
            else:
                self._keep(whole, self.optimizer.state[flat].setdefault(entry, torch.zeros_like(flat)), owner)

    def _gathered(self, modifier_rank: int | None = None) -> AbstractContextManager[None]:
        """Return a context in which parameters are whole. Changes made by process `modifier_rank` are kept. It has no
        effect before stage 3."""
        import deepspeed

        whole = deepspeed.zero.GatheredParameters
        context: AbstractContextManager[None] = whole(list(self.trained.parameters()), modifier_rank=modifier_rank)
        return context

    def _partitions(self) -> Iterator[tuple[Tensor, list[nn.Parameter]]]:
        """Yield this process's flat partitions, each with the parameters in it."""
        if self.stage == 3:
            yield from zip(self.zero.fp32_partitioned_groups_flat, self.zero.fp16_groups, strict=True)
        else:
            yield from zip(self.zero.single_partition_of_fp32_groups, self.zero.bit16_groups, strict=True)

    def _part(self, parameter: Any) -> tuple[slice, slice]:
        """Return this process's part of a parameter: its slice in the parameter, and its slice in the partition."""
        if self.stage == 3:
            _, at, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
            begin = self.accelerator.process_index * size
            size = max(0, min(size, parameter.ds_numel - begin))
        elif parameter._hp_mapping is None:
            begin = at = size = 0
        else:
            ours, flat = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
            begin, at, size = ours.start, flat.start, flat.numel
        return slice(begin, begin + size), slice(at, at + size)

    def _whole(self, flat: Tensor, parameter: Any) -> Tensor:
        """Return the values of a whole parameter, gathered from the processes' flat partitions."""
        shape = getattr(parameter, "ds_shape", parameter.shape)
        own, place = self._part(parameter)
        whole = torch.zeros(shape, dtype=flat.dtype, device=self.accelerator.device)
        whole.view(-1)[own] = flat.detach()[place].to(whole.device)
        all_reduce(whole)
        return whole

    def _keep(self, whole: Tensor, flat: Tensor, parameter: Any) -> None:
        """Copy this process's part of a whole parameter into its flat partition."""
        own, place = self._part(parameter)
        flat[place] = whole.reshape(-1)[own].to(flat)

    def _apply(self, flat: Tensor, values: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """`train.optim.Apply` for flat partitions."""
        (parameters,) = [parameters for partition, parameters in self._partitions() if partition is flat]
        changed = torch.zeros_like(values)
        for parameter in parameters:
            self._keep(change(self._whole(values, parameter)), changed, parameter)
        return changed


def make_form(trained: Trained, settings: Train, accelerator: Accelerator, passes: int) -> Replicas:
    """Return the form of the head for the mode of this launch."""
    forms = {"ddp": Replicas, "fsdp": FullySharded, "deepspeed": Zero}
    mode = wanted_mode()
    if mode == "fsdp" and accelerator.num_processes == 1:
        mode = "ddp"  # the shard of a single process is the whole head
    return forms[mode](trained, settings, accelerator, passes)


def _layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers of a draft model, or none for a head without a language model."""
    if model is None:
        return []
    names = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in names]


def _numbered(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters, in the order of their numbers."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _moment_like(name: str, numbered: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor for one entry of the optimizer's state: () for `step`, else of its parameter's shape."""
    number, entry = name.split(".", 1)
    return torch.zeros(()) if entry == "step" else torch.zeros_like(numbered[int(number)], dtype=dtype)
