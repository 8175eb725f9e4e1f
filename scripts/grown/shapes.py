"""Shapes of known models, into which a small model is grown. Command lines use them, so this file imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder model."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int


SHAPES = {
    # config.json of meta-llama/Llama-3.2-1B, meta-llama/Llama-3.1-8B and Qwen/Qwen3-0.6B
    "llama-3.1-8b": ModelShape(4096, 32, 32, 8, 128, 14336, 128256),
    "llama-3.2-1b": ModelShape(2048, 16, 32, 8, 64, 8192, 128256),
    "qwen3-0.6b": ModelShape(1024, 28, 16, 8, 128, 3072, 151936),
    "0.4b": ModelShape(1024, 24, 16, 4, 64, 4096, 4096),
}
