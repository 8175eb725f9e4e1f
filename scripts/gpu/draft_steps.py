"""Draft steps of heads that recycle their state, timed at the sizes of a big model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eval.benchmark.roofline import Part
from heads.backends.selection import TORCH, TRITON
from heads.backends.slot_mapping import Drafted
from heads.base import Observation, SharedLayers
from heads.eagle3 import Eagle3, Eagle3Config
from heads.mtp import Mtp, MtpConfig
from heads.recurrent.draft import Recurrent, RecurrentState
from heads.tree import parse_shape
from heads.vocab import build_vocab
from scripts.grown.shapes import ModelShape


@torch.no_grad()
def draft_parts(shape: ModelShape, length: int, device: torch.device, seconds: Callable[..., float]) -> list[Part]:
    """Return the times of a draft step of one node and of eight nodes, with its picks, and of extending a head by six
    tokens, with kernels and with torch in bfloat16. The floor is the time to read the layer, the output head and the
    cache."""
    cache, tree = 4 * length * shape.num_key_value_heads * shape.head_dim, parse_shape("tree:6x8x32")
    parts = []
    for name in ("eagle3", "mtp"):
        head, shared = large_head(name, shape, device)
        for form, backend in (("kernels", TRITON), ("torch", TORCH)):
            state = head.new_state(shared, batch_size=1, capacity=length + 64, shape=tree, backend=backend)
            state.length.fill_(length)
            reads = head.bytes_per_round(state)  # the output head at every level, the layer at all levels but the first
            size = (reads.propose - 2 * reads.logits * shape.hidden_size) // (tree.depth - 1)
            for width in (1, 8):
                took = seconds(one_step(head, state, width), device)
                parts.append(Part(f"{name} draft step by {form}, {width} rows", size + cache, took))
            took = seconds(partial(head.extend, state, some_news(state, 6)), device)
            parts.append(Part(f"{name} extended by {form}, 6 rows", reads.extend + cache, took))
    return parts


def large_head(
    name: str, shape: ModelShape, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[Recurrent, SharedLayers]:
    """Return a random head for a target of this shape, and the target's embeddings and output head."""
    widths: dict[str, Any] = dict(
        **{key: value for key, value in vars(shape).items() if key != "num_hidden_layers"},
        num_target_layers=shape.num_hidden_layers,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        max_position_embeddings=256,
        draft_vocab_size=min(32_000, shape.vocab_size) if name == "eagle3" else shape.vocab_size,
    )
    vocab = build_vocab(torch.arange(shape.vocab_size) % 9, widths["draft_vocab_size"])
    with device, torch.random.fork_rng(devices=[]):
        table = torch.nn.Embedding(shape.vocab_size, shape.hidden_size, dtype=dtype)
        head: Recurrent
        if name == "eagle3":
            head = Eagle3(Eagle3Config(**widths, aux_layer_ids=(2, 4, 5)), vocab)
        else:
            head = Mtp(MtpConfig(**widths), vocab)
        head.to(device, dtype)
    shared = SharedLayers(
        embed_tokens=table, lm_head=lambda hidden: hidden @ table.weight.T, lm_head_weight=table.weight
    )
    return head, shared


def one_step(head: Recurrent, state: RecurrentState, width: int) -> Callable[[], Any]:
    """Return a function that runs the second level of a draft: of a chain, or of a tree that draws as many children per
    node as it expands nodes."""
    ids = state.slot[: 2 * width].view(1, width, 2)
    tokens, rows = ids[..., 1].contiguous(), None if width == 1 else ids[..., 0] // 2
    states = state.recycled[0][:, None].repeat(1, width, 1)
    pick = state.backend.sampling(1, state.root.device).pick

    def work() -> tuple[Tensor, Tensor]:
        mapping = Drafted(state.length, ids, state.slot, width == 1)
        _, read = state.steps.step(0, tokens, states, rows, mapping, len(state.slot))
        return pick(state.steps.logits(read), tokens, width, head.kept)

    return work


def some_news(state: RecurrentState, number: int) -> Observation:
    """Return an observation of `number` tokens with a count of 0, so that extending with it can be repeated."""
    aux_hidden_states = state.recycled[0].new_zeros(1, number, 3 * state.recycled[0].shape[1])
    hidden, count = aux_hidden_states[..., : state.recycled[0].shape[1]].clone(), torch.zeros_like(state.length)
    return Observation(state.slot[: number + 1][None], aux_hidden_states, hidden, state.length.clone(), count, None)
