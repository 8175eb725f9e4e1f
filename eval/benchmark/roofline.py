"""Roofline of a round: the time of each part, compared with the time to move its bytes.

    floor of a part    = bytes it must move / copy bandwidth measured here
    speedup now        = tau * seconds of a plain step / seconds of a round
    at zero gaps       = the same, without the time between parts
    at the floor       = the same, with every part at its floor

Each part is timed separately, for all layers in turn so that weights are read from memory. On a GPU it runs in a CUDA
graph. The gaps are the time of a round minus the sum of its parts. On a GPU they include launches, unless the round is
a CUDA graph.

Letters: B rows, N nodes, L layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eval.benchmark.reliability import is_believable
from eval.runtime.engine import Engine
from eval.runtime.graph import preserved
from eval.runtime.request import Request
from eval.runtime.round import Decoder, TargetStep, read_prompts
from eval.runtime.sampling import Sampling
from heads.backends.slot_mapping import ancestors, round_up
from heads.backends.torch.select import Select
from heads.backends.triton.timing import device_seconds
from heads.errors import UserError
from heads.growth import grow
from heads.tree import is_chain

COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Bytes to copy, by type of device: more than any cache holds."""
GLUE = "accept, compact, state"
BELIEVABLE = 1.25
"""Maximum plausible bandwidth of a plain step, relative to copying: it only reads, which may be faster than copying."""
ROUNDS, TRIES = {"cpu": 1, "cuda": 16}, {"cpu": 12, "cuda": 4}
"""Number of rounds timed together, and number of such timings. The best timing counts, as for the parts."""


@dataclass(frozen=True)
class Part:
    """One part of a round."""

    name: str
    bytes: int
    """Minimum number of bytes to read and write: weights, and the cache of all tokens."""
    seconds: float

    def record(self, bandwidth: float) -> dict[str, Any]:
        floor = self.bytes / bandwidth
        return {
            "part": self.name,
            "bytes": self.bytes,
            "floor_us": 1e6 * floor,
            "us": 1e6 * self.seconds,
            "over_floor": self.seconds / floor if self.bytes else None,
        }


def copy_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Return the bytes per second, read and written together, of a copy of `size` bytes. Default: more than any cache
    holds."""
    size = size or COPY_BYTES[device.type]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / device_seconds(lambda: target.copy_(source), device)


@torch.inference_mode()
def roofline(engine: Engine, plain: Engine, *, length: int, tau: float, bandwidth: float) -> dict[str, Any]:
    """Return the parts of a round of `engine` and of a step of `plain` after `length` tokens, and speedups at `tau`.

    `glue_us`: time to choose nodes, accept, compact and update the state. Choosing nodes is also part of `draft`.
    """
    fill_batch(engine, length)
    fill_batch(plain, length)
    round_parts, step_parts = parts_of(engine, length), parts_of(plain, length)
    seconds, step = round_seconds(engine, length), round_seconds(plain, length)
    glue = select_seconds(engine.decoder, engine.backend.select) + sum(p.seconds for p in round_parts if p.name == GLUE)
    busy, step_busy = (sum(part.seconds for part in parts) for parts in (round_parts, step_parts))
    floor, step_floor = (sum(part.bytes for part in parts) / bandwidth for parts in (round_parts, step_parts))
    return {
        "tree": str(engine.options.shape),
        "batch_size": engine.options.batch_size,
        "length": length,
        "copy_bandwidth": bandwidth,
        "tau": tau,
        "round": [part.record(bandwidth) for part in round_parts] + [gaps(seconds, busy)],
        "plain": [part.record(bandwidth) for part in step_parts] + [gaps(step, step_busy)],
        "round_us": 1e6 * seconds,
        "plain_us": 1e6 * step,
        "glue_us": 1e6 * glue,
        "round_floor_us": 1e6 * floor,
        "plain_floor_us": 1e6 * step_floor,
        "plain_share_of_bandwidth": step_floor / step,
        "speedup": {
            "now": tau * step / seconds,
            "zero_gaps": tau * min(step_busy, step) / min(busy, seconds),
            "floor": tau * step_floor / floor,
        },
        "speedup_over_tau": step / seconds,
    }


def gaps(whole: float, busy: float) -> dict[str, Any]:
    """Return the time of a round that is in no part."""
    left = max(0.0, whole - busy)
    return {"part": "gaps", "bytes": 0, "floor_us": 0.0, "us": 1e6 * left, "over_floor": None, "share": left / whole}


@torch.inference_mode()
def fill_batch(engine: Engine, length: int) -> None:
    """Give every row a prompt of `length` tokens, and let its output be as long as its slots allow."""
    most = engine.options.max_length - engine.nodes - length
    if most < 2:
        raise UserError(
            f"a context of {length} tokens leaves no room in {engine.options.max_length} slots; raise max_length"
        )
    ids = [3 + (7 * i) % (engine.target.vocab_size - 3) for i in range(length)]
    request = Request(ids, most, Sampling(), ignore_eos=True)
    engine.decoder.state.done.fill_(True)
    read_prompts(engine.decoder, dict.fromkeys(range(engine.options.batch_size), request))


@torch.inference_mode()
def round_seconds(engine: Engine, length: int) -> float:
    """Return the seconds of one round when the engine runs rounds one after another without a poll."""
    rounds, count = engine.rounds_of(engine.decoder), ROUNDS[engine.target.device.type]
    extent = min(round_up(length + (count + 1) * engine.nodes), engine.decoder.step.capacity)
    return best_seconds(engine, partial(rounds, extent))


def best_seconds(engine: Engine, work: Callable[[], None]) -> float:
    """Return the seconds of `work`, run several times without a pause. The state of the rows is restored."""
    best, count = float("inf"), ROUNDS[engine.target.device.type]
    for _ in range(TRIES[engine.target.device.type]):
        with preserved(engine.decoder.state):
            started = engine.clock()
            for _ in range(count):
                work()
            best = min(best, (engine.clock() - started) / count)
    return best


@torch.inference_mode()
def phase_seconds(engine: Engine, requests: Sequence[Request]) -> dict[str, float]:
    """Return the seconds of each phase of a round after the prompts of `requests`, replayed from a graph of its own."""
    decoder, state, capture = engine.decoder, engine.decoder.state, engine.rounds_of(engine.decoder).capture
    assert capture is not None
    extent = min(round_up(max(len(r.prompt) for r in requests) + engine.nodes), decoder.step.capacity)
    with preserved(state):
        state.done.fill_(True)
        read_prompts(decoder, dict(enumerate(requests)))
        proposal = decoder.propose()
        features, judged = decoder.verify(proposal, extent)
        acceptance = decoder.rule.accept(*judged)
        state.done.fill_(True)  # so that a commit changes no row
        phases: dict[str, Callable[[], Any]] = {
            "draft": decoder.propose,
            "verify": lambda: decoder.verify(proposal, extent),
            "accept": lambda: decoder.rule.accept(*judged),
            "commit": lambda: decoder.commit(judged[0], acceptance, features),
        }
        return {name: best_seconds(engine, capture(work).replay) for name, work in phases.items()}


def parts_of(engine: Engine, length: int) -> list[Part]:
    """Return the parts of a round in order."""
    decoder, step, device = engine.decoder, engine.decoder.step, engine.target.device
    B, N = engine.options.batch_size, engine.nodes
    extent = min(round_up(length + N), step.capacity)
    parts = []
    if decoder.head is not None:
        reads = decoder.head.bytes_per_round(decoder.head_state)
        parts.append(Part("draft", reads.propose, device_seconds(decoder.propose, device)))
    proposal = decoder.propose()
    needs = not is_chain(decoder.shape) and step.decoder.reads_masks
    above = ancestors(proposal.parents, decoder.shape.depth) if needs else None

    def verify() -> Any:
        return step.verify(proposal, above, decoder.state.length, extent, decoder.depth)

    whole = device_seconds(verify, device)
    layers = layer_parts(step, B * N)
    parts += layers
    attention = attention_bytes(step, B, length) + B * (1 + N) * engine.target.state_bytes
    rest = max(0.0, whole - sum(part.seconds for part in layers))
    parts.append(Part("attention, norms and the rest of the target", attention, rest))
    hidden = verify().hidden
    positions = decoder.state.length[:, None] + 1 + proposal.depths
    head_bytes = engine.target.lm_head_weight.numel() * engine.target.lm_head_weight.element_size()
    seconds = device_seconds(lambda: step.choose(hidden, positions, decoder.sampling), device)
    parts.append(Part("output head and choice", head_bytes, seconds))
    return parts + glue(decoder, proposal, verify(), positions, above)


def attention_bytes(step: TargetStep, batch_size: int, length: int) -> int:
    """Return the bytes of the cached keys and values of `length` tokens in every row."""
    cache, native = step.decoder.cache, step.decoder.native
    if native is not None:
        per_slot = len(native.layers) * native.layers[0].attention.slot_width * step.target.dtype.itemsize
    else:
        stores = [*cache.stores["keys"], *cache.stores["values"]]
        per_slot = sum(store.numel() * store.element_size() for store in stores) // (step.batch_size * step.capacity)
    return batch_size * length * int(per_slot)


def layer_parts(step: TargetStep, rows: int) -> list[Part]:
    """Return the target's large products by kind, all layers together. For a Hugging Face model return none; the
    products are then in the part for the rest of the target."""
    native, device = step.decoder.native, step.target.device
    if native is None:
        return []
    parts = []
    for kind, products in native.products().items():
        x = torch.ones(rows, products[0].weight.shape[1], dtype=step.target.dtype, device=device)
        size = sum(product.weight.numel() * product.weight.element_size() for product in products)
        seconds = device_seconds(lambda: [step.decoder.multiply(x, product) for product in products], device)  # noqa: B023
        parts.append(Part(f"products: {kind}", size, seconds))
    return parts


def glue(decoder: Decoder, proposal: Any, features: Any, positions: Tensor, above: Tensor | None) -> list[Part]:
    """Return the parts for acceptance, compaction and state, and for the head's `extend`. They are timed on rows that
    are done, which do not change."""
    device = decoder.state.root.device
    consulted = decoder.rule.consult(decoder.step, features.hidden, positions)

    def run(decoder: Decoder) -> None:
        roots = decoder.pinned > 1
        judged = decoder.roots() if roots else proposal
        given = consulted[:, :1] if roots else consulted
        decoder.commit(judged, decoder.rule.accept(judged, given, positions, above), features)

    with preserved(decoder.state):
        decoder.state.done.fill_(True)
        seconds = device_seconds(partial(run, replace(decoder, head=None)), device)
        parts = [Part(GLUE, 0, seconds)]
        if decoder.head is not None:
            whole = device_seconds(partial(run, decoder), device)
            reads = decoder.head.bytes_per_round(decoder.head_state)
            parts.append(Part("the head extended", reads.extend, max(0.0, whole - seconds)))
    return parts


def select_seconds(decoder: Decoder, chosen_by: Select) -> float:
    """Return the seconds to choose the nodes to draft, without the head's own passes; 0 if not chosen from logits."""
    held = decoder.head_state
    Vd = 0 if decoder.head is None else decoder.head.bytes_per_round(held).logits
    if Vd == 0:
        return 0.0
    B, device = len(held.root), held.root.device
    widest = max(decoder.shape.nodes, decoder.shape.top_k)
    token_ids = torch.arange(Vd, device=device)
    levels = torch.randn(B, widest, Vd, device=device).to(decoder.step.target.dtype)

    def select() -> Any:
        return grow(
            decoder.shape, held.root, held.length, levels[:, :1], decoder.rule.begin(),
            lambda tokens, rows, paths, level: levels[:, : tokens.shape[1]], token_ids, chosen_by,
        )  # fmt: skip

    return device_seconds(select, device)


def lines(record: dict[str, Any]) -> list[str]:
    """Return the record as lines of text."""
    made = [
        f"copy bandwidth {record['copy_bandwidth'] / 1e9:.1f} GB/s, {record['length']} tokens of context, "
        f"batch {record['batch_size']}, draft {record['tree']}, tau {record['tau']:.2f}"
    ]
    for name in ("plain", "round"):
        made.append(f"{name + ' step':46}{'MB':>10}{'floor us':>12}{'us':>12}{'ratio':>8}")
        for part in record[name]:
            ratio = "" if part["over_floor"] is None else f"{part['over_floor']:.2f}"
            made.append(
                f"  {part['part']:44}{part['bytes'] / 1e6:>10.1f}{part['floor_us']:>12.1f}{part['us']:>12.1f}{ratio:>8}"
            )
        made.append(f"  {'whole':44}{'':>10}{record[name + '_floor_us']:>12.1f}{record[name + '_us']:>12.1f}")
    speedup = {
        name: f"{value:.2f}" if is_believable(value, record["tau"]) else "not measured"
        for name, value in record["speedup"].items()
    }
    made.append(
        f"speedup now {speedup['now']}, at zero gaps {speedup['zero_gaps']}, at the floor {speedup['floor']}; plain "
        f"decoding at {record['plain_share_of_bandwidth']:.0%} of the bandwidth; "
        f"choosing nodes, acceptance, compaction and state {record['glue_us']:.0f} us"
    )
    if record["plain_share_of_bandwidth"] > BELIEVABLE:
        made.append(
            "plain decoding reads faster than memory was copied: the target lies in the processor's cache, or others "
            "used the memory while it was copied; the floors say little here"
        )
    return [line.rstrip() for line in made]
