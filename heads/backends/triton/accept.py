"""The acceptance rule `match` and the features of the accepted nodes. Each is one kernel, instead of many small ones.

Letters: B rows, N nodes, K depth, M = K + 1, D hidden, X width of the auxiliary hidden states.
"""

from torch import Tensor

from heads.backends.slot_mapping import ancestors
from heads.backends.torch import accept as twin
from heads.backends.triton.availability import constexpr, jit, next_power_of_2, tl
from heads.tree import Acceptance, Proposal

MOST_NODES = 128
"""Maximum number of nodes. A program compares all pairs of nodes, and larger trees would not fit its registers."""


def match(proposal: Proposal, choice: Tensor, above: Tensor | None, depth: int) -> Acceptance:
    """Same as `heads.backends.torch.accept.match`, for choice (B, N). The kernel walks from the root and needs no
    ancestors."""
    B, N = choice.shape
    if N > MOST_NODES:
        return twin.match(proposal, choice, ancestors(proposal.parents, depth) if above is None else above, depth)
    accepted, path, emitted = choice.new_empty(B), choice.new_empty(B, depth + 1), choice.new_empty(B, depth + 1)
    tokens, parents, depths = proposal.tokens, proposal.parents, proposal.depths
    assert tokens.stride(1) == parents.stride(1) == depths.stride(1) == choice.stride(1) == 1
    _accept[(B,)](
        tokens, parents, depths, choice, accepted, path, emitted, N,
        tokens.stride(0), parents.stride(0), depths.stride(0), choice.stride(0),
        K=depth, PAD=next_power_of_2(N), PAD_M=next_power_of_2(depth + 1),
    )  # fmt: skip
    return Acceptance(accepted, path, emitted)


@jit
def _accept(  # type: ignore[no-untyped-def]
    TOKENS, PARENTS, DEPTHS, CHOICE, ACCEPTED, PATH, EMITTED, N, tokens_b, parents_b, depths_b, choice_b,
    K: constexpr, PAD: constexpr, PAD_M: constexpr,
):  # fmt: skip
    """Process one row: mark the nodes that follow the root, level by level, take the deepest, then write its path from
    its end to the root, and zeros after it."""
    b, j = tl.program_id(0), tl.arange(0, PAD)
    TOKENS += b * tokens_b
    PARENTS += b * parents_b
    DEPTHS += b * depths_b
    CHOICE += b * choice_b
    real = j < N
    parent = tl.load(PARENTS + j, mask=real, other=0)
    depth = tl.load(DEPTHS + j, mask=real, other=-1)
    token = tl.load(TOKENS + j, mask=real, other=-1)
    wanted = tl.load(CHOICE + parent, mask=real, other=-2)
    above = tl.load(DEPTHS + parent, mask=real, other=-9)
    follows = real & (token == wanted) & (depth == above + 1)
    alive = (j == 0).to(tl.int32)
    for level in range(1, K + 1):
        # A node of this level that follows is alive if its parent is.
        held = tl.sum(tl.where(parent[:, None] == j[None], alive[None], 0), 1)
        alive = tl.where(follows & (depth == level), held, alive)
    score = tl.where((alive > 0) & real, depth * PAD + (PAD - 1 - j), -1)
    best = tl.max(score, 0)
    node = PAD - 1 - best % PAD
    count = best // PAD
    tl.store(ACCEPTED + b, count)
    for back in range(0, K + 1):
        step = count - back
        if step >= 0:
            tl.store(PATH + b * (K + 1) + step, node)
            tl.store(EMITTED + b * (K + 1) + step, tl.load(CHOICE + node))
            node = tl.load(PARENTS + node)
    rest = tl.arange(0, PAD_M)
    behind = (rest > count) & (rest <= K)
    nothing = tl.zeros([PAD_M], tl.int64)
    tl.store(PATH + b * (K + 1) + rest, nothing, mask=behind)
    tl.store(EMITTED + b * (K + 1) + rest, nothing, mask=behind)


def take_path(aux_hidden_states: Tensor, hidden: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
    """Same as `heads.backends.torch.accept.take_path`, as a kernel."""
    (B, N, D), X, M = hidden.shape, aux_hidden_states.shape[2], path.shape[1]
    taken = aux_hidden_states.new_empty(B, M, X), hidden.new_empty(B, M, D)
    block = min(2048, next_power_of_2(max(D, X)))
    aux_blocks = -(-X // block)
    _take_path[(B * M, aux_blocks + -(-D // block))](
        aux_hidden_states.contiguous(), hidden.contiguous(), path.contiguous(), *taken, N, M, X, D, aux_blocks,
        BLOCK=block,
    )  # fmt: skip
    return taken


@jit
def _take_path(  # type: ignore[no-untyped-def]
    AUX, HIDDEN, PATH, AUX_TAKEN, HIDDEN_TAKEN, N, M, X, D, aux_blocks, BLOCK: constexpr,
):  # fmt: skip
    """Copy one block of one node's auxiliary hidden states, or of its hidden state."""
    goal, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = goal // M * N + tl.load(PATH + goal)
    if block < aux_blocks:
        x = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(AUX_TAKEN + goal * X + x, tl.load(AUX + source * X + x, mask=x < X), mask=x < X)
    else:
        x = (block - aux_blocks) * BLOCK + tl.arange(0, BLOCK)
        tl.store(HIDDEN_TAKEN + goal * D + x, tl.load(HIDDEN + source * D + x, mask=x < D), mask=x < D)
