"""MiMo, which transformers does not have: a Qwen2 whose checkpoint also holds modules of multi-token prediction."""

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):
    """config.json as MiMo's checkpoints have it."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The model without its modules, which `heads.formats.mtp.read_native` reads."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"^model\.mtp_layers\."]  # noqa: RUF012 - as transformers declares it


def register_mimo() -> None:
    """Let transformers load MiMo's checkpoints without code of theirs."""
    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)
