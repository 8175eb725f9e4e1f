"""The acceptance rule `match`, in which the target's choices decide, and the features of an accepted path.

The target chooses a token at every node. Starting at the root, follow children with the chosen token as far as
possible. The tokens on this path are accepted, and the choice at its last node is the bonus token. So the output is the
sequence of the target's own choices, whatever the tree. If siblings have the same token, the deepest path wins, then
the lowest node.
"""

import torch
from torch import Tensor

from heads.core.tree import Acceptance, Proposal


def match(proposal: Proposal, choice: Tensor, above: Tensor | None, depth: int) -> Acceptance:
    """Accept the deepest path of chosen tokens.

    choice (B, N): the token that the target chose after each node; above (B, N, N):
    `heads.targets.slots.ancestors` of the proposal, None for a chain; depth: K, the maximum number of levels of
    this tree shape. A node whose parent is not exactly one level above it is never accepted.
    """
    if above is None:
        return match_chain(proposal, choice)
    B, N = choice.shape
    node = torch.arange(N, device=choice.device).expand(B, N)
    parent_depths = proposal.depths.gather(1, proposal.parents)
    follows = (proposal.tokens == choice.gather(1, proposal.parents)) & (proposal.depths == parent_depths + 1)
    accepted, path = deepest_path(proposal, follows | (node == 0), above, depth)
    # The choice at a node of the path is the token of the path's next node; at the last node it is the bonus token.
    return Acceptance(accepted, path, choice.gather(1, path))


def deepest_path(proposal: Proposal, follows: Tensor, above: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return the deepest path whose nodes are all True in `follows` (B, N); among equal depths, the lowest node wins.
    Return its length (B,) and its nodes (B, K + 1), the root first."""
    B, N = follows.shape
    node = torch.arange(N, device=follows.device).expand(B, N)
    alive = (follows[:, None, :] | ~above).all(dim=2)  # the node and all of its ancestors follow
    best = torch.where(alive, proposal.depths * N + (N - 1 - node), -1).argmax(dim=1, keepdim=True)  # (B, 1)
    on_path = above.gather(1, best[..., None].expand(B, 1, N))[:, 0]  # (B, N)
    # Each node on the path goes to the index of its depth, all other nodes to an index that is cut off.
    path = torch.zeros(B, depth + 2, dtype=torch.int64, device=follows.device)
    path = path.scatter_(1, torch.where(on_path, proposal.depths, depth + 1), node)[:, : depth + 1]
    return proposal.depths.gather(1, best)[:, 0], path


def match_chain(proposal: Proposal, choice: Tensor) -> Acceptance:
    """Accept a chain, in which each node is the child of the previous one; choice (B, K + 1)."""
    accepted = (proposal.tokens[:, 1:] == choice[:, :-1]).cumprod(dim=1).sum(dim=1)
    return Acceptance(accepted, proposal.depths, choice)  # the nodes of a chain have their depths as indices


def take_path(aux_hidden_states: Tensor, hidden: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nodes' features in the order of path (B, M): auxiliary hidden states (B, N, X) -> (B, M, X), and
    hidden (B, N, D) -> (B, M, D)."""
    at = path[..., None]
    X, D = aux_hidden_states.shape[2], hidden.shape[2]
    return aux_hidden_states.gather(1, at.expand(-1, -1, X)), hidden.gather(1, at.expand(-1, -1, D))
