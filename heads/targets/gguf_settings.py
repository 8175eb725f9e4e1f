"""Settings of a model that stand in its GGUF file, and that transformers does not read from it (5.24: the rotary base
of StarCoder2, the window of Phi-3, the caps of Gemma 2, every scaling of rotary positions but gpt-oss's)."""

from pathlib import Path
from typing import Any

from heads.core.errors import UserError

READ = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Keys of a file, behind the architecture's name, and the fields of a config that they set."""
SCALES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that scale rotary positions, as of Llama 3.1 and Phi-3, if they have other values than 1."""


def complete(config: Any, file: Path) -> None:
    """Set the fields of a config that transformers left at their defaults. UserError if the file scales rotary
    positions and the config does not."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    family = reader.fields["general.architecture"].contents()

    def value(key: str) -> Any:
        field = reader.get_field(f"{family}.{key}")
        return None if field is None else field.contents()

    rotary = whole = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in whole:  # as of Gemma 3, whose sliding layers have another one
        rotary = whole["full_attention"]
        if (base := value("rope.freq_base_swa")) is not None:
            whole["sliding_attention"]["rope_theta"] = float(base)
    if rotary.get("rope_type") == "default":
        scaling = value("rope.scaling.type")
        names = [tensor.name for tensor in reader.tensors if tensor.name in SCALES and (tensor.data != 1).any()]
        if names or scaling not in (None, "none"):
            how = names[0] if names else f"rope.scaling.type {scaling}"
            raise UserError(
                f"{file}: scales its rotary positions ({how}), which transformers does not read from GGUF files; name "
                "the model that it was made from with target.path, and its bits with target.quantize"
            )
        if (base := value("rope.freq_base")) is not None:
            rotary["rope_theta"] = float(base)
    for key, field in READ.items():
        held = value(key)
        if held and hasattr(config, field) and getattr(config, "use_sliding_window", True):
            setattr(config, field, held)
