"""Roofline of a round: the time of each phase, compared with the time to move its bytes.

    floor of a phase   = bytes that it must move / copy bandwidth measured here
    speedup now        = tau * seconds of a plain step / seconds of a round
    at the floor       = the same, with plain step and round at their floors

Each phase is timed separately; on a GPU, in a CUDA graph. What a round takes beyond the sum of its phases are gaps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from eval.records.schema import Roofline, RooflinePart, Speedups
from eval.runtime.engine import Engine
from eval.runtime.graph import preserved
from eval.runtime.request import Request
from eval.runtime.round import read_prompts
from eval.runtime.sampling_params import Sampling
from heads.core.errors import UserError
from heads.kernels.product import Product
from heads.kernels.slots import round_up
from heads.targets.quantization import weight_bytes

COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Bytes to copy, by type of device: more than any cache holds."""
ROUNDS, TRIES = {"cpu": 1, "cuda": 16}, {"cpu": 12, "cuda": 4}
"""Number of runs timed together, and number of such timings, of which the best counts."""


@torch.inference_mode()
def copy_bandwidth(engine: Engine) -> float:
    """Return the bytes per second, read and written together, of a copy on the engine's device, larger than any
    cache."""
    device = engine.target.device
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / best_seconds(engine, lambda: target.copy_(source))


def best_seconds(engine: Engine, work: Callable[[], object]) -> float:
    """Return the seconds of `work`, run several times without a pause. The state of the rows is restored."""
    best = float("inf")
    count = ROUNDS[engine.target.device.type]
    for _ in range(TRIES[engine.target.device.type]):
        with preserved(engine.decoder.state):
            started = engine.clock()
            for _ in range(count):
                work()
            best = min(best, (engine.clock() - started) / count)
    return best


@torch.inference_mode()
def roofline(engine: Engine, plain: Engine, *, length: int, tau: float, bandwidth: float) -> Roofline:
    """Return the phases of a round of `engine` and of a step of `plain` after `length` tokens, and speedups at
    `tau`."""
    sides: dict[str, Any] = {}
    for name, each in (("round", engine), ("plain", plain)):
        fill_batch(each, length)
        longest = length + (ROUNDS[each.target.device.type] + 1) * each.nodes
        extent = min(round_up(longest), each.decoder.target.spec.capacity)
        parts = parts_of(each, length, bandwidth)
        seconds = best_seconds(each, partial(each.rounds, extent))
        left = max(0.0, 1e6 * seconds - sum(part.us for part in parts))
        parts.append(RooflinePart(part="gaps", bytes=0, floor_us=0.0, us=left, over_floor=None))
        floor = sum(part.floor_us for part in parts)
        sides |= {name: parts, f"{name}_us": 1e6 * seconds, f"{name}_floor_us": floor}
    return Roofline(
        tree=str(engine.options.shape),
        batch_size=engine.options.batch_size,
        length=length,
        copy_bandwidth=bandwidth,
        tau=tau,
        plain_share_of_bandwidth=sides["plain_floor_us"] / sides["plain_us"],
        speedup=Speedups(
            now=tau * sides["plain_us"] / sides["round_us"],
            floor=tau * sides["plain_floor_us"] / sides["round_floor_us"],
        ),
        **sides,
    )


def fill_batch(engine: Engine, length: int) -> None:
    """Give every row a prompt of `length` tokens, and let its output be as long as its slots allow."""
    max_new_tokens = engine.options.max_length - engine.nodes - length
    if max_new_tokens < 2:
        raise UserError(
            f"a context of {length} tokens leaves no room in {engine.options.max_length} slots; raise max_length"
        )
    ids = [3 + (7 * i) % (engine.target.vocab_size - 3) for i in range(length)]
    request = Request(ids, max_new_tokens, Sampling(), ignore_eos=True)
    engine.decoder.state.done.fill_(True)
    read_prompts(engine.decoder, dict.fromkeys(range(engine.options.batch_size), request))


def parts_of(engine: Engine, length: int, bandwidth: float) -> list[RooflinePart]:
    """Return the phases of a round in order. Their bytes are those of weights, and of the cache of all tokens."""
    target = engine.target
    drafted, committed = bytes_read(engine)
    seconds = phase_seconds(engine, min(round_up(length + engine.nodes), engine.decoder.target.spec.capacity))
    cache = length * engine.decoder.target.slot_bytes + (1 + engine.nodes) * target.state_bytes
    verified = weight_bytes(target.model) + engine.options.batch_size * cache
    phases = [
        ("verify and choose", verified, seconds["verify"]),
        ("accept and commit", committed, seconds["accept"] + seconds["commit"]),
    ]
    if engine.head is not None:
        phases.insert(0, ("draft", drafted, seconds["draft"]))
    return [
        RooflinePart(
            part=name,
            bytes=moved,
            floor_us=1e6 * moved / bandwidth,
            us=1e6 * spent,
            over_floor=spent * bandwidth / moved if moved else None,
        )
        for name, moved, spent in phases
    ]


@contextmanager
def whole_drafts(engine: Engine) -> Iterator[None]:
    """Let the head run all its passes (`Drafter.skips`)."""
    head = engine.head
    if head is None or not head.skips:
        yield
        return
    head.skips = False
    try:
        yield
    finally:
        head.skips = True


@torch.inference_mode()
def bytes_read(engine: Engine) -> tuple[int, int]:
    """Return the bytes of weights that products read to draft and to commit, counted in a round that changes no row."""
    decoder = engine.decoder
    with preserved(decoder.state), whole_drafts(engine):
        decoder.state.done.fill_(True)
        before = Product.bytes_read
        proposal = decoder.propose()
        drafted = Product.bytes_read - before
        features, verified = decoder.verify(proposal, decoder.target.spec.capacity)
        acceptance = decoder.rule.accept(*verified)
        before = Product.bytes_read
        decoder.commit(proposal, acceptance, features)
        return drafted, Product.bytes_read - before


@torch.inference_mode()
def phase_seconds(engine: Engine, extent: int) -> dict[str, float]:
    """Return the seconds of each phase of a round of the engine's rows. On a GPU each is replayed from a graph of its
    own, without the time of launches."""
    decoder = engine.decoder
    state = engine.decoder.state
    capture = engine.rounds.capture
    proposal = decoder.propose()
    features, verified = decoder.verify(proposal, extent)
    acceptance = decoder.rule.accept(*verified)
    phases: dict[str, Callable[[], Any]] = {
        "draft": decoder.propose,
        "verify": lambda: decoder.verify(proposal, extent),
        "accept": lambda: decoder.rule.accept(*verified),
        "commit": lambda: decoder.commit(proposal, acceptance, features),
    }
    with preserved(state), whole_drafts(engine):
        state.done.fill_(True)  # so that a commit changes no row
        replays = {name: work if capture is None else capture(work).replay for name, work in phases.items()}
        return {name: best_seconds(engine, work) for name, work in replays.items()}
