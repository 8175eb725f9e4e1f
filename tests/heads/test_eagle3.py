"""EAGLE-3: what it is trained to do is what it does when it drafts."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from heads.backends.selection import TORCH
from heads.base import Batch, Observation
from heads.eagle3 import Eagle3, Eagle3Config
from heads.errors import UserError
from heads.recurrent import RecurrentState
from heads.tree import parse_shape
from heads.vocab import build_vocab
from tests.heads.random_batch import random_batch

CONFIG = Eagle3Config(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    vocab_size=40,
    num_target_layers=8,
    aux_layer_ids=(2, 4, 5),
    draft_vocab_size=24,
    rope_theta=100.0,
    max_position_embeddings=64,
    depth=4,
)


def make_head(**changes: object) -> Eagle3:
    torch.manual_seed(1)
    config = dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
    head = Eagle3(config, *build_vocab(torch.randint(0, 9, (config.vocab_size,)), config.draft_vocab_size))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return head.double()


def make_batch(documents: list[list[int]], *, labels_from: int = 3) -> Batch:
    width, vocab = CONFIG.hidden_size, CONFIG.vocab_size
    return random_batch(documents, width=width, vocab=vocab, num_aux_layers=3, labels_from=labels_from)


def by_head(x: Tensor, d: int) -> Tensor:
    return x.view(*x.shape[:2], -1, d).transpose(1, 2)


def plain_loss(head: Eagle3, batch: Batch) -> Tensor:
    """The same loss written the long way: one dense mask over T * steps keys, all logits at once. Returns (K,) sums."""
    config, T = head.config, batch.tokens.shape[1]
    layer, kept = head.midlayer, head.kept
    H, G, d = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads, config.head_dim
    teacher = batch.shared.lm_head(batch.hidden)  # (B, T, V); row t predicts x_{t+1}
    p = teacher[..., kept].softmax(-1)
    state = head.fuse(batch.aux_hidden_states)
    all_keys, all_values, sums = [], [], []
    same = batch.documents[:, :, None] == batch.documents[:, None, :]
    for i in range(config.depth):
        x = torch.cat([layer.input_layernorm(batch.embeddings.roll(-1 - i, 1)), layer.hidden_norm(state)], -1)
        angle = (batch.positions + i)[:, None, :, None] * config.rope_theta ** -(
            torch.arange(0, d, 2, dtype=torch.float64) / d
        )
        cos_sin = torch.polar(torch.ones_like(angle), angle)

        def rope(y: Tensor, cos_sin: Tensor = cos_sin) -> Tensor:
            z = torch.complex(y[..., : d // 2], y[..., d // 2 :]) * cos_sin
            return torch.cat([z.real, z.imag], -1)

        q, k, v = (
            rope(by_head(layer.self_attn.q_proj(x), d)),
            rope(by_head(layer.self_attn.k_proj(x), d)),
            by_head(layer.self_attn.v_proj(x), d),
        )
        all_keys.append(k.repeat_interleave(G, 1))
        all_values.append(v.repeat_interleave(G, 1))
        causal = torch.ones(T, T).tril().bool() & same
        diagonal = torch.eye(T).bool().expand_as(causal)
        mask = torch.cat([causal, *[diagonal] * i], -1)[:, None]
        scores = (q @ torch.cat(all_keys, 2).mT / math.sqrt(d)).masked_fill(~mask, -torch.inf)
        out = (scores.softmax(-1) @ torch.cat(all_values, 2)).transpose(1, 2).flatten(2)
        state = state + layer.self_attn.o_proj(out)
        state = state + layer.mlp(layer.post_attention_layernorm(state))
        logq = head.lm_head(head.norm(state)).log_softmax(-1)
        total = torch.zeros((), dtype=torch.float64)
        for b in range(len(batch.tokens)):
            for t in range(T):
                label = t + 2 + i
                if label < T and batch.loss_mask[b, label] and batch.documents[b, label] == batch.documents[b, t]:
                    target = p[b, label - 1]
                    if teacher[b, label - 1].argmax() in kept:
                        total = total + (target * (target.log() - logq[b, t])).sum()
        sums.append(total)
        if config.norm_output:
            state = head.norm(state)
    assert G * config.num_key_value_heads == H
    return torch.stack(sums)


@pytest.mark.parametrize("norm_output", [False, True])
def test_loss_and_gradients_equal_the_dense_reference(norm_output: bool) -> None:
    head, batch = make_head(norm_output=norm_output, fc_norm=norm_output), make_batch([[11, 3, 7], [2, 1, 18]])
    scale = torch.tensor([0.5, 0.25, 0.2, 0.1], dtype=torch.float64)
    expected = plain_loss(head, batch)
    (expected * scale).sum().backward()
    wanted = {name: parameter.grad.clone() for name, parameter in head.named_parameters() if parameter.grad is not None}
    head.zero_grad()
    found = head.loss(batch, scale)
    found.loss.backward()
    torch.testing.assert_close(found.sums, expected.detach())
    torch.testing.assert_close(found.loss.detach(), (expected * scale).sum().detach())
    assert wanted.keys() == dict(head.named_parameters()).keys()
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)


def test_counts_are_the_rows_that_the_loss_sums() -> None:
    head, batch = make_head(draft_vocab_size=40), make_batch([[11, 3, 7], [2, 1, 18]])
    hand = [
        sum(
            int(batch.loss_mask[b, t + 2 + i] and batch.documents[b, t + 2 + i] == batch.documents[b, t])
            for b in range(2)
            for t in range(21 - 2 - i)
        )
        for i in range(4)
    ]
    assert head.counts(batch.loss_mask, batch.documents).tolist() == hand


def test_documents_do_not_see_each_other() -> None:
    head, batch = make_head(), make_batch([[11, 3, 7], [2, 1, 18]])
    alone = dataclasses.replace(
        batch, aux_hidden_states=batch.aux_hidden_states.clone(), embeddings=batch.embeddings.clone()
    )
    alone.aux_hidden_states[0, :11].normal_()
    alone.embeddings[0, :11].normal_()
    for i, (before, after) in enumerate(zip(head.unroll(batch, 4), head.unroll(alone, 4), strict=True)):
        torch.testing.assert_close(before[0, 14 : 20 - i], after[0, 14 : 20 - i])  # later slots have no token to see
        assert not torch.allclose(before[0, :11], after[0, :11])


def greedy(logits: Tensor, positions: Tensor, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    logp, columns = logits.log_softmax(-1).topk(count, dim=-1)
    return columns if token_ids is None else token_ids[columns], logp


def extend(head: Eagle3, batch: Batch, shape: str, lengths: list[int]) -> RecurrentState:
    """A draft state that has seen the first `lengths` positions of each row, in one go."""
    M = max(lengths)
    state = head.new_state(
        batch.shared,
        batch_size=len(lengths),
        capacity=batch.tokens.shape[1] + 8,
        shape=parse_shape(shape),
        backend=TORCH,
    )
    head.extend(
        state,
        Observation(
            tokens=batch.tokens[:, : M + 1],
            aux_hidden_states=batch.aux_hidden_states[:, :M],
            hidden=batch.hidden[:, :M],
            start=torch.zeros(len(lengths), dtype=torch.int64),
            count=torch.tensor(lengths),
            nodes=None,
        ),
    )
    return state


@pytest.mark.parametrize("norm_output", [False, True])
def test_a_drafting_step_is_a_training_step(norm_output: bool) -> None:
    """Let training see the tokens that the draft chose: every state that drafting reads out is the state that training
    trains."""
    head, batch = make_head(norm_output=norm_output), make_batch([[20], [20]])
    lengths = [9, 13]
    state = extend(head, batch, "chain:4", lengths)
    seen: list[Tensor] = []
    hook = head.lm_head.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    proposal = head.propose(state, greedy)
    hook.remove()
    tokens = batch.tokens.clone()
    for b, n in enumerate(lengths):
        tokens[b, n + 1 : n + 5] = proposal.tokens[b, 1:]
    trained = head.unroll(dataclasses.replace(batch, tokens=tokens, embeddings=batch.shared.embed_tokens(tokens)), 4)
    for i, drafted in enumerate(seen):
        for b, n in enumerate(lengths):
            torch.testing.assert_close(drafted[b, 0], trained[i][b, n - 1])


def test_a_chain_equals_a_loop_that_recomputes_everything() -> None:
    head, batch = make_head(), make_batch([[20]])
    n = 9
    proposal = head.propose(extend(head, batch, "chain:4", [n]), greedy)
    tokens = batch.tokens.clone()
    for i in range(4):
        cut = dataclasses.replace(batch, tokens=tokens, embeddings=batch.shared.embed_tokens(tokens))
        best = head.lm_head(head.unroll(cut, 4)[i][0, n - 1]).argmax()
        tokens[0, n + 1 + i] = head.kept[best]
    assert proposal.tokens[0].tolist() == tokens[0, n : n + 5].tolist()
    assert proposal.parents.tolist() == [[0, 0, 1, 2, 3]]


def test_observing_in_pieces_equals_observing_at_once() -> None:
    """Rounds observe a ragged handful of positions at a time, with padding behind; nothing of it may be seen later."""
    head, batch = make_head(), make_batch([[20], [20]])
    whole = head.propose(extend(head, batch, "tree:3x3x9", [12, 12]), greedy)
    state = head.new_state(batch.shared, batch_size=2, capacity=28, shape=parse_shape("tree:3x3x9"), backend=TORCH)
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
    assert start.tolist() == [12, 12]
    assert torch.equal(whole.tokens, pieces.tokens) and torch.equal(whole.parents, pieces.parents)
    torch.testing.assert_close(whole.scores, pieces.scores)


@pytest.mark.parametrize("shape", ["tree:3x3x13", "static:3.2.1"])
def test_every_path_of_a_tree_scores_as_a_chain_would(shape: str) -> None:
    """A node's score is the sum of log q along its path, whatever its neighbours: trees do not leak between
    branches."""
    head, batch = make_head(), make_batch([[20]])
    n = 9
    proposal = head.propose(extend(head, batch, shape, [n]), greedy)
    for node in range(1, proposal.tokens.shape[1]):
        path, at = [], node
        while at:
            path.append(at)
            at = int(proposal.parents[0, at])
        path.reverse()
        tokens = batch.tokens.clone()
        total = 0.0
        for i, step in enumerate(path):
            cut = dataclasses.replace(batch, tokens=tokens, embeddings=batch.shared.embed_tokens(tokens))
            logq = head.lm_head(head.unroll(cut, 4)[i][0, n - 1]).log_softmax(-1)
            token = int(proposal.tokens[0, step])
            total += float(logq[(head.kept == token).nonzero()[0, 0]].detach())
            tokens[0, n + 1 + i] = token
        assert proposal.depths[0, node] == len(path)
        assert float(proposal.scores[0, node]) == pytest.approx(total, abs=1e-9)


def test_a_tree_wider_than_the_draft_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="tree tree:2x25x40: 25 children of a node, the head drafts 24"):
        extend(make_head(), make_batch([[20]]), "tree:2x25x40", [9])


def test_each_option_changes_the_function() -> None:
    batch = make_batch([[20]])
    plain = make_head().unroll(batch, 4)
    for option in ("fc_norm", "norm_output"):
        changed = make_head(**{option: True}).unroll(batch, 4)
        assert not torch.allclose(plain[1], changed[1]), option
    assert torch.equal(plain[0], make_head(norm_output=True).unroll(batch, 4)[0])  # the first step recycles nothing yet


@pytest.mark.parametrize("fc_norm", [False, True])
def test_initialise_starts_from_the_target_at_unit_size(fc_norm: bool) -> None:
    head, batch, lm_head = make_head(fc_norm=fc_norm), make_batch([[20]]), torch.randn(40, 16, dtype=torch.float64)
    norm, scales = torch.rand(16, dtype=torch.float64), torch.tensor([3.0, 30.0, 300.0], dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.startswith("fc_norm"):
                parameter.fill_(1.0)
    head.initialise(lm_head, norm, scales)
    assert torch.equal(head.lm_head.weight, lm_head[head.kept]) and torch.equal(head.norm.weight, norm)
    fused = head.fuse(batch.aux_hidden_states * scales.repeat_interleave(16))
    assert 0.8 < float(fused.detach().square().mean().sqrt()) < 1.3


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"depth": 0}, "depth"),
        ({"depth_decay": 0.0}, "depth_decay"),
        ({"loss": "mse"}, "loss"),
        ({"head_dim": 3}, "head_dim"),
    ],
)
def test_bad_settings_are_named(change: dict[str, object], word: str) -> None:
    with pytest.raises(UserError, match=f"head.{word}"):
        make_head(**change)


def test_gradients_reach_every_parameter() -> None:
    head, batch = make_head(fc_norm=True), make_batch([[20]])
    head.loss(batch, torch.ones(4, dtype=torch.float64)).loss.backward()
    missing = [name for name, p in head.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not missing and isinstance(head, nn.Module)
