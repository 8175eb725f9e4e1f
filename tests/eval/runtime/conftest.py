"""Tiny random targets of many families, and draft heads that follow a script."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from heads.base import Drafter, Observation, Pick, SharedLayers
from heads.target.model import FrozenTarget
from heads.tree import Proposal, TreeShape
from tests.switches import as_on_a_gpu

VOCAB, EOS = 61, 2
BASE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.3,  # wide, so that greedy text wanders
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=EOS,
)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
LATENT = dict(q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-float32": {},  # float32 on a CPU goes through the kernels
    "qwen3-float32": dict(head_dim=16, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen2": {},
    "qwen3": dict(head_dim=16),
    "mistral-window": dict(sliding_window=8),
    "phi3": {},
    "gemma2": dict(head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "gemma3_text": dict(head_dim=16, sliding_window=8, query_pre_attn_scalar=16, num_hidden_layers=6),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": dict(head_dim=16, num_experts=6, decoder_sparse_step=1, **EXPERTS),
    "deepseek_v3": dict(
        num_key_value_heads=4,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        **EXPERTS,
        **LATENT,
    ),
    "gpt_neox": {},
    "olmo2": {},
    "granite": dict(logits_scaling=2.0, embedding_multiplier=2.0),
    "cohere2": dict(sliding_window=8, head_dim=16),
    "gpt_oss": dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "glm4": dict(head_dim=16),
    "starcoder2": dict(sliding_window=None),
    "smollm3": {},
    "gpt2": {},
    "falcon": dict(multi_query=True, new_decoder_architecture=False, alibi=False),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EAGER = {"gemma2", "gpt_oss"}  # their attention has no fused form


def make_target(name: str) -> FrozenTarget:
    """A random target, the same every time: of one of FAMILIES, in float64 unless the name ends with another dtype."""
    family, _, last = name.rpartition("-")
    dtype = DTYPES.get(last, torch.float64)
    settings = FAMILIES[name if name in FAMILIES else family]
    config = AutoConfig.for_model(name.split("-")[0], **{**BASE, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager" if name in EAGER else "sdpa"
        )
    if "experts" in str(model):
        model.set_experts_implementation("eager")  # the grouped kernels know no float64
    return FrozenTarget(model, name)


@pytest.fixture(scope="session")
def target_of() -> Callable[[str], FrozenTarget]:
    """name -> its tiny target, made once."""
    made: dict[str, FrozenTarget] = {}

    def get(family: str) -> FrozenTarget:
        if family not in made:
            made[family] = make_target(family)
        return made[family]

    return get


@dataclass
class Story:
    """State of a scripted head."""

    shape: TreeShape
    histories: list[list[int]]
    """By row: the tokens in the target's cache, then the root."""


@dataclass
class ScriptedHead(Drafter):
    """Drafts from known continuations, right with a given chance at each node, and checks what it observes.

    `duplicates`: siblings often bear the same token. The tree's form is random under the shape's bounds, but for a
    chain.
    """

    target: FrozenTarget
    sequences: Sequence[Sequence[int]]
    """Prompts with their true outputs."""
    right: float = 0.6
    duplicates: bool = False
    aux_layer_ids: tuple[int, ...] = (1, 2)
    observations: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def new_state(self, shared: SharedLayers, *, batch_size: int, capacity: int, shape: TreeShape) -> Story:
        return Story(shape, [[0] for _ in range(batch_size)])

    def reset_rows(self, state: Story, rows: Tensor) -> None:
        for row, fresh in enumerate(rows.tolist()):
            if fresh:
                state.histories[row] = []

    def extend(self, state: Story, observation: Observation) -> None:
        B, M, _ = observation.hidden.shape
        assert observation.tokens.shape == (B, M + 1)
        for row in range(B):
            start, count = int(observation.start[row]), int(observation.count[row])
            if count == 0:
                continue
            history = state.histories[row]
            assert start == max(len(history) - 1, 0), "observations follow each other without a gap"
            tokens = observation.tokens[row, : count + 1].tolist()
            assert not history or history[-1] == tokens[0], "the first row observed is the root's"
            history[start:] = tokens
            self.observations += 1
            if self.observations % 5 == 1:  # a look at some; each costs a forward pass
                self.check_features(history[:-1], observation, row, start, count)

    def check_features(self, tokens: list[int], observation: Observation, row: int, start: int, count: int) -> None:
        ids = torch.tensor([tokens])
        position = torch.arange(len(tokens))[None]
        true = self.target.features(
            ids,
            positions=position,
            visible=position[:, None] <= position[..., None],
            key_positions=position,
            aux_layer_ids=self.aux_layer_ids,
        )
        span = slice(start, start + count)
        wide = self.target.dtype == torch.float64 and not self.target.is_recurrent  # recurrences are in float32
        bound = 1e-6 if wide else 1e-2
        torch.testing.assert_close(
            observation.aux_hidden_states[row, :count], true.aux_hidden_states[0, span], atol=bound, rtol=bound
        )
        torch.testing.assert_close(observation.hidden[row, :count], true.hidden[0, span], atol=bound, rtol=bound)

    def propose(self, state: Story, pick: Pick) -> Proposal:
        trees = [self.draw_tree(state.shape, history) for history in state.histories]
        tokens, parents, depths = (torch.tensor(part) for part in zip(*trees, strict=True))
        return Proposal(tokens, parents, depths, torch.zeros(tokens.shape))

    def draw_tree(self, shape: TreeShape, history: list[int]) -> tuple[list[int], list[int], list[int]]:
        tokens, parents, depths, true = [history[-1]], [0], [0], [True]
        n = len(history)
        known: Sequence[int] = next((s for s in self.sequences if list(s[:n]) == history), [])
        for j in range(1, shape.nodes):
            open_nodes = [i for i in range(j) if depths[i] < shape.depth]
            parent = j - 1 if shape.top_k == 1 else self.chance.choice(open_nodes)
            depth = depths[parent] + 1
            siblings = [tokens[i] for i in range(1, j) if parents[i] == parent]
            ahead = known[n - 1 + depth] if true[parent] and n - 1 + depth < len(known) else None
            if self.duplicates and siblings and self.chance.random() < 0.5:
                token = self.chance.choice(siblings)
            elif ahead is not None and self.chance.random() < self.right:
                token = ahead
            else:
                token = self.chance.choice([t for t in range(VOCAB) if t != ahead])
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
            true.append(ahead is not None and token == ahead)
        return tokens, parents, depths


@pytest.fixture
def scripted_head() -> type[ScriptedHead]:
    return ScriptedHead


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Eleven prompts of different lengths, one of them longer than a prefill chunk of 16."""
    chooser = random.Random(5)
    return [[chooser.randrange(3, VOCAB) for _ in range(n)] for n in (1, 2, 5, 9, 16, 17, 21, 3, 7, 12, 30)]


@pytest.fixture
def gpu_steps() -> Iterator[None]:
    with as_on_a_gpu():
        yield
