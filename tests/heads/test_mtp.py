"""Multi-token prediction: what it is trained to do is what it does when it drafts, with one module or several."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from heads.backends.selection import TORCH
from heads.base import Batch, Observation
from heads.errors import UserError
from heads.mtp import Mtp, MtpConfig
from heads.recurrent import RecurrentState
from heads.tree import parse_shape
from heads.vocab import build_vocab
from tests.heads.random_batch import random_batch

CONFIG = MtpConfig(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    vocab_size=40,
    num_target_layers=8,
    draft_vocab_size=24,
    rope_theta=100.0,
    max_position_embeddings=64,
    depth=4,
)
FORMS = [
    {"num_modules": 1},
    {"num_modules": 2, "layout": "deepseek"},
    {"num_modules": 4},
    {"num_modules": 1, "layout": "qwen"},
]
"""One module for all four steps; two, of which the second does three; one for each; one that reads every token."""


def make_head(**changes: object) -> Mtp:
    torch.manual_seed(1)
    config = dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
    head = Mtp(config, *build_vocab(torch.randint(0, 9, (config.vocab_size,)), config.draft_vocab_size))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return head.double()


def make_batch(documents: list[list[int]], *, labels_from: int = 3) -> Batch:
    width, vocab = CONFIG.hidden_size, CONFIG.vocab_size
    return random_batch(documents, width=width, vocab=vocab, labels_from=labels_from)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt() * weight


def plain_states(head: Mtp, batch: Batch) -> list[Tensor]:
    """DeepSeek-V3's formula written the long way, slot by slot: h^k_t for each k, from lists of keys.

    Module k reads [norm(h^{k-1}_t) ; norm(e(x_{t+k}))] and attends to its own inputs of the slots before; where the
    last module is used again, to its first inputs of the slots before and to its own of this slot.
    """
    config, weights = head.config, head.state_dict()
    heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    B, T, D = batch.hidden.shape
    states, out = batch.hidden, []
    first: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    later: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}

    def rope(x: Tensor, position: int) -> Tensor:
        angle = position * config.rope_theta ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    for k in range(1, config.depth + 1):
        i = min(k, config.num_modules) - 1
        w = {n.removeprefix(f"mtp_layers.{i}."): v for n, v in weights.items() if n.startswith(f"mtp_layers.{i}.")}
        made = torch.full_like(states, torch.nan)
        if k <= config.num_modules:
            first, later = {}, {(b, t): [] for b in range(B) for t in range(T)}
        for b in range(B):
            for t in range(T):
                if t + k >= T or batch.documents[b, t + k] != batch.documents[b, t]:
                    continue
                position = int(batch.positions[b, t]) + k - 1
                zeroed = position == 0 and config.layout != "qwen"  # as the engines' classes of the other families do
                embedding = torch.zeros_like(batch.embeddings[b, t]) if zeroed else batch.embeddings[b, t + k]
                parts = [
                    rms(embedding, w["token_layernorm.weight"]),
                    rms(states[b, t], w["hidden_layernorm.weight"]),
                ]
                x = w["input_proj.weight"] @ torch.cat(parts[::-1] if config.layout == "mimo" else parts)
                y = rms(x, w["block.input_layernorm.weight"])
                q = rope((w["block.self_attn.q_proj.weight"] @ y).view(heads, d), position)
                key = rope((w["block.self_attn.k_proj.weight"] @ y).view(groups, d), position)
                value = (w["block.self_attn.v_proj.weight"] @ y).view(groups, d)
                if k <= config.num_modules:
                    first[b, t] = (key, value)
                else:
                    later[b, t].append((key, value))
                start = t - int(batch.positions[b, t])
                seen = [first[b, s] for s in range(start, t + 1)] + later[b, t]
                heard = []
                for head_id in range(heads):
                    g = head_id // (heads // groups)
                    scores = torch.stack([q[head_id] @ key[g] for key, _ in seen]) / math.sqrt(d)
                    heard.append(scores.softmax(0) @ torch.stack([value[g] for _, value in seen]))
                x = x + w["block.self_attn.o_proj.weight"] @ torch.cat(heard)
                y = rms(x, w["block.post_attention_layernorm.weight"])
                gate, up = w["block.mlp.gate_proj.weight"] @ y, w["block.mlp.up_proj.weight"] @ y
                x = x + w["block.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
                made[b, t] = rms(x, w["final_layernorm.weight"])
        assert made.shape == (B, T, D)
        out.append(made)
        states = made
    return out


@pytest.mark.parametrize("form", FORMS)
def test_the_states_are_the_papers_formula(form: dict[str, object]) -> None:
    head, batch = make_head(**form), make_batch([[11, 3, 7], [2, 1, 18]])
    for k, (ours, plain) in enumerate(zip(head.unroll(batch, 4), plain_states(head, batch), strict=True), start=1):
        there = ~plain.isnan().any(-1)
        assert there.sum() == sum(max(n - k, 0) for n in (11, 3, 7, 2, 1, 18))
        torch.testing.assert_close(ours[there], plain[there])


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_those_of_the_formula(form: dict[str, object]) -> None:
    head, batch = make_head(**form), make_batch([[11, 3, 7], [2, 1, 18]])
    scale = torch.tensor([0.5, 0.25, 0.2, 0.1], dtype=torch.float64)
    teacher = batch.shared.lm_head(batch.hidden)
    assert batch.shared.lm_head_weight is not None
    p = teacher[..., head.kept].softmax(-1)
    sums = []
    for k, state in enumerate(head.unroll(batch, 4), start=1):
        logq = (state @ batch.shared.lm_head_weight[head.kept].T).log_softmax(-1)
        total = torch.zeros((), dtype=torch.float64)
        for b in range(2):
            for t in range(21 - k - 1):
                label = t + k + 1
                same = batch.documents[b, label] == batch.documents[b, t]
                if batch.loss_mask[b, label] and same and teacher[b, label - 1].argmax() in head.kept:
                    distribution = p[b, label - 1]
                    total = total + (distribution * (distribution.log() - logq[b, t])).sum()
        sums.append(total)
    expected = torch.stack(sums)
    (expected * scale).sum().backward()
    wanted = {name: parameter.grad.clone() for name, parameter in head.named_parameters() if parameter.grad is not None}
    head.zero_grad()
    found = head.loss(batch, scale)
    found.loss.backward()
    torch.testing.assert_close(found.sums, expected.detach())
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)
        assert wanted[name].abs().sum() > 0, name


@pytest.mark.parametrize("form", FORMS)
def test_documents_do_not_see_each_other(form: dict[str, object]) -> None:
    head, batch = make_head(**form), make_batch([[11, 3, 7], [2, 1, 18]])
    alone = dataclasses.replace(batch, hidden=batch.hidden.clone(), embeddings=batch.embeddings.clone())
    alone.hidden[0, :11].normal_()
    alone.embeddings[0, :11].normal_()
    for i, (before, after) in enumerate(zip(head.unroll(batch, 4), head.unroll(alone, 4), strict=True)):
        torch.testing.assert_close(before[0, 14 : 20 - i], after[0, 14 : 20 - i])  # later slots have no token to see
        assert not torch.allclose(before[0, :11], after[0, :11])


def greedy(logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    logp, columns = logits.log_softmax(-1).topk(count, dim=-1)
    return columns if token_ids is None else token_ids[columns], logp


def extend(head: Mtp, batch: Batch, shape: str, lengths: list[int]) -> RecurrentState:
    """The state after the first `lengths` positions of each row."""
    B = len(lengths)
    state = head.new_state(batch.shared, batch_size=B, capacity=28, shape=parse_shape(shape), backend=TORCH)
    M = max(lengths)
    start = torch.zeros(B, dtype=torch.int64)
    count = torch.tensor(lengths)
    head.extend(
        state,
        Observation(batch.tokens[:, : M + 1], batch.aux_hidden_states[:, :M], batch.hidden[:, :M], start, count, None),
    )
    return state


@pytest.mark.parametrize("form", FORMS)
def test_a_drafting_step_is_a_training_step(form: dict[str, object]) -> None:
    """Let training see the tokens that the draft chose: every state that drafting reads out is the one that training
    trains; also where the prompt is shorter than the modules are many, and past the steps trained."""
    head, batch = make_head(**form), make_batch([[20], [20], [20]])
    lengths = [9, 13, 1]
    state = extend(head, batch, "chain:6", lengths)
    seen: list[Tensor] = []
    logits = head.logits

    def spy(read: Tensor, lm_head_weight: Tensor) -> Tensor:
        seen.append(read)
        return logits(read, lm_head_weight)

    head.logits = spy  # type: ignore[method-assign, assignment]
    proposal = head.propose(state, greedy)
    tokens = batch.tokens.clone()
    for b, n in enumerate(lengths):
        tokens[b, n + 1 : n + 7] = proposal.tokens[b, 1:]
    assert len(seen) == 6
    trained = head.unroll(dataclasses.replace(batch, tokens=tokens, embeddings=batch.shared.embed_tokens(tokens)), 6)
    for i, drafted in enumerate(seen[:6]):
        for b, n in enumerate(lengths):
            torch.testing.assert_close(drafted[b, 0], trained[i][b, n - 1])


@pytest.mark.parametrize("form", FORMS)
def test_a_chain_equals_a_loop_that_recomputes_everything(form: dict[str, object]) -> None:
    head, batch = make_head(**form), make_batch([[20]])
    n = 9
    proposal = head.propose(extend(head, batch, "chain:4", [n]), greedy)
    tokens = batch.tokens.clone()
    for i in range(4):
        cut = dataclasses.replace(batch, tokens=tokens, embeddings=batch.shared.embed_tokens(tokens))
        best = (head.lm_head_weight(batch.shared) @ plain_states(head, cut)[i][0, n - 1]).argmax()
        tokens[0, n + 1 + i] = head.kept[best]
    assert proposal.tokens[0].tolist() == tokens[0, n : n + 5].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_observing_in_pieces_equals_observing_at_once(form: dict[str, object]) -> None:
    """Rounds observe a ragged handful of positions at a time, with padding behind; nothing of it may be seen later."""
    head, batch = make_head(**form), make_batch([[20], [20]])
    whole = head.propose(extend(head, batch, "tree:4x3x15", [12, 12]), greedy)
    state = head.new_state(batch.shared, batch_size=2, capacity=28, shape=parse_shape("tree:4x3x15"), backend=TORCH)
    start = torch.zeros(2, dtype=torch.int64)
    for counts in ([5, 2], [1, 4], [4, 1], [2, 4], [0, 1]):
        count = torch.tensor(counts)
        rows = start[:, None] + torch.arange(6)
        aux_hidden_states, hidden = (
            x.gather(1, rows[:, :5, None].expand(-1, -1, x.shape[2])) for x in (batch.aux_hidden_states, batch.hidden)
        )
        head.extend(
            state, Observation(batch.tokens.gather(1, rows), aux_hidden_states, hidden, start.clone(), count, None)
        )
        head.propose(state, greedy)
        start += count
    pieces = head.propose(state, greedy)
    assert torch.equal(whole.tokens, pieces.tokens) and torch.equal(whole.parents, pieces.parents)
    torch.testing.assert_close(whole.scores, pieces.scores)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", ["tree:4x3x20", "static:3.2.1.1"])
def test_every_path_of_a_tree_scores_as_a_chain_would(shape: str, form: dict[str, object]) -> None:
    """A node's score is the sum of log q along its path, whatever its neighbours: trees do not leak between
    branches."""
    head, batch = make_head(**form), make_batch([[20]])
    n = 9
    proposal = head.propose(extend(head, batch, shape, [n]), greedy)
    assert int(proposal.depths.max()) == 4
    for node in range(1, proposal.tokens.shape[1]):
        path, at = [], node
        while at:
            path.append(int(proposal.tokens[0, at]))
            at = int(proposal.parents[0, at])
        tokens = batch.tokens.clone()
        tokens[0, n + 1 : n + 1 + len(path)] = torch.tensor(path[::-1])
        states = head.unroll(dataclasses.replace(batch, tokens=tokens, embeddings=batch.shared.embed_tokens(tokens)), 4)
        total = 0.0
        for i, token in enumerate(path[::-1]):
            logq = (head.lm_head_weight(batch.shared) @ states[i][0, n - 1]).log_softmax(-1)
            total += float(logq[(head.kept == token).nonzero()[0, 0]].detach())
        assert float(proposal.scores[0, node]) == pytest.approx(total, abs=1e-9)


def test_what_it_foresees_is_what_a_chain_guesses() -> None:
    head, batch = make_head(num_modules=2), make_batch([[20]])
    n = 9
    proposal = head.propose(extend(head, batch, "chain:4", [n]), greedy)
    tokens = batch.tokens.clone()
    tokens[0, n + 1 : n + 5] = proposal.tokens[0, 1:]
    tokens[0, n + 3] = (tokens[0, n + 3] + 1) % 40
    known = dataclasses.replace(batch, tokens=tokens, embeddings=batch.shared.embed_tokens(tokens))
    assert head.foresees(known, 3)[:, 0, n - 1].tolist() == [True, True, False]


def test_the_whole_vocabulary_needs_no_table() -> None:
    head, batch = make_head(draft_vocab_size=40), make_batch([[20]])
    assert (
        head.lm_head_weight(batch.shared) is batch.shared.lm_head_weight
        and not {"d2t", "t2d"} & head.to_checkpoint().keys()
    )
    assert {"d2t", "t2d"} <= make_head().to_checkpoint().keys()


@pytest.mark.parametrize("layout", ["mimo", "deepseek"])
def test_a_new_head_hands_on_the_targets_state(layout: str) -> None:
    head, batch = make_head(layout=layout, num_modules=2), make_batch([[20]])
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
    head.initialise(7.0)
    normed = batch.hidden / batch.hidden.square().mean(-1, keepdim=True).sqrt()
    for state in head.unroll(batch, 2):
        assert float((state * normed).detach().mean()) / 7 > 0.9  # the cosine of both


def test_the_weights_of_the_steps_are_fastmtps() -> None:
    weights = make_head(depth=3, depth_decay=0.6).depth_weights
    assert [round(weight, 2) for weight in weights] == [0.51, 0.31, 0.18]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"depth": 0}, "depth"),
        ({"num_modules": 5}, "num_modules"),
        ({"num_modules": 0}, "num_modules"),
        ({"depth_decay": 0.0}, "depth_decay"),
        ({"loss": "mse"}, "loss"),
        ({"layout": "llama"}, "layout"),
        ({"layout": "qwen", "num_modules": 2}, "num_modules"),
        ({"head_dim": 3}, "head_dim"),
        ({"rope_theta": 0.0}, "rope_theta"),
    ],
)
def test_bad_settings_are_named(change: dict[str, object], word: str) -> None:
    with pytest.raises(UserError, match=f"head.{word}"):
        make_head(**change)
