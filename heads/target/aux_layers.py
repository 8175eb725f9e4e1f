"""Choice of the target's residual streams that a head reads."""

from collections.abc import Sequence

from heads.errors import UserError


def low_middle_high(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's auxiliary layers h_2, h_{n//2}, h_{n-3} (arXiv 2503.01840, section 3.1), the default of engines
    for a head that names none."""
    return 2, num_layers // 2, num_layers - 3


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's auxiliary layers. Raises UserError for a target that is too shallow for three."""
    aux_layer_ids = low_middle_high(num_layers)
    if num_layers == 1:
        raise UserError("a target of one layer has no two residual streams that engines capture; use another head")
    if not 0 < aux_layer_ids[0] < aux_layer_ids[1] < aux_layer_ids[2]:
        raise UserError(
            f"a target of {num_layers} layers is too shallow for the default auxiliary layers {list(aux_layer_ids)}: "
            f"name them, as in head.aux_layer_ids: {shallow_aux_layer_ids(num_layers)} (0 = embeddings; "
            f"engines take two or more below {num_layers})"
        )
    return aux_layer_ids


def shallow_aux_layer_ids(num_layers: int) -> list[int]:
    """Return three distinct auxiliary layers, spread over the depth of a shallow target of two or more layers. Return
    two if only two are below the last layer's output, where every engine captures them."""
    return sorted({min(1, num_layers - 2), num_layers // 2, num_layers - 1})


def check_aux_layer_ids(aux_layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the auxiliary layers in ascending order. Raises UserError for an invalid one. A single layer, and the last
    layer's output, can be trained, although no engine serves them (`heads.formats.contract`)."""
    for k in aux_layer_ids:
        if not 0 <= k <= num_layers:
            raise UserError(
                f"head.aux_layer_ids: {k} is not a residual stream of a target with {num_layers} layers; "
                f"use 0 to {num_layers}"
            )
    if len(set(aux_layer_ids)) != len(aux_layer_ids) or not aux_layer_ids:
        raise UserError(f"head.aux_layer_ids: {list(aux_layer_ids)} must name at least one layer, each once")
    return tuple(sorted(aux_layer_ids))


def spread_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Return the default auxiliary layers of published heads, which number them by the layers that they leave."""
    n = num_target_layers
    if n < 4:
        raise UserError(
            f"head.aux_layer_ids: a target of {n} layers is too shallow for the default ones; name them, such as "
            f"[{n // 2}]"
        )
    if num_layers == 1:
        return (n // 2 + 1,)
    left = (round(1 + i * (n - 4) / (num_layers - 1)) for i in range(num_layers))
    return tuple(sorted({layer + 1 for layer in left}))
