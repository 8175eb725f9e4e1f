"""The residual streams of the target that a head reads."""

from collections.abc import Sequence

from heads.errors import UserError


def low_middle_high(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's auxiliary layers h_2, h_{n//2}, h_{n-3} (arXiv 2503.01840, section 3.1), which engines use if a
    head names none."""
    return 2, num_layers // 2, num_layers - 3


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's auxiliary layers. UserError if the target is too shallow for three."""
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
    """Return auxiliary layers for a shallow target, spread over its depth: three, or two if it has only two or three
    layers. All are before the last layer's output, where every engine captures them."""
    return sorted({min(1, num_layers - 2), num_layers // 2, num_layers - 1})


def check_aux_layer_ids(aux_layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the auxiliary layers in ascending order. UserError if one is invalid. Training also works with a single
    layer and with the last layer's output, although no engine serves them (`heads.formats.engine`)."""
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
    """Return the default auxiliary layers of the published DFlash heads, numbered by the layer that a stream enters
    (their configs use the layer that it leaves). UserError if the target is too shallow."""
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
