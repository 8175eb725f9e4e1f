"""The tree named `head`: the static tree that a head carries."""

from heads.base import TreeHead
from heads.errors import UserError
from heads.tree import TreeShape, parse_shape, static_shape

HEAD_TREE = "head"


def shape_for(text: str, head: object) -> TreeShape:
    """The shape that a text names for this head. UserError where it has no tree of its own."""
    if text != HEAD_TREE:
        return parse_shape(text)
    paths = head.tree if isinstance(head, TreeHead) else None
    if not paths:
        raise UserError("tree 'head': this head carries no static tree of its own; name one, such as chain:3")
    return static_shape(paths, text)


def most_nodes(text: str, head: object) -> int:
    """The most nodes of the tree that a text names for this head, which may have yet to grow it."""
    if text != HEAD_TREE:
        return parse_shape(text).nodes
    if not isinstance(head, TreeHead) or head.tree_nodes == 0:
        raise UserError("tree 'head': heads of this kind and these settings grow no static tree; name one")
    return head.tree_nodes
