"""A round never waits for the host, allocates no new state, and leaves rows that are done alone."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.round import read_prompts
from eval.runtime.sampling import Sampling
from heads.base import Drafter, Observation, Pick, SharedLayers
from heads.growth import grow
from heads.registry import build_head, build_untrained
from heads.target.frozen import FrozenTarget
from heads.tree import Proposal, TreeShape, parse_shape
from tests.small_targets import open_engine

TargetOf = Callable[[str], FrozenTarget]


class BigramHead(Drafter):
    """Drafts by tensor operations alone: a token is followed by what the logits of its own embedding like best."""

    aux_layer_ids: tuple[int, ...] = (1,)

    def new_state(
        self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape, backend: Any
    ) -> dict[str, Any]:
        zeros = torch.zeros(batch_size, dtype=torch.int64)
        return {"ends": shared, "shape": shape, "root": zeros.clone(), "position": zeros.clone()}

    def reset_rows(self, state: dict[str, Any], rows: Tensor) -> None:
        state["position"].masked_fill_(rows, 0)

    def extend(self, state: dict[str, Any], observation: Observation) -> None:
        root = observation.tokens.gather(1, observation.count[:, None])[:, 0]
        state["root"].copy_(torch.where(observation.count > 0, root, state["root"]))
        state["position"].copy_(
            torch.where(observation.count > 0, observation.start + observation.count, state["position"])
        )

    def propose(self, state: dict[str, Any], pick: Pick) -> Proposal:
        shared = state["ends"]

        def expand(tokens: Tensor, rows: Tensor, paths: Tensor, level: int) -> Tensor:
            return shared.lm_head(shared.embed_tokens(tokens))  # type: ignore[no-any-return]

        first = shared.lm_head(shared.embed_tokens(state["root"][:, None]))
        return grow(state["shape"], state["root"], state["position"], first, pick, expand, None)


TREE = "tree:3x3x10"
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=3)]


def make_drafter(name: str, target: FrozenTarget) -> Any:
    if name == "bigram":
        return BigramHead()
    if name == "draft":
        return build_head("draft", {"layers": [0, 2]}, target, torch.ones(target.vocab_size)).to(target.dtype)
    return None if name == "none" else build_untrained(name, target)


@pytest.mark.parametrize(
    ("family", "drafter", "shape", "rule"),
    [
        *((family, "none", "none", "match") for family in ("llama", "gemma3_text")),
        *((family, "bigram", shape, "match") for family in ("llama", "gemma3_text") for shape in ("chain:3", TREE)),
        *(("llama", "bigram", shape, "ratio") for shape in ("chain:3", "static:3.2")),
        ("llama", "bigram", "chain:3", "block"),
        ("llama", "lookup:3", "chain:3", "match"),
        *(("llama", "early_exit:2", shape, "match") for shape in ("chain:3", TREE)),
        *((family, "draft", shape, "match") for family in ("llama", "gemma2") for shape in ("chain:3", TREE)),
        ("llama", "draft", "static:3.2.1", "match"),
    ],
)
def test_a_round_never_waits_for_the_host(
    family: str, drafter: str, shape: str, rule: str, target_of: TargetOf, no_waiting: Any
) -> None:
    target = target_of(family)
    options = EngineOptions(shape=parse_shape(shape), batch_size=2, max_length=128, rule=rule)
    engine = Engine(target, make_drafter(drafter, target), options)
    requests = [Request([5, 6, 7], 40, sampling, ignore_eos=True) for sampling in SAMPLINGS]
    with torch.inference_mode():
        read_prompts(engine.decoder, dict(enumerate(requests)))
        state = engine.decoder.state
        pointers = [getattr(state, f.name).data_ptr() for f in fields(state)]
        with no_waiting():
            for _ in range(3):
                engine.decoder.round(128)
        assert [getattr(state, f.name).data_ptr() for f in fields(state)] == pointers
        assert (state.rounds == 3).all()
        if drafter == "draft":
            assert torch.equal(engine.decoder.head_state.length, state.length)


@pytest.mark.parametrize("shape", ["none", "chain:3", "tree:3x3x10"])
def test_a_row_that_is_done_stays_as_it_is(shape: str, target_of: TargetOf) -> None:
    head = BigramHead() if shape != "none" else None
    engine = open_engine(target_of("llama"), head, shape, batch_size=2, max_length=128)
    with torch.inference_mode():
        newcomers = {0: Request([5, 6, 7], 2, ignore_eos=True), 1: Request([8, 9], 60, ignore_eos=True)}
        read_prompts(engine.decoder, newcomers)
        engine.decoder.round(64)
        state = engine.decoder.state
        assert state.done.tolist() == [True, False]
        recorded = ("length", "output_length", "rounds")
        before = {name: getattr(state, name)[0].item() for name in recorded}
        output = state.output[0, :2].tolist()
        for _ in range(4):
            engine.decoder.round(64)
        assert {name: getattr(state, name)[0].item() for name in recorded} == before
        assert state.output[0, :2].tolist() == output
        assert state.rounds[1] == 5 and not state.done[1]
