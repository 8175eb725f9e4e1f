"""Seeded damage to files, like that from bit rot, other programs and editors."""

import copy
import random
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 10**30, -(10**30), 2**63, 10**400),
    *(float("nan"), float("inf"), -0.5, 1e300, 5e-324),
    *("", "x", "a\nb", "\ud800", "$x_", "{{ 1 }}", "%s", "../..", "x" * 300, "9" * 40),
    *([], {}, [None], [[]], {"a": {"b": [1, {"c": None}]}}),
)


def mutate(value: Any, rng: random.Random) -> Any:
    """Return a deep copy of a JSON value with one to three random faults."""
    changed = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        changed = _damage(changed, rng)
    return changed


def _damage(value: Any, rng: random.Random) -> Any:
    places = _places(value)
    if not places:
        return odd_value(rng)
    holder, key = rng.choice(places)
    match rng.randrange(7):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[str(key) + rng.choice(("", " ", "_", "x"))] = holder.pop(key)
        case 1:
            holder.insert(key, copy.deepcopy(holder[key]))
        case 2:
            other, name = rng.choice(places)
            holder[key] = copy.deepcopy(other[name]) if name in _keys(other) else None
        case 3 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = rng.choice((-holder[key], holder[key] * 10**9, holder[key] + 1, str(holder[key]), 0))
        case 3:
            holder[key] = [holder[key]]
        case _:
            holder[key] = odd_value(rng)
    return value


def odd_value(rng: random.Random) -> Any:
    """Return a value that does not belong in any file of settings."""
    nested: Any = copy.deepcopy(rng.choice(ODD_VALUES))
    if rng.random() < 0.05:
        for _ in range(rng.choice((50, 400))):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def damage_bytes(data: bytes, rng: random.Random, within: int | None = None) -> bytes:
    """Return the data truncated, or with bytes changed, inserted or deleted, in its first `within` bytes."""
    within = min(within or len(data), len(data))
    changed = bytearray(data)
    match rng.randrange(4):
        case 0:
            return data[: rng.randrange(within)]
        case 1:
            for _ in range(rng.choice((1, 1, 4, 16))):
                changed[rng.randrange(within)] ^= 1 << rng.randrange(8)
        case 2:
            start = rng.randrange(within)
            changed[start:start] = rng.randbytes(rng.choice((1, 8)))
        case _:
            start = rng.randrange(within)
            del changed[start : start + rng.choice((1, 8, 100))]
    return bytes(changed)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every entry in a JSON value as its container and its key."""
    found, open_ones = [], [value]
    while open_ones:
        holder = open_ones.pop()
        for key in _keys(holder):
            found.append((holder, key))
            open_ones.append(holder[key])
    return found


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder))) if isinstance(holder, list) else []
