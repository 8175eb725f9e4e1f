"""An Accelerator in the form that `accelerate launch` requested, or a UserError.

Accelerate runs some launches in another form than requested, with exit status 0: two processes, or two machines, become
unrelated runs that write the same files, DeepSpeed and FSDP are dropped on a machine without a GPU, gradients are not
clipped under DeepSpeed, and a launcher killed by a signal leaves its process running. This module handles all such
cases, so that the loop need not.
"""

import fcntl
import os
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    broadcast_object_list,
    gather_object,
)
from transformers import PreTrainedTokenizerBase

from eval.core.command_line import OFF
from eval.measure.open_models import load_pair
from eval.pages.wandb_run import wandb_mode
from heads.core.errors import UserError
from heads.core.files import lock
from heads.targets.frozen_target import FrozenTarget, Place, Placement
from train.core.processes import is_launched
from train.recipe.recipe import Target, Tracking, Train
from train.steps.fast_dtype import fastest_dtype

TIMEOUT = timedelta(hours=2)
"""Longest wait of a process for another one. It must exceed the time of a checkpoint or a measurement."""
LAUNCHERS = ("accelerate", "accelerate-launch", "accelerate.commands.launch")
"""Names of Accelerate's launcher in a command line."""


def make_accelerator(
    settings: Train, begun_in: str | None = None, tracking: Tracking | None = None, folder: Path | None = None
) -> Accelerator:
    """Return the Accelerator of this launch, with the trackers of a run in `folder`.

    Its `mixed_precision`, "bf16" or "no", follows `train.precision`. `begun_in`: the precision of the run to resume,
    as the first process knows it. UserError if the launch cannot run in the form that it requests.
    """
    check_started()
    mode = wanted_mode()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false").lower() not in ("true", "1")
    _check_environment(settings, mode)
    # Accelerate's launcher always sets this variable under DeepSpeed, and it would override the argument below.
    os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
    group = InitProcessGroupKwargs(timeout=TIMEOUT)
    arguments: dict[str, object] = {
        "step_scheduler_with_optimizer": False,
        "kwargs_handlers": [group],
    }
    if tracking is not None and folder is not None:
        arguments["log_with"] = trackers_of(tracking) or None  # it warns about []
        arguments["project_config"] = ProjectConfiguration(logging_dir=str(folder / "tensorboard"))
    if not on_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed would look for a GPU
        if mode == "deepspeed":
            import deepspeed

            warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # of functions that DeepSpeed calls
            # DeepSpeed would compile this C++ extension at the first collective, which fails without ninja.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            os.environ.pop("ACCELERATE_USE_CPU", None)  # with it, Accelerate silently drops DeepSpeed
            group.backend = "gloo"
        else:
            arguments["cpu"] = True
    # Accelerate drops FSDP on a CPU, and `train.steps.parallel` uses torch's own. With the second variable,
    # transformers would load the target's weights only in the first process.
    hidden = {name: os.environ.pop(name, None) for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")}
    PartialState(arguments.get("cpu", False), **group.to_kwargs())
    (begun_in,) = broadcast_object_list([begun_in])  # the checkpoints may be on the first machine alone
    precision = _mixed_precision(settings, torch.device("cuda" if on_gpu else "cpu"), begun_in)
    accelerator = Accelerator(mixed_precision=precision, **arguments)
    if hidden["ACCELERATE_USE_FSDP"] is not None:
        os.environ["ACCELERATE_USE_FSDP"] = hidden["ACCELERATE_USE_FSDP"]
    if not on_gpu and mode != "deepspeed":
        _use_cores()
    actual = "deepspeed" if accelerator.distributed_type == DistributedType.DEEPSPEED else "ddp"
    if accelerator.num_processes != world or (actual == "deepspeed") != (mode == "deepspeed"):
        raise UserError(
            f"the launch asked for {world} processes of {mode}, Accelerate made {accelerator.num_processes} of "
            f"{actual}; check the flags of accelerate launch against `accelerate env`"
        )
    if accelerator.state.deepspeed_plugin is not None:
        _check_deepspeed(accelerator.state.deepspeed_plugin.deepspeed_config)
    if len(precisions := set(gather_object([accelerator.mixed_precision]))) > 1:
        chosen = " and ".join(sorted({"no": "fp32"}.get(name, name) for name in precisions))
        raise UserError(
            f"train.precision: the machines of this launch chose {chosen}; give train.precision=fp32, or bf16"
        )
    return accelerator


def trackers_of(tracking: Tracking) -> list[str]:
    """Return the names of the trackers of a run. UserError for one that is not installed."""
    wanted = {**tracking.model_dump(include={"tensorboard", "trackio"}), "wandb": wandb_mode(tracking.wandb) != OFF}
    names = [name for name, is_wanted in wanted.items() if is_wanted]
    for name in names:
        if find_spec(name) is None:  # Accelerate would skip it
            raise UserError(f"tracking.{name}: not installed; pip install {name}, or leave it out")
    return names


def check_started() -> None:
    """Raise UserError if `accelerate launch` has started fewer processes than it was asked for, each of which would be
    a run of its own. The command line and the file of the launcher say how many that are."""
    if not is_launched():
        return
    for parent in psutil.Process().parents():
        with suppress(psutil.Error, OSError):
            words = parent.cmdline()
            folder = parent.cwd()
            names = [os.path.basename(word) for word in words[:4]]
            at = next((n for n, name in enumerate(names) if name in LAUNCHERS), None)
            if at is None or (names[at] == "accelerate" and names[at + 1 : at + 2] != ["launch"]):
                continue
            _check_started(words[at + 1 + (names[at] == "accelerate") :], folder)
            return


def _check_started(words: list[str], folder: str) -> None:
    """`words`: the arguments of `accelerate launch`, given in a working folder."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    asked, _ = launch_command_parser().parse_known_args(words)
    file = os.path.join(folder, asked.config_file) if asked.config_file else default_config_file
    config = load_config_from_file(file) if os.path.isfile(file) and (asked.config_file or not asked.cpu) else None
    processes = asked.num_processes or getattr(config, "num_processes", None)
    machines = asked.num_machines or getattr(config, "num_machines", None) or 1
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if processes is None or processes <= started:
        return
    is_zero = asked.use_deepspeed or getattr(config, "distributed_type", None) == DistributedType.DEEPSPEED
    remedy = "give --multi_gpu, also where there is no GPU, or a file of recipes/accelerate"
    if asked.cpu:
        remedy = "leave out --cpu, which starts one process; without a GPU the processes run on the CPU anyway"
    elif is_zero and machines > 1:
        remedy = (
            "give --deepspeed_multinode_launcher standard, or set it in the deepspeed_config of the launcher's file"
        )
    raise UserError(
        f"accelerate launch was asked for {processes} processes{f' on {machines} machines' * (machines > 1)} and has "
        f"started {started} that know{'s' * (started == 1)} of no others, which would train alone; {remedy}"
    )


def describe_launch(accelerator: Accelerator) -> str:
    """Return the number of processes and of machines of a launch, and how they share the head."""
    world = accelerator.num_processes
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world)
    machines = -(-world // local)
    shared = f", {wanted_mode()}" if world > 1 else ""
    return f"{world} process{'es' * (world > 1)} on {machines} machine{'s' * (machines > 1)}{shared}"


def wanted_mode() -> str:
    """Return the mode of the launch: ddp (also for one process), deepspeed or fsdp."""
    for mode in ("deepspeed", "fsdp"):
        if os.environ.get(f"ACCELERATE_USE_{mode.upper()}", "false").lower() == "true":
            return mode
    return "ddp"


def _mixed_precision(settings: Train, device: torch.device, begun_in: str | None) -> str:
    if settings.precision != "auto":
        return "bf16" if settings.precision == "bf16" else "no"
    if begun_in is not None:
        return begun_in
    is_requested = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    return "bf16" if is_requested or fastest_dtype(device) == torch.bfloat16 else "no"


def _check_environment(settings: Train, mode: str) -> None:
    """Raise UserError for flags of the launch that the recipe contradicts, or that would be ignored."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    accumulation = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    sharded = mode == "fsdp"
    for is_wrong, fault in (
        (
            precision not in (("no",) if settings.precision == "fp32" else ("no", "bf16")),
            f"--mixed_precision {precision}: the recipe says train.precision {settings.precision}; leave the flag out",
        ),
        (
            accumulation not in ("1", "auto"),
            f"--gradient_accumulation_steps {accumulation}: leave the flag out, and set train.tokens_per_step",
        ),
        (sharded and os.environ.get("FSDP_VERSION", "1") != "2", "--fsdp_version 1: expected 2"),
        (
            sharded and os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true",
            "--fsdp_offload_params true: FSDP keeps a head on the GPU; expected false",
        ),
    ):
        if is_wrong:
            raise UserError(f"accelerate launch {fault}")


def _check_deepspeed(config: dict[str, Any]) -> None:
    zero = config.get("zero_optimization", {})
    if "optimizer" in config or "scheduler" in config or not zero.get("stage"):
        raise UserError(
            "the DeepSpeed configuration: expected stage 1, 2 or 3 of ZeRO and neither an optimizer nor a scheduler, "
            "which the recipe has"
        )
    if any((zero.get(name) or {}).get("device") == "nvme" for name in ("offload_optimizer", "offload_param")):
        raise UserError("DeepSpeed's offload to nvme is not read by checkpoints; offload to cpu, or not at all")


def load_recipe_target(
    settings: Target,
    accelerator: Accelerator,
    place: Place | None = None,
    template: Mapping[str, object] = MappingProxyType({}),
) -> tuple[FrozenTarget, PreTrainedTokenizerBase]:
    """Return the frozen target and its tokenizer. `place` puts the target on its devices; by default it is loaded onto
    this process's device. `template`: arguments of its chat template."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:  # under ZeRO-3, `from_pretrained` would leave a frozen target with empty weights
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
    with ExitStack() as turn:
        # Only one process of this user on this machine loads at a time, so that only one holds weights being converted.
        loading = Path(tempfile.gettempdir()) / f"draftsmith-{os.getuid()}.loading"
        lock(turn.enter_context(loading.open("a")).fileno(), fcntl.LOCK_EX)

        def put(target: FrozenTarget, device: torch.device, dtype: torch.dtype | None) -> Placement:
            assert place is not None
            placement = place(target, device, dtype)
            turn.close()  # the check that follows may need all processes
            return placement

        how = {**settings.model_dump(), "template": template}
        loaded = load_pair(device=accelerator.device, place=None if place is None else put, **how)
    if plugin is not None:
        plugin.set_deepspeed_weakref()
    return loaded


def _use_cores() -> None:
    """Use all cores of the machine. `accelerate launch` sets OMP_NUM_THREADS to 1 if the user has not set it."""
    if not is_launched() or os.environ.get("OMP_NUM_THREADS") != "1":
        return
    parent = Path("/proc") / str(os.getppid())
    try:
        is_set = (
            b"OMP_NUM_THREADS=" in (parent / "environ").read_bytes()
            or b"num_cpu_threads" in (parent / "cmdline").read_bytes()
        )
    except OSError:
        return
    if not is_set:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
