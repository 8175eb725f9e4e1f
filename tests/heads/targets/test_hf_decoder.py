"""The Hugging Face form with the kernel gives what its own attention gives."""

from typing import Any

import pytest
import torch

from eval.runtime.engine import Engine, EngineOptions, Request
from heads.core.errors import warn_once
from heads.core.tree import parse_shape
from heads.kernels.slots import DraftSlots, PrefillSlots, TreeSlots, ancestors
from heads.registry import build_untrained
from heads.targets.cached_decoder import CacheSpec
from heads.targets.frozen_target import Features, FrozenTarget
from heads.targets.hf_decoder import HFDecoder
from tests.heads.targets.test_frozen_target import make_model
from tests.support.closeness import assert_close
from tests.support.switches import kernels_on_cpu

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for CPUs"),
    pytest.mark.filterwarnings("ignore:(All-NaN|invalid value)"),  # by the interpreter's numpy
]
ON_KERNEL = ["llama", "qwen2 mixed", "gemma3_text", "phi3", "cohere2", "granite", "gpt2", "opt", "gpt_neox", "olmo3"]
PARENTS = torch.tensor([[0, 0, 0, 1, 3, 2], [0, 0, 1, 2, 3, 1]])


@torch.inference_mode()
def run(target: FrozenTarget) -> list[Features]:
    """Pass prompts of two lengths, a level of a draft and a tree."""
    draw = torch.Generator().manual_seed(1)
    decoder = HFDecoder(target, CacheSpec(batch_size=2, capacity=64, aux_layer_ids=(1, 2), nodes=6))
    lengths, made = (23, 9), []
    for row, count in enumerate(lengths):
        tokens = torch.randint(3, 40, (1, count), generator=draw)
        known = PrefillSlots(torch.zeros(1, dtype=torch.int64), None, decoder.slot, count)
        made.append(decoder.forward(tokens, known, extent=64, row=row, prompt=True))
    tokens, length = torch.randint(3, 40, (2, 6), generator=draw), torch.tensor(lengths)
    level = DraftSlots(length, torch.arange(4).expand(2, 4)[..., None], decoder.slot, chain=False, scratch=6)
    made.append(decoder.forward(tokens[:, :4], level, extent=64))
    above = ancestors(PARENTS, 4)
    tree = TreeSlots(length, PARENTS, above.sum(-1) - 1, above, decoder.slot)
    return [*made, decoder.forward(tokens, tree, extent=64)]


@pytest.mark.parametrize("family", ON_KERNEL)
def test_the_kernel_gives_the_states_of_the_familys_own_attention(family: str) -> None:
    two = {"n_layer": 2} if family == "gpt2" else {"num_hidden_layers": 2}
    windows = {"max_window_layers": 1} if family == "qwen2 mixed" else {}
    target = FrozenTarget(make_model(family, **two, **windows).eval(), family)
    masked = run(target)
    with kernels_on_cpu():
        found = run(target)
    for ours, theirs in zip(found, masked, strict=True):
        assert_close(ours.hidden, theirs.hidden, roundings=512)
        assert_close(ours.aux_hidden_states, theirs.aux_hidden_states, roundings=512)


@pytest.mark.parametrize(
    ("family", "uses_kernel"),
    [pytest.param("qwen2 mixed", True, marks=pytest.mark.slow), ("gemma2", False), ("deepseek_v3", False)],
)
def test_which_families_the_kernel_serves(family: str, uses_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma-2 caps its scores and DeepSeek's values are narrower than its keys: they keep their own attention."""
    narrow = {"v_head_dim": 6} if family == "deepseek_v3" else {}
    target = FrozenTarget(make_model(family, **narrow).eval(), family)
    monkeypatch.setattr("heads.targets.native_decoder.CLASSES", set())  # so that none has a native decoder
    request = [Request([3, 4, 5, 6], 8, ignore_eos=True)]
    expected = Engine(target, None, EngineOptions(max_length=32)).generate(request)[0].tokens
    warn_once.cache_clear()
    with kernels_on_cpu():
        engine = Engine(target, None, EngineOptions(max_length=32))
        assert engine.decoder.target.reads_masks is not uses_kernel
        assert engine.generate(request)[0].tokens == expected
        if uses_kernel:  # a draft that borrows the target's layers, whose config is not its own
            draft: Any = build_untrained("early_exit:2", target)
            options = EngineOptions(shape=parse_shape("chain:2"), max_length=32)
            assert Engine(target, draft, options).generate(request)[0].tokens == expected
