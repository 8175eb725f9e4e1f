"""Training of a small language model from scratch: its text, its training loop, and its folder with measurements."""

import math
import os
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.measure.metrics import LOOP_PERIOD, is_loop
from eval.runtime.engine import Engine, EngineOptions, Request
from heads.core.errors import UserError
from heads.core.files import check_folder, whole_folder, write_text
from heads.targets.load import load_target
from train.accelerator import make_accelerator
from train.checkpoints import list_checkpoints
from train.core.processes import on_main
from train.data.from_scratch import CHAT_TEMPLATE, END, prepare_text, special_tokens
from train.parallel import flat, unflat
from train.recipe import Train
from train.target_recipe import TargetRecipe, TargetTraining, load_target_recipe

CONTEXT = 512
"""Tokens per held-out window."""
SAMPLES, SAMPLE_PROMPT, SAMPLE_TOKENS = 100, 96, 128
LEAST_REPEATED = 12
"""Least number of repeated tokens after which a text counts as a loop, for short periods."""
SHOWN_EVERY = 50
"""Steps between two lines of progress."""


def make_target(arguments: Sequence[str]) -> int:
    recipe = load_target_recipe(arguments[0], arguments[1:])
    folder = Path(recipe.output_dir)
    check_folder(folder, "output_dir")
    accelerator = make_accelerator(loop_settings(recipe))
    on_main(accelerator, lambda: prepare_text(recipe.tokenizer, recipe.data, folder))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token=END)
    if recipe.data.chats:
        tokenizer.chat_template = CHAT_TEMPLATE
    model = train(recipe, folder, accelerator, tokenizer.eos_token_id)
    command = f"accelerate launch -q scripts/make_target.py {' '.join(arguments)}"
    on_main(accelerator, lambda: publish(recipe, folder, model, tokenizer, command))
    return 0


def loop_settings(recipe: TargetRecipe) -> Train:
    """Return the settings with which processes share a step, in the form of a head's training recipe."""
    settings, world = recipe.train, int(os.environ.get("WORLD_SIZE", "1"))
    passes, rest = divmod(settings.tokens_per_step, settings.tokens_per_pass * world)
    if rest or any(settings.tokens_per_pass % stage.context_length for stage in settings.stages):
        raise UserError(
            f"train.tokens_per_pass: {settings.tokens_per_pass} must be whole rows of every stage, and tokens_per_step "
            f"{settings.tokens_per_step} whole passes of {world} processes"
        )
    steps = sum(stage.steps for stage in settings.stages)
    return Train(max_steps=steps, grad_accum=passes, precision=settings.precision)


def build_model(recipe: TargetRecipe, eos_token_id: int, device: torch.device) -> LlamaForCausalLM:
    """Return the untrained model on its device. The initial projections into the residual stream are scaled by
    (2 * layers) ** -0.5."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=recipe.tokenizer.vocab_size,
        tie_word_embeddings=True,
        eos_token_id=eos_token_id,
        bos_token_id=None,
        use_cache=True,
        **recipe.model.model_dump(),
    )
    # On a CPU, compiled eager attention is faster than the fused kernel.
    config._attn_implementation = "eager" if device.type == "cpu" else "sdpa"
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * config.num_hidden_layers) ** -0.5)
    model.to(device)  # type: ignore[arg-type]
    return model


def make_optimizers(model: nn.Module, settings: TargetTraining) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for all other parameters. Each group has its `peak_lr`."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, settings.muon_lr, settings.muon_weight_decay, momentum=0.95, nesterov=True)
    adamw = torch.optim.AdamW(others, settings.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adamw]


def train(recipe: TargetRecipe, folder: Path, accelerator: Accelerator, eos_token_id: int) -> LlamaForCausalLM:
    settings, passes = recipe.train, accelerator.gradient_accumulation_steps
    world, rank = accelerator.num_processes, accelerator.process_index
    text = np.load(folder / "train.npy", mmap_mode="r")
    model = build_model(recipe, eos_token_id, accelerator.device)
    optimizers = make_optimizers(model, settings)
    start = resume(folder, model, optimizers)
    wrapped = accelerator.prepare(LanguageLoss(model, compiled=settings.compile))
    total = sum(stage.steps for stage in settings.stages)
    begun, running = time.perf_counter(), torch.zeros((), device=accelerator.device)
    for step in range(start, total):
        factor = min(1.0, (step + 1) / settings.warmup_steps, (total - step) / settings.decay_steps)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak_lr"] * factor
        stage, stage_step = settings.stage_at(step)
        for number in range(passes):
            part = number * world + rank
            rows = read_rows(text, recipe, stage, stage_step, part, passes * world).to(accelerator.device)
            own = continuations(model, rows[:, :SAMPLE_PROMPT]) if settings.stages[stage].unlearn_loops else ()
            with accelerator.accumulate(wrapped):
                loss = wrapped(rows, *own)
                accelerator.backward(loss)
            running += loss.detach() / passes
        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        done = step + 1
        if done % SHOWN_EVERY == 0:
            mean = float(running) / SHOWN_EVERY  # waits for the device, so that the speed is correct
            speed = (done - start) * settings.tokens_per_step / (time.perf_counter() - begun)
            seen = done * settings.tokens_per_step / 1e6
            accelerator.print(
                f"step {done}/{total}  loss {mean:.4f}  {seen:.2f}M tokens  {speed:.0f} tokens/s", flush=True
            )
            running.zero_()
        if done % settings.checkpoint_every == 0 or done == total:
            on_main(accelerator, partial(save, folder, done, model, optimizers))
    return model


class LanguageLoss(nn.Module):
    """Mean cross-entropy of the next token, in float32, and the unlikelihood of loops in continuations."""

    def __init__(self, model: LlamaForCausalLM, *, compiled: bool) -> None:
        super().__init__()
        self.model = model
        self.cross_entropy = torch.compile(cross_entropy) if compiled else cross_entropy
        if compiled:
            for layer in model.model.layers:  # all layers share one graph, which is compiled once
                layer.compile()

    def forward(self, rows: Tensor, own: Tensor | None = None, looping: Tensor | None = None) -> Tensor:
        """Return the loss () of text (B, T + 1), plus the unlikelihood of the `looping` tokens in the model's `own`
        text (B, n)."""
        loss: Tensor = self.cross_entropy(self.logits(rows), rows[:, 1:])
        if own is not None and looping is not None:
            loss = loss + unlikelihood(self.logits(own), own[:, 1:], looping[:, 1:])
        return loss

    def logits(self, rows: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        return cast(Tensor, self.model.lm_head(hidden))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@torch.no_grad()
def continuations(model: LlamaForCausalLM, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the prompts (B, P) with their greedy continuations (B, P + SAMPLE_TOKENS), and a mask of the new tokens
    that continue a loop."""
    with torch.compiler.set_stance("force_eager"):  # the shapes change with each token
        made: Tensor = cast(Any, model).generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=SAMPLE_TOKENS,
            max_new_tokens=SAMPLE_TOKENS,
            pad_token_id=0,
        )
    looping = repeats(made)
    looping[:, : prompts.shape[1]] = False
    return made, looping


def repeats(tokens: Tensor) -> Tensor:
    """Return (B, T) bool: the tokens that continue a loop. For some period p <= LOOP_PERIOD, such a token and at least
    the max(2 p, LEAST_REPEATED) tokens before it equal the tokens p positions earlier."""
    looping = torch.zeros_like(tokens, dtype=torch.bool)
    for period in range(1, LOOP_PERIOD + 1):
        same = tokens[:, period:] == tokens[:, :-period]
        length = max(2 * period, LEAST_REPEATED) + 1
        if same.shape[1] >= length:
            looping[:, period + length - 1 :] |= same.unfold(1, length, 1).all(-1)
    return looping


def unlikelihood(logits: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Unlikelihood training (Welleck et al., arXiv 1908.04319, section 5.2) against loops in the model's own text.

    A small model may repeat one line without end. Such text is easy to draft, so a target that often loops makes every
    draft head look good. The paper counts every n-gram seen before as a repetition. Source code also repeats itself for
    good reasons, so here only tokens after a second consecutive repetition count.

    Return the mean of -log(1 - q) over the `chosen` (B, T) tokens (B, T), or 0 if none is chosen. q is their
    probability from logits (B, T, V). The gradient of a token's logit is q, so it does not vanish where the model is
    sure of its loop.
    """
    z = logits[chosen].float()  # (n, V)
    others = z.scatter(1, tokens[chosen][:, None], -torch.inf)
    return (z.logsumexp(1) - others.logsumexp(1)).sum() / chosen.sum().clamp_min(1)


def read_rows(text: np.ndarray, recipe: TargetRecipe, stage: int, step: int, part: int, parts: int) -> Tensor:
    """Return (rows, T + 1) int64: one part of the rows of a step, as a function of (seed, stage, step, part).

    Each stage reads the windows of its context length in its own random order.
    """
    T = recipe.train.stages[stage].context_length
    windows = (len(text) - 1) // T
    rows = recipe.train.tokens_per_pass // T
    order = np.random.default_rng((recipe.seed, stage)).permutation(windows)
    begin = (step * parts + part) * rows
    chosen = order[np.arange(begin, begin + rows) % windows]
    return torch.from_numpy(np.stack([text[i * T : i * T + T + 1] for i in chosen]).astype(np.int64))


def save(folder: Path, step: int, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    state: Any = get_optimizer_state_dict(model, optimizers)
    with whole_folder(folder / "checkpoints" / f"step-{step}") as path:
        save_file({name: p.detach().clone() for name, p in model.named_parameters()}, path / "model.safetensors")
        save_file(flat(state["state"]), path / "optimizer.safetensors")
    for old in list_checkpoints(folder / "checkpoints")[:-1]:
        shutil.rmtree(old)


def resume(folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Load the newest checkpoint, if there is one, and return the number of steps made."""
    found = list_checkpoints(folder / "checkpoints")
    if not found:
        return 0
    state: Any = get_optimizer_state_dict(model, optimizers)
    moments = load_file(found[-1] / "optimizer.safetensors")
    state["state"] = unflat(moments, state["state"])
    set_optimizer_state_dict(model, optimizers, state)
    model.load_state_dict(load_file(found[-1] / "model.safetensors"), strict=False)  # tied weights have one name
    return int(found[-1].name.removeprefix("step-"))


def publish(
    recipe: TargetRecipe, folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, command: str
) -> None:
    out = folder / "model"
    for parameter in model.parameters():
        parameter.data = parameter.data.to("cpu", torch.bfloat16)
    model.config._attn_implementation = "sdpa"
    model.save_pretrained(out)
    tokenizer.model_max_length = recipe.model.max_position_embeddings
    tokenizer.save_pretrained(out)
    print("measuring the target on the modules held out", flush=True)
    card = measured_card(recipe, folder, out, tokenizer, command)
    write_text(out / "README.md", card)
    print(card)


def measured_card(
    recipe: TargetRecipe, folder: Path, out: Path, tokenizer: PreTrainedTokenizerFast, command: str
) -> str:
    """Return the README of the target in `out`: bits per byte and accuracy on the held-out text in `folder`, and greedy
    continuations of prompts from that text."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(str(out), dtype=torch.float32, device=device)
    ids = torch.from_numpy(np.load(folder / "held_out.npy").astype(np.int64))
    windows = ids[: (len(ids) - 1) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    # Special tokens have no bytes; the name of every other token has one character per byte.
    specials = special_tokens(bool(recipe.data.chats))
    names = tokenizer.convert_ids_to_tokens(list(range(target.vocab_size)))
    sizes = torch.tensor([0 if name is None or name in specials else len(name) for name in names], device=device)
    nats, hits, count, size = 0.0, 0, 0, 0
    for some in windows.split(4):
        rows = some.to(device)
        spot = torch.arange(CONTEXT - 1, device=device).expand(len(rows), -1)
        hidden = target.packed_features(rows[:, :-1], spot, torch.zeros_like(spot), ()).hidden
        logits, labels = target.shared.lm_head(hidden), rows[:, 1:]
        nats += nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        hits += int((logits.argmax(-1) == labels).sum())
        count += labels.numel()
        size += int(sizes[labels].sum())
    prompts = [row[:SAMPLE_PROMPT].tolist() for row in windows[:: max(1, len(windows) // SAMPLES)][:SAMPLES]]
    engine = Engine(target, None, EngineOptions(batch_size=8, max_length=CONTEXT))
    outputs = engine.generate([Request(prompt, max_new_tokens=SAMPLE_TOKENS) for prompt in prompts])
    loops = sum(is_loop(output.tokens) for output in outputs)
    samples = "\n\n".join(
        f"Prompt (held out):\n\n```python\n{tokenizer.decode(prompt)}\n```\n\n"
        f"Greedy continuation:\n\n```python\n{tokenizer.decode(output.tokens)}\n```"
        for prompt, output in zip(prompts[:3], outputs[:3], strict=True)
    )
    tokens = len(np.load(folder / "train.npy", mmap_mode="r"))
    seen = sum(stage.steps for stage in recipe.train.stages) * recipe.train.tokens_per_step
    source = "Python source of one machine: standard library and installed packages"
    source += "; conversations" if recipe.data.chats else ""
    return f"""# A small real code model

A Llama-architecture model of {recipe.model.num_hidden_layers} layers and width {recipe.model.hidden_size} with a
byte-level BPE of {recipe.tokenizer.vocab_size} tokens, trained from scratch by `scripts/make_target.py` so that draft
heads can be trained and measured without a hub.

| | |
|---|---|
| data | {source}, {tokens / 1e6:.1f} million tokens |
| held out | modules, by a hash of their path (`eval/measure/python_source.py`); near copies are not trained on |
| tokens seen | {seen / 1e6:.1f} million |
| held-out bits per byte | {nats / math.log(2) / size:.3f} over {count / 1e6:.2f} million tokens, context {CONTEXT} |
| held-out next-token accuracy | {hits / count:.3f} |
| greedy continuations stuck in a loop | {loops} of {len(prompts)} ({SAMPLE_TOKENS} tokens each; `is_loop`) |

Make it again: `{command}`

## Samples

{samples}
"""
