"""A training step's peak memory, by our loss and by one that keeps whole logits."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eval.benchmark.results import write_results
from eval.files import check_file
from heads.base import Batch, SharedLayers
from heads.eagle3 import Eagle3, Eagle3Config
from heads.errors import UserError
from heads.vocab import build_vocab, kept_ids

NUM_AUX_LAYERS = 3


def compare(options: argparse.Namespace, variants: Sequence[str]) -> int:
    """The variants, plain and ours, each in a process of the same command; 1 if their losses differ."""
    if options.out:
        check_file(options.out, "--out")
    records = {}
    for variant in variants:
        command = [sys.executable, *sys.argv, "--variant", variant]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise UserError(f"the {variant} step failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        records[variant] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"T = {options.tokens}, {options.steps} steps, hidden {options.hidden}, vocabulary {options.vocab}, "
        f"draft vocabulary {options.draft_vocab}, {options.device}"
    )
    print(f"{'':8}{'loss':>12}{'step, MiB':>12}{'process, MiB':>14}{'seconds':>10}")
    for variant, record in records.items():
        step, whole = record["step_bytes"] / 2**20, record["process_bytes"] / 2**20
        print(f"{variant:8}{record['loss']:12.6f}{step:12.0f}{whole:14.0f}{record['seconds']:10.1f}")
    ours, plain = records["ours"], records["plain"]
    ratios = {key: ours[f"{key}_bytes"] / plain[f"{key}_bytes"] for key in ("step", "process")}
    print(f"ours / plain: {ratios['step']:.2f} of the step's peak, {ratios['process']:.2f} of the whole process's")
    if options.out:
        write_results({"settings": vars(options), "variants": records, "ratio": ratios}, options.out)
    if abs(ours["loss"] - plain["loss"]) <= 1e-4 * abs(plain["loss"]):
        return 0
    print(f"the losses differ: {ours['loss']} and {plain['loss']}", file=sys.stderr)
    return 1


def measure(options: argparse.Namespace) -> int:
    """One variant's step; prints its record."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    head, batch = make_head(options).to(device), make_batch(options, device)
    weights = torch.tensor(head.depth_weights, device=device)
    scale = weights / head.counts(batch.loss_mask, batch.documents)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-4)
    for parameter in head.parameters():  # the optimizer's state stands before a step that is not the first
        state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(parameter)}
        optimizer.state[parameter] = {**state, "exp_avg_sq": torch.zeros_like(parameter)}
    before = reset_peak(device)
    started = time.perf_counter()
    loss = plain_loss(head, batch, scale) if options.variant == "plain" else head.loss(batch, scale).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    optimizer.step()
    value, seconds = float(loss.detach()), time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else read_status("VmHWM")
    print(json.dumps({"loss": value, "step_bytes": peak - before, "process_bytes": peak, "seconds": seconds}))
    return 0


def make_head(options: argparse.Namespace) -> Eagle3:
    """A head of the given widths, its draft vocabulary the lowest ids."""
    D = options.hidden
    config = Eagle3Config(
        hidden_size=D,
        intermediate_size=3 * D,
        num_attention_heads=D // 64,
        num_key_value_heads=max(1, D // 256),
        head_dim=64,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        vocab_size=options.vocab,
        draft_vocab_size=options.draft_vocab,
        num_target_layers=32,
        max_position_embeddings=options.tokens,
        aux_layer_ids=(2, 16, 29),
        depth=options.steps,
    )
    counts = torch.arange(options.vocab, 0, -1)
    return Eagle3(config, *build_vocab(counts, options.draft_vocab))


def make_batch(options: argparse.Namespace, device: torch.device) -> Batch:
    """One packed row of random features; the target's end is a random matrix that favours the draft vocabulary."""
    T, D, V = options.tokens, options.hidden, options.vocab
    table = torch.randn(V, D, device=device) * D**-0.5
    matrix = torch.randn(V, D, device=device) * 2 * D**-0.5
    matrix[options.draft_vocab :] *= 0.5
    tokens = torch.randint(options.draft_vocab, (1, T), device=device)
    return Batch(
        tokens=tokens,
        loss_mask=torch.ones(1, T, dtype=torch.bool, device=device),
        positions=torch.arange(T, device=device)[None],
        documents=torch.zeros(1, T, dtype=torch.int64, device=device),
        embeddings=table[tokens],
        aux_hidden_states=torch.randn(1, T, NUM_AUX_LAYERS * D, device=device),
        hidden=torch.randn(1, T, D, device=device),
        shared=SharedLayers(embed_tokens=lambda ids: table[ids], lm_head=lambda hidden: (hidden @ matrix.T).float()),
    )


def plain_loss(head: Eagle3, batch: Batch, scale: Tensor) -> Tensor:
    """The same KL with whole logits: for one document, every token a label."""
    kept = kept_ids(head.d2t)
    with torch.no_grad():
        logits = batch.shared.lm_head(batch.hidden)  # (1, T, V): slot t predicts x_{t+1}
        best = logits.argmax(-1)
        p = logits[..., kept].softmax(-1)  # (1, T, Vd)
        inside = (kept[p.argmax(-1)] == best).float()
    total = torch.zeros((), device=scale.device)
    for k, state in enumerate(head.unroll(batch, head.config.depth)):
        # Step k at slot t predicts x_{t+2+k}, whose distribution the target gives at slot t+1+k; the last label is
        # x_{T-1}.
        T = batch.tokens.shape[1]
        distribution, right = p[:, 1 + k : T - 1], inside[:, 1 + k : T - 1]
        logq = head.lm_head(state[:, : distribution.shape[1]]).float().log_softmax(-1)
        divergence = (torch.xlogy(distribution, distribution) - distribution * logq).sum(-1)
        total = total + scale[k] * (divergence * right).sum()
    return total


def reset_peak(device: torch.device) -> int:
    """Begin to watch the peak anew; -> the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise UserError(f"peak memory of a CPU step needs Linux's /proc/self/clear_refs: {error}") from error
    return read_status("VmRSS")


def read_status(name: str) -> int:
    """A size in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024
