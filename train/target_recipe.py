"""The recipe of scripts/make_target.py: a model trained from scratch, its tokenizer and its training text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from heads.core.errors import UserError
from train.core.strict_yaml import Count, Seed, Settings, check, read_settings
from train.data.from_scratch import DataSettings, TokenizerSettings

Rate = Annotated[float, Field(gt=0)]


class ModelSettings(Settings):
    """The shape of the model, of the Llama architecture with tied embeddings."""

    hidden_size: Count
    """Width of the residual stream."""
    num_hidden_layers: Count
    """Number of decoder layers."""
    num_attention_heads: Count
    """Number of attention heads."""
    num_key_value_heads: Count
    """Number of key-value heads. It must divide `num_attention_heads`."""
    head_dim: Count
    """Width of one attention head."""
    intermediate_size: Count
    """Width of the MLP."""
    max_position_embeddings: Count
    """Context length."""


class Stage(Settings):
    """A stage of the training, in which all rows have one length."""

    steps: Count
    """Number of optimizer steps."""
    context_length: Count
    """Tokens per row."""
    unlearn_loops: bool = False
    """Let the model continue the beginning of each row, and train it not to repeat itself there."""


class TargetTraining(Settings):
    """The training loop. Muon updates the matrices of the layers, AdamW the embeddings and the norms."""

    stages: Annotated[list[Stage], Field(min_length=1)]
    """Stages of the training, in order. Short rows should come first, since their steps are cheap."""
    tokens_per_step: Count
    """Tokens per optimizer step, over all processes."""
    tokens_per_pass: Count
    """Tokens per forward pass of one process."""
    muon_lr: Rate
    """Peak learning rate of Muon."""
    muon_weight_decay: Annotated[float, Field(ge=0)]
    """Weight decay of Muon."""
    adam_lr: Rate
    """Peak learning rate of AdamW."""
    warmup_steps: Count
    """Steps over which the learning rates rise, at the start of the run."""
    decay_steps: Count
    """Steps over which the learning rates fall towards zero, at the end of the run."""
    precision: Literal["fp32", "bf16"]
    """Dtype of matrix products. `bf16` is autocast over float32 weights."""
    compile: bool = False
    """Compile the layers with torch.compile, which needs a C++ compiler on a CPU."""
    checkpoint_every: Count
    """Steps between checkpoints."""

    def stage_at(self, step: int) -> tuple[int, int]:
        """Return the stage of a step, which is counted from 0 over all stages, and the step's number within the
        stage."""
        stage = 0
        while step >= self.stages[stage].steps:
            step -= self.stages[stage].steps
            stage += 1
        return stage, step


class TargetRecipe(Settings):
    """A recipe of scripts/make_target.py."""

    output_dir: str
    """Folder of the run. The same command in the same folder resumes it."""
    seed: Seed
    """Seed of the initial weights and of the order of the data."""
    data: DataSettings = DataSettings()
    """Training text in addition to this machine's Python source."""
    tokenizer: TokenizerSettings
    """The byte-level BPE."""
    model: ModelSettings
    """The shape of the model."""
    train: TargetTraining
    """The training loop."""


def load_target_recipe(path: str | Path, overrides: Sequence[str] = ()) -> TargetRecipe:
    """Read a target's recipe, apply the overrides and check it. UserError lists all faults, one per line."""
    recipe, errors = check(read_settings(Path(path), overrides), TargetRecipe)
    if recipe is None:
        raise UserError("\n".join(errors))
    heads, groups = recipe.model.num_attention_heads, recipe.model.num_key_value_heads
    if heads % groups:
        raise UserError(
            f"model.num_attention_heads: expected a multiple of num_key_value_heads ({groups}), got {heads}"
        )
    return recipe
