"""The engines that load heads, and what they read wrongly of a head's config.json."""

from collections.abc import Mapping
from typing import Any, Literal

VLLM = "vLLM 0.33.0"
SGLANG = "SGLang 0.5.23"
LLAMACPP = "llama.cpp b11549"
OPENVINO = "OpenVINO GenAI 2026.4.1"
MLX = "mlx-lm 0.32.2"
ENGINES = (VLLM, SGLANG)
"""Engines that a head is for unless `head.serve` names others. A head that one of them would misread is unfit."""
LOCAL_ENGINES = (LLAMACPP, OPENVINO, MLX)
"""Engines for one machine, often without a GPU."""
ALL_ENGINES = (*ENGINES, *LOCAL_ENGINES)
READERS = {"vllm": VLLM, "sglang": SGLANG, "llama.cpp": LLAMACPP, "openvino": OPENVINO, "mlx": MLX}
"""Engines by their names in options and settings."""
Served = Literal["vllm", "sglang", "llama.cpp", "openvino"]
"""Names of the engines that a head may be trained for."""


def window_option(window: int) -> str:
    """Return the option of SGLang 0.5.23 for an EAGLE-3 head with a sliding window, which it does not read from
    config.json. The option does not count the token's own position."""
    return f"--speculative-draft-window-size {window - 1}"


UNREAD_ROTATION: dict[tuple[str, str], tuple[str, ...]] = {
    (VLLM, "longrope"): ("factor", "attention_factor"),  # both engines compute it from `max_position_embeddings`
    (SGLANG, "longrope"): ("factor", "attention_factor"),
    (SGLANG, "yarn"): ("attention_factor",),
    (LLAMACPP, "yarn"): ("attention_factor", "truncate"),
}
"""Settings of a kind of rotary positions that an engine ignores."""


READ_ROTATIONS = {LLAMACPP: ("linear", "yarn")}
"""Kinds of rotary positions, beside plain ones, that a reader which is not one of `ENGINES` reads."""


def rotation_errors(config: Mapping[str, Any], reader: str) -> list[str]:
    """Return what a reader ignores of a head's rotary positions."""
    scaling = config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        return ["config.json: rope_scaling: is no JSON object"]
    kind = scaling.get("rope_type", "default")
    if reader not in ENGINES and kind not in ("default", *READ_ROTATIONS.get(reader, ())):
        return [f"config.json: rope_scaling: no kind {kind} is read"]
    names = (*UNREAD_ROTATION.get((reader, kind), ()), *(() if reader == VLLM else ("partial_rotary_factor",)))
    unread = [name for name in names if scaling.get(name) is not None]
    return [f"config.json: rope_scaling.{name}: is not read, so another head would run" for name in unread]


def misread_rotation(config: Mapping[str, object]) -> list[str]:
    """Return a line for each setting of another project's rotary positions that an engine ignores."""
    return [f"{engine}: {error}" for engine in ENGINES for error in rotation_errors(config, engine)]
