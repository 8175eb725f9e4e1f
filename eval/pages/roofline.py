"""The roofline of a round (`eval.measure.roofline`) as text."""

from typing import Any

from eval.measure.speedup_checks import is_believable

MAX_SHARE = 1.25
"""Maximum plausible bandwidth of a plain step, relative to copying: it only reads, which may be faster than copying."""


def roofline_lines(record: dict[str, Any]) -> list[str]:
    lines = [
        f"copy bandwidth {record['copy_bandwidth'] / 1e9:.1f} GB/s, {record['length']} tokens of context, "
        f"batch {record['batch_size']}, draft {record['tree']}, tau {record['tau']:.2f}"
    ]
    for name in ("plain", "round"):
        lines.append(f"{name + ' step':24}{'MB':>10}{'floor us':>12}{'us':>12}{'ratio':>8}")
        for part in record[name]:
            ratio = "" if part["over_floor"] is None else f"{part['over_floor']:.2f}"
            lines.append(
                f"  {part['part']:22}{part['bytes'] / 1e6:>10.1f}{part['floor_us']:>12.1f}{part['us']:>12.1f}{ratio:>8}"
            )
        lines.append(f"  {'whole':22}{'':>10}{record[name + '_floor_us']:>12.1f}{record[name + '_us']:>12.1f}")
    speedup = {
        name: f"{value:.2f}" if is_believable(value, record["tau"]) else "not measured"
        for name, value in record["speedup"].items()
    }
    lines.append(
        f"speedup now {speedup['now']}, at the floor {speedup['floor']}; plain decoding at "
        f"{record['plain_share_of_bandwidth']:.0%} of the bandwidth"
    )
    if record["plain_share_of_bandwidth"] > MAX_SHARE:
        lines.append(
            "plain decoding reads faster than memory was copied: the target lies in the processor's cache, or others "
            "used the memory while it was copied; the floors say little here"
        )
    return [line.rstrip() for line in lines]
