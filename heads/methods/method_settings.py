"""The methods, and the settings of their heads, as a recipe's section `head` has them: one model for each kind, with
the bounds that do not depend on the target. Null is the target's value.

A recipe is checked, and its keys are listed, before torch is imported, so this file does not import torch.
"""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from heads.core.strict_settings import Count, Factor, Number, Place, Positive, Settings
from heads.core.tree import MAX_NODES
from heads.parts.part_settings import (
    BlockSettings,
    Decay,
    Depth,
    Divergence,
    LaterStepsSettings,
    LayerIds,
    Layers,
    Loss,
    RotarySettings,
    StartSettings,
)


class Eagle3Settings(RotarySettings, LaterStepsSettings, StartSettings, BlockSettings):
    hidden_size: Count | None = None
    """Width of the head. Null: the target's. A head of another width has embeddings of its own: the target's along
    their principal axes, not trained."""
    aux_layer_ids: LayerIds | None = None
    """Layers whose auxiliary hidden states the head reads, ascending, numbered by the layer that a state enters; 0 is
    the embeddings. Null: layers 2, n/2 and n - 3 of a target with n layers."""
    draft_vocab_size: Count | None = None
    """Tokens the head can draft: the most frequent in the training data. Null: 32,000, or the target's whole vocabulary
    if it is smaller."""
    num_layers: Layers = 1
    """Number of decoder layers. Those after the first read no embeddings. vLLM and SGLang run several, llama.cpp,
    OpenVINO and the EAGLE repository one."""
    depth: Depth = 7
    """Number of steps of the training-time test."""
    depth_decay: Decay = 0.8
    """Weight of step k in the loss is depth_decay^k, k from 0."""
    loss: Divergence = "kl"
    """Divergence between the distributions of target and draft."""
    fc_norm: bool = False
    """EAGLE-3.1: normalise each auxiliary hidden state with its own RMSNorm before they are fused."""
    norm_output: bool = False
    """EAGLE-3.1: recycle the state after the final norm instead of before it. The EAGLE repository supports neither
    `fc_norm` nor `norm_output`."""
    sliding_window: Count | None = None
    """Number of positions that attention sees, the token's own included, so that the draft's time and memory do not
    grow with the text. Null: all. vLLM reads it from the config; SGLang takes it as an option of its command;
    the EAGLE repository would attend to all positions."""


class MtpSettings(LaterStepsSettings, StartSettings, BlockSettings):
    """Settings of the head in a recipe. `initial_weights` has no effect on native modules."""

    draft_vocab_size: Count | None = None
    """Tokens the head can draft: the most frequent in the training data, as rows of the target's output head. Null: the
    target's whole vocabulary, which is all that engines support."""
    native: bool = False
    """Start from the modules in the target's checkpoint. They determine the head's shape."""
    layout: Literal["mimo", "deepseek", "qwen"] | None = None
    """Model family that determines the tensor names and the order of the projection's inputs: `mimo`, `deepseek` or
    `qwen`. Null: `mimo`, or the family of the native modules."""
    num_modules: Count | None = None
    """Number of modules. The last one is applied at all remaining steps. Null: 1, or the number of native modules."""
    depth: Depth | None = None
    """Number of steps to train. Null: 3, or the number of native modules if that is larger."""
    depth_decay: Decay = 0.6
    """Weight of step k in the loss is depth_decay^(k - 1), as a fraction of the sum of all weights."""
    loss: Divergence = "kl"
    """Divergence between the distributions of target and draft."""


class MedusaSettings(Settings):
    draft_vocab_size: Count | None = None
    """Tokens the head can draft: the most frequent in the training data. Null: the target's whole vocabulary, as in
    the paper."""
    depth: Depth = 5
    """Number of Medusa heads. The k-th head drafts the k-th draft token."""
    num_layers: Layers = 1
    """Number of residual blocks in each head."""
    depth_decay: Decay = 0.8
    """Weight of head k in the loss is depth_decay^k, k from 0."""
    loss: Loss = "labels"
    """`labels`: cross-entropy on the text, as in the paper. Or a divergence between the distributions of target and
    draft."""
    tree_nodes: Annotated[int, Field(ge=0, le=MAX_NODES)] = 64
    """Number of nodes of the static tree, root included. The tree is grown from measured accuracies; 0 grows none."""

    @field_validator("tree_nodes")
    @classmethod
    def check_tree_nodes(cls, nodes: int) -> int:
        if nodes == 1:
            raise ValueError(f"expected 2 to {MAX_NODES}, or 0 for no tree")
        return nodes


class DraftBlockSettings(RotarySettings, StartSettings, BlockSettings):
    """Settings that all such heads have in a recipe."""

    block_size: Annotated[int, Field(ge=2, le=MAX_NODES)] = 8
    """Number of rows of a block, the root's included. Tau is best when as many are drafted as in training."""
    num_layers: Layers = 5
    """Number of decoder layers."""
    sliding_window: Count | None = None
    """Number of positions that a row of a sliding layer sees, its own included; it sees no later rows. Null: no layer
    slides."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """Attention of each layer, `full_attention` or `sliding_attention`. Null: with a window, all layers except the last
    slide; otherwise none."""
    aux_layer_ids: LayerIds | None = None
    """Layers whose auxiliary hidden states the head reads, ascending, numbered by the layer that a state enters. Null:
    one for each layer of the head, spread from layer 2 to layer n - 2 of a target of n layers; n/2 + 1 for a head with
    one layer."""
    mask_token_id: Number | None = None
    """Token whose embedding represents tokens that are not drafted yet. The data must not contain it. Null: an id that
    the target's tokenizer does not use."""
    num_anchors: Count = 512
    """Maximum number of blocks in a row of training data. Their positions are drawn again in each step."""
    gamma: Positive = 4.0
    """The k-th draft token, from 0, has the weight exp(-k / gamma) in the loss. Use 4 for blocks of 7 or 8, 7 for
    16."""
    weights: Literal["exponential", "d_pace"] = "exponential"
    """Weights of a block's rows: `exponential`, from gamma, or `d_pace`, from the probability that a draft gets that
    far."""
    initial_weights: Literal["copying", "target", "random"] = "copying"
    """Weights before training. `target`: the context is the target's highest auxiliary hidden state, and the final norm
    has the target's scale. `copying`: the first draft token is the one that followed the root before, and the others
    follow token frequencies; for a head with one layer the same as `target`. `random`: PyTorch's defaults, as in other
    trainers."""


class DFlashSettings(DraftBlockSettings):
    loss: Loss = "kl"
    """`labels`: cross-entropy on the text. Or a divergence between the distributions of target and draft."""
    causal: bool = False
    """A row does not see later rows of its block (JetSpec)."""


class DFlash2Settings(DFlashSettings):
    conv_kernel_size: Count = 2
    """Number of rows that a convolution reads: a row's own and those before it in its block."""
    conv_group_size: Count = 16
    """Number of channels that share a coefficient computed from the state; a divisor of the target's width."""
    selector_rank: Count = 256
    """Rank of the matrix from the previous token to the addition to the candidates' logits."""
    selector_top_k: Count = 16
    """Number of candidates of each row, and maximum number of children of a tree node."""
    selector_weight: Factor = 1.0
    """Factor of the cross-entropy among the candidates in the loss."""


class LiLiCorrSettings(DFlashSettings):
    lilicorr_candidate_topk: Literal[1, 2, 4, 8, 16] = 8
    """Number of candidates of each row, and maximum number of children of a tree node. A power of two up to 16, which
    is what engines take."""
    lilicorr_hidden_size: Count | None = None
    """Width of the lattice. Null: the target's."""
    lilicorr_num_layers: Count = 2
    """Number of layers over the lattice."""
    lilicorr_num_heads: Count = 8
    """Number of attention heads in the lattice."""
    lilicorr_mlp_ratio: Positive = 2.0
    """Width of the lattice's MLPs, relative to the lattice's."""
    lilicorr_factor_dim: Count = 1024
    """Width of the two vectors of a candidate whose cosine is its score."""
    lilicorr_vector_eps: Positive = 1e-4
    """Smallest length by which such a vector is divided."""
    lilicorr_logit_scale: Positive = 8.0
    """Factor of the cosines, which makes them logits."""
    conv_kernel_size: Number = 0
    """Number of rows that DFlash2's convolutions read, in the layers of the backbone. 0: no convolutions."""
    conv_group_size: Count = 16
    """Number of channels that share a coefficient of these convolutions; a divisor of the target's width."""
    lattice_ce_weight: Factor = 0.25
    """Factor of the cross-entropy among the candidates in the loss."""
    lattice_margin_weight: Factor = 0.0
    """Factor of the hinge in the loss."""
    lattice_margin: Factor = 2.0
    """Lead over the next candidate, in logits, from which the hinge is 0."""
    lattice_penalty_weight: Factor = 0.25
    """Factor of the penalty on candidates that the target finds less likely than the label in the loss."""

    @model_validator(mode="after")
    def check_weights(self) -> Self:
        if self.lattice_ce_weight + self.lattice_margin_weight + self.lattice_penalty_weight == 0:
            raise ValueError("lattice_ce_weight, lattice_margin_weight, lattice_penalty_weight: one must be above 0")
        return self


class XPressSettings(DFlashSettings):
    xpress_rank: Count = 256
    """Width of the refiner, and rank of what it adds to the logits. vLLM takes powers of two from 16 on."""
    xpress_mlp_hidden: Count = 512
    """Width of the refiner's MLP. vLLM takes multiples of 64."""
    xpress_topc: Number = 512
    """Number of tokens of each row that can be drafted: the likeliest before the refiner. 0: all."""
    consistency_weight: Factor = 0.3
    """Factor of the loss of rounds in which the refiner reads the tokens that it chose in the round before."""
    consistency_passes: Number = 3
    """Number of these rounds."""
    base_weight: Factor = 0.6
    """Factor of the loss of the logits without the refiner."""


class DominoSettings(DFlashSettings):
    gru_hidden_dim: Count = 1024
    """Width of the GRU over the tokens before a row."""
    emb_dim: Count = 256
    """Rank of what is added to the logits."""
    pure_draft_prefix_len: Number = 1
    """Number of the first draft tokens whose logits nothing is added to. SGLang takes 1."""
    shift_label: bool = True
    """Each row drafts the token after its own, the root's row the first one, as in the published heads. False: its own,
    as in DFlash."""
    base_decay: Decay = 0.5
    """Fraction of the training in which the weight of the loss without the addition falls from 1 to 0. The loss with it
    has the rest."""


class DSparkSettings(DraftBlockSettings):
    block_size: Annotated[int, Field(ge=1, le=MAX_NODES)] = 7
    """Number of rows of a block, the root's included, and of tokens that are drafted. Tau is best when as many are
    drafted as in training."""
    markov_rank: Count = 256
    """Rank of the matrix from the previous token to the logits of the next."""
    ce_weight: Factor = 0.1
    """Factor of the labels' cross-entropy in the loss."""
    kl_weight: Factor = 0.0
    """Factor of the KL divergence between the distributions of target and draft in the loss. On the target's own
    answers its gradient equals that of the cross-entropy on average, without the noise of single tokens."""
    l1_weight: Factor = 0.9
    """Factor of the L1 distance between the distributions of target and draft in the loss."""
    confidence_weight: Factor = 1.0
    """Factor of the confidence's cross-entropy in the loss. With 0 the head has no confidence head."""

    @model_validator(mode="after")
    def check_weights(self) -> Self:
        if self.ce_weight + self.kl_weight + self.l1_weight == 0:
            raise ValueError("ce_weight, kl_weight, l1_weight: one must be above 0")
        return self


class LoraSettings(Settings):
    """Low-rank adapters, trained in place of whole matrices (LoRA, arXiv 2106.09685). Saved heads contain them
    merged."""

    rank: Count = 16
    """Rank of the low-rank matrices."""
    alpha: Positive = 32.0
    """Scale of the update, which is alpha / rank times the product of the two matrices."""
    modules: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Layers that get an adapter, by the last part of their names, such as `q_proj`. Null: every linear layer but the
    output head."""


class DraftSettings(Settings):
    """Settings of the head in a recipe. Exactly one of `path`, `layers` and `fresh` is given."""

    path: Place | None = None
    """Smaller model with the target's tokenizer: a folder or a Hub id."""
    layers: LayerIds | None = None
    """Layers of the target to keep, ascending. The draft is a copy of the target with only these layers."""
    fresh: dict[str, object] | None = None
    """Settings of a randomly initialised model of the target's family, such as hidden_size. Settings left out are the
    target's."""
    loss: Loss = "kl"
    """Divergence between the distributions of target and draft. Or `labels`: cross-entropy on the text."""
    lora: LoraSettings | None = None
    """LoRA adapters to train. Null: all weights are trained."""


class Method(NamedTuple):
    title: str
    """Name in tables and on pages."""
    settings: type[Settings]
    entry: str
    """Name of the script in `train/`."""
    rate: float = 1.5
    """Peak learning rate of Muon in a derived recipe, times the target's width."""


METHODS = {
    "eagle3": Method("EAGLE-3", Eagle3Settings, "eagle"),
    "mtp": Method("MTP", MtpSettings, "mtp"),
    "draft": Method("draft model", DraftSettings, "distill", rate=1.0),
    "medusa": Method("Medusa", MedusaSettings, "medusa", rate=4.0),
    "dflash": Method("DFlash", DFlashSettings, "dflash"),
    "dflash2": Method("DFlash2", DFlash2Settings, "dflash2"),
    "dspark": Method("DSpark", DSparkSettings, "dspark"),
    "lilicorr": Method("LiLiCorr", LiLiCorrSettings, "lilicorr"),
    "xpress": Method("XPress", XPressSettings, "xpress"),
    "domino": Method("Domino", DominoSettings, "domino"),
}
"""Methods by kind, the name in recipes and in saved heads, in the order of tables. `heads.registry.HEADS` has their
classes."""
TITLES = {kind: method.title for kind, method in METHODS.items()}
TITLES |= {"lookup": "prompt lookup", "ngram": "prompt lookup as in vLLM", "early_exit": "early exit"}
"""Titles of all drafts, those without training included."""
