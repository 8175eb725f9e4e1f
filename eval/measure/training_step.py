"""Time and memory of a training step with our loss (with and without recomputation) and with whole logits."""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.measure.environment import machine
from eval.measure.results import write_record
from heads.core.contract import Batch, SharedLayers
from heads.core.errors import UserError
from heads.core.files import check_file
from heads.methods.eagle3 import Eagle3, Eagle3Config

NUM_AUX_LAYERS = 3
STRETCH = 32
"""Length of the runs of consecutive labels, if half of the tokens are labels."""


def compare(options: argparse.Namespace, variants: Sequence[str], labels: Sequence[str]) -> int:
    """Run the variants in turn, each in processes of its own, and print a table. Return 1 if their losses differ."""
    if options.out:
        check_file(options.out, "--out")
    found: dict[str, dict[str, list[Any]]] = {part: {variant: [] for variant in variants} for part in labels}
    for _ in range(options.repeats):
        for part in labels:
            for variant in variants:
                found[part][variant].append(run(variant, part))
    records = {part: {variant: merge(runs) for variant, runs in by.items()} for part, by in found.items()}
    print(
        f"T = {options.tokens}, {options.steps} steps, hidden {options.hidden}, vocabulary {options.vocab}, "
        f"draft vocabulary {options.draft_vocab}, float32, AdamW, {options.device}"
    )
    print(f"{'labels':8}{'':12}{'loss':>12}{'ms/step':>10}{'/ ours':>8}{'step, MiB':>12}{'/ ours':>8}")
    for part, by in records.items():
        ours = by["ours"]
        for variant, record in by.items():
            ms, size = 1e3 * record["seconds"], record["step_bytes"] / 2**20
            slower, larger = (record[key] / ours[key] for key in ("seconds", "step_bytes"))
            print(f"{part:8}{variant:12}{record['loss']:12.6f}{ms:10.1f}{slower:8.2f}{size:12.1f}{larger:8.2f}")
    if options.out:
        settings = {name: value for name, value in vars(options).items() if name not in ("out", "variant", "labels")}
        facts = {"settings": settings, "variants": records}
        write_record({**machine(torch.device(options.device)), **facts}, options.out)
    for part, by in records.items():
        loss = by["plain"]["loss"]
        for variant, record in by.items():
            if abs(record["loss"] - loss) > 1e-4 * abs(loss):
                print(f"{part} labels: the losses differ, {variant} {record['loss']}, plain {loss}", file=sys.stderr)
                return 1
    return 0


def run(variant: str, labels: str) -> Any:
    command = [sys.executable, *sys.argv, "--variant", variant, "--labels", labels]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise UserError(f"the {variant} step failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def merge(runs: Sequence[Any]) -> dict[str, float]:
    seconds = [taken for record in runs for taken in record["seconds"]]
    peak = max(record["step_bytes"] for record in runs)
    return {"loss": runs[0]["loss"], "seconds": statistics.median(seconds), "step_bytes": peak}


def measure(options: argparse.Namespace) -> int:
    """Run some steps of one variant and print their record. The peak is that of the first step, which allocates; the
    times are those of the other steps."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    head, batch = make_head(options).to(device), make_batch(options, device)
    head.most_kept = 0 if options.variant == "recomputed" else sys.maxsize
    weights = torch.tensor(head.depth_weights, device=device)
    scale = weights / head.counts(batch)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-4)
    for parameter in head.parameters():  # as before any later step: the optimizer's state exists
        state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(parameter)}
        optimizer.state[parameter] = {**state, "exp_avg_sq": torch.zeros_like(parameter)}
    before, losses, seconds = reset_peak(device), [], []
    for _ in range(1 + options.updates):
        started = time.perf_counter()
        loss = plain_loss(head, batch, scale) if options.variant == "plain" else head.loss(batch, scale).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - started)
        if len(losses) == 1:
            peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else read_status("VmHWM")
    print(json.dumps({"loss": losses[0], "step_bytes": peak - before, "seconds": seconds[1:]}))
    return 0


def make_head(options: argparse.Namespace) -> Eagle3:
    """Return a head of the given sizes. Its draft vocabulary is the lowest ids."""
    D = options.hidden
    heads = {"num_attention_heads": D // 64, "num_key_value_heads": max(1, D // 256), "head_dim": 64}
    config = Eagle3Config(
        hidden_size=D,
        **{"intermediate_size": 3 * D, **heads},
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        vocab_size=options.vocab,
        draft_vocab_size=options.draft_vocab,
        num_target_layers=32,
        max_position_embeddings=options.tokens,
        aux_layer_ids=(2, 16, 29),
        depth=options.steps,
    )
    return Eagle3(config, torch.arange(options.draft_vocab))


def make_batch(options: argparse.Namespace, device: torch.device) -> Batch:
    """Return one packed row of random features. The target's lm_head is a random matrix that favours the draft
    vocabulary."""
    T, D, V = options.tokens, options.hidden, options.vocab
    table = torch.randn(V, D, device=device) * D**-0.5
    matrix = torch.randn(V, D, device=device) * 2 * D**-0.5
    matrix[options.draft_vocab :] *= 0.5
    tokens = torch.randint(options.draft_vocab, (1, T), device=device)
    slot = torch.arange(T, device=device)[None]
    half = getattr(options, "labels", "all") == "half"
    return Batch(
        tokens=tokens,
        loss_mask=slot // STRETCH % 2 == 1 if half else slot >= 0,
        positions=slot,
        documents=torch.zeros_like(slot),
        embeddings=table[tokens],
        aux_hidden_states=torch.randn(1, T, NUM_AUX_LAYERS * D, device=device),
        hidden=torch.randn(1, T, D, device=device),
        shared=SharedLayers(embed_tokens=lambda ids: table[ids], lm_head=lambda hidden: (hidden @ matrix.T).float()),
    )


def plain_loss(head: Eagle3, batch: Batch, scale: Tensor) -> Tensor:
    """Return the same KL loss computed with whole logits, for one document."""
    kept = head.kept
    with torch.no_grad():
        logits = batch.shared.lm_head(batch.hidden)  # (1, T, V): slot t predicts x_{t+1}
        best = logits.argmax(-1)
        p = logits[..., kept].softmax(-1)  # (1, T, Vd)
        inside = (kept[p.argmax(-1)] == best).float()  # (1, T)
        inside[:, :-1] *= batch.loss_mask[:, 1:]
    total = torch.zeros((), device=scale.device)
    for k, state in enumerate(head.unroll(batch, head.config.depth)):
        # Step k at slot t predicts x_{t+2+k}. The target's distribution of that token is at slot t+1+k. The last label
        # is x_{T-1}.
        T = batch.tokens.shape[1]
        distribution, right = p[:, 1 + k : T - 1], inside[:, 1 + k : T - 1]
        logq = head.lm_head(state[:, : distribution.shape[1]]).float().log_softmax(-1)
        divergence = (torch.xlogy(distribution, distribution) - distribution * logq).sum(-1)
        total = total + scale[k] * (divergence * right).sum()
    return total


def reset_peak(device: torch.device) -> int:
    """Reset the peak of memory in use. Return the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise UserError(f"peak memory of a CPU step needs Linux's /proc/self/clear_refs: {error}") from error
    return read_status("VmRSS")


def read_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024
