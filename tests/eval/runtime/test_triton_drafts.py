"""With their nodes picked and chosen by kernels, in Triton's interpreter, rounds draft what they draft without."""

from dataclasses import replace

import pytest
import torch

from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling import Sampling
from heads.backends.selection import BACKENDS, TORCH, TRITON
from heads.growth import grow
from heads.tree import parse_shape
from tests.launches import Launches
from tests.small_targets import make_head, make_target

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the suite runs the kernels themselves")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("shape", ["tree:3x3x8", "tree:2x4x21", "static:3.2", "chain:3"])
def test_texts_and_acceptance_are_those_of_tensor_operations(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled rows side by side; few tokens, so that an untrained head is right now and then."""
    target = make_target("llama", torch.float32, hidden_size=64, intermediate_size=64, vocab_size=19)
    requests = [
        Request([5, 6, 7], 14, ignore_eos=True),
        Request([9, 8], 12, Sampling(temperature=0.9, seed=3), ignore_eos=True),
        Request([11] * 4, 13, Sampling(temperature=1.4, top_k=9, seed=5), ignore_eos=True),
    ]
    options = EngineOptions(batch_size=3, max_length=64, backend="torch")
    plain = Engine(target, None, options).generate(requests)
    found = []
    for picks in (TORCH, TRITON):
        monkeypatch.setitem(BACKENDS, "torch", replace(TORCH, select=picks.select, sampling=picks.sampling))
        options = EngineOptions(shape=parse_shape(shape), batch_size=3, max_length=64, backend="torch")
        engine = Engine(target, make_head(target), options)
        outputs = engine.generate(requests)
        assert [o.tokens for o in outputs] == [o.tokens for o in plain]
        found.append([o.accepted for o in outputs])
    assert found[0] == found[1] and sum(map(sum, found[0])) > 0


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("text", "most"), [("tree:6x8x32", 20), ("static:3.2.1", 10), ("chain:5", 14)])
def test_a_level_takes_two_launches_to_pick_and_one_to_choose(text: str, most: int, temperature: float) -> None:
    """Beside them: the positions, and the end of a chain or a tree. Sampling takes no more."""
    shape, rows, root = parse_shape(text), TRITON.sampling(2), torch.arange(2)
    rows.set_row(0, Sampling(temperature, seed=3))
    levels, ids = torch.randn(2, 8, 50), torch.arange(50)

    def work() -> None:
        grow(
            shape,
            root,
            root,
            levels[:, :1],
            rows.pick,
            lambda t, r, p, level: levels[:, : t.shape[1]],
            ids,
            TRITON.select,
        )

    with Launches(runs=False):
        work()  # what is made once
    with Launches(runs=False) as launches:
        work()
    assert launches.names.total() == most, launches.names
