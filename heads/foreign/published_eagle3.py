"""EAGLE-3 heads in the forms of other projects: raw, as SpecForge, Model Optimizer, DeepSpec, NeMo Automodel and the
EAGLE repository write them, and speculators'.

Letters: D width of the head, Dt width of the target, V vocabulary, Vd draft vocabulary.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from heads.core.engines import SGLANG, VLLM, misread_rotation, window_option
from heads.core.errors import UserError
from heads.foreign.published_files import (
    Reading,
    Source,
    check_same,
    check_streams,
    decoder_settings,
    is_same_table,
    refuse_settings,
)
from heads.parts.head_shape import low_middle_high
from heads.parts.layers import SLIDING
from heads.targets.frozen_target import FrozenTarget

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
IDS = "eagle_aux_hidden_state_layer_ids"
QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
"""Fields of a head whose attention norms queries and keys."""
UNEVEN = "transformers' Llama, by which config.json is read, takes only a multiple of num_attention_heads"
BEFORE = {VLLM: "input_layernorm", SGLANG: "hidden_norm"}
"""Norm that each engine applies before a layer after the first. A saved head has one norm under both names."""
UNTRAINED, LIKENESS_ROWS = 0.1, 4096
"""Mean cosine of embeddings to the target's below which they look untrained, and the number of rows compared."""
PREFIX = re.compile(r"^model\.")
"""What NeMo Automodel puts before the names of all modules but the output head."""
DROPPED = ("verifier_norm.weight", "verifier_lm_head.weight", "midlayer.self_attn.rotary_emb.inv_freq")
"""Tensors in files that are the target's or have no effect."""


def read_eagle3(source: Source, target: FrozenTarget) -> Reading | None:
    """Read a head, raw or in speculators' form. Every config field that may be absent in Llama's config may be absent
    here. A head of the whole vocabulary without an output head borrows the target's."""
    fields, path = source.config, source.path
    layer, kind = fields.get("transformer_layer_config"), fields.get("speculators_model_type")
    is_named = any("eagle3" in str(name).lower() for name in fields.get("architectures") or ())
    is_bare = "draft_vocab_size" in fields and "dflash_config" not in fields
    if kind not in (None, "eagle3") or not (is_named or kind or is_bare):
        return None
    decoder = fields if layer is None else layer
    llama, block = decoder_settings(source, decoder, "llama", target)
    V, D = llama.vocab_size, llama.hidden_size
    Vd, Dt = fields.get("draft_vocab_size") or V, fields.get("target_hidden_size") or D
    check_same(source, target, width=Dt, vocabulary=V)
    nested = fields.get("eagle_config") or {}
    refuse_settings(source, {"eagle_config.use_aux_hidden_state": nested.get("use_aux_hidden_state") is False})
    weights = {PREFIX.sub("", name): value for name, value in source.read().items()}
    weights = {re.sub(r"^layers\.0\.", "midlayer.", name): value for name, value in weights.items()}
    for name in DROPPED:
        weights.pop(name, None)
    embed: Any = target.shared.embed_tokens
    if EMBEDDING in weights and is_same_table(weights[EMBEDDING], embed.weight):
        del weights[EMBEDDING]
    borrows = Vd == V and Dt == D and HEAD not in weights
    if borrows:
        weights[HEAD] = target.lm_head_weight.detach().cpu()
    sort_vocab(path, weights, V, Vd)
    layers = 1 + max((int(name.split(".")[1]) for name in weights if name.startswith("layers.")), default=0)
    layer_types = set((decoder.get("layer_types") or ["full"])[:layers])
    slides = layer_types == {SLIDING}
    refuse_settings(source, {"layer_types": SLIDING in layer_types and not slides})
    config = {
        **block,
        "draft_vocab_size": Vd,
        "target_hidden_size": Dt if Dt != D else None,
        "num_layers": layers,
        "qk_norm": "midlayer.self_attn.q_norm.weight" in weights,
        "own_embeddings": EMBEDDING in weights or Dt != D,
        **{name: bool(fields.get(name)) for name in ("fc_norm", "norm_output", "norm_before_residual")},
        "norm_before_fc": bool(fields.get("norm_before_fc") or nested.get("norm_before_fc")),  # NVIDIA's is nested
        "sliding_window": decoder.get("sliding_window") if slides else None,
        "aux_layer_ids": captured(source, nested, target),
    }
    differs = misread(fields, nested, config)
    if EMBEDDING in weights and Dt == D:
        cosine = likeness(weights[EMBEDDING], embed.weight)
        doubt = ": it looks untrained" if cosine < UNTRAINED else ""
        differs.append(
            f"{EMBEDDING} is not the target's table (mean cosine {cosine:.2f}{doubt}); it is used here, as by {VLLM}, "
            f"and {SGLANG} puts the target's in its place, so another head would run"
        )
    if Vd == V and "d2t" in source.files:
        differs.append(f"{VLLM} refuses a file with the d2t of a whole vocabulary")
    if borrows and fields.get("draft_vocab_size") is not None:
        differs.append(f"{SGLANG} borrows the target's output head only where draft_vocab_size is null")
    if not borrows and fields.get("draft_vocab_size", Vd) is None:
        differs.append(f"{SGLANG} takes the target's output head for the head's own where draft_vocab_size is null")
    form = "raw EAGLE-3" if layer is None else "speculators' EAGLE-3"
    return Reading(form, config, weights, (*differs, *pair_norms(path, weights, layers)))


def likeness(table: Tensor, ours: Tensor) -> float:
    """Return the mean cosine of the rows of two tables (V, D), over some of them."""
    some = slice(None, None, max(1, len(ours) // LIKENESS_ROWS))
    return float(cosine_similarity(table[some].float(), ours[some].detach().cpu().float(), dim=-1).mean())


def pair_norms(path: str, weights: dict[str, Tensor], layers: int) -> list[str]:
    """Give the norm before each layer after the first both of its names. Return a line for each that the file lacks."""
    differs = []
    for i in range(1, layers):
        names = {reader: f"layers.{i}.{name}.weight" for reader, name in BEFORE.items()}
        norms = [weights[name] for name in names.values() if name in weights]
        if len(norms) == 2 and not torch.equal(*norms):
            raise UserError(f"{path}: {' and '.join(names.values())} differ: each engine reads one of them")
        for reader, name in names.items():
            if norms and name not in weights:
                differs.append(f"{reader} norms the input of layer {i} by {name}, which the file lacks")
                weights[name] = norms[0]
    return differs


def sort_vocab(path: str, weights: dict[str, Tensor], V: int, Vd: int) -> None:
    """Convert the tables of a draft vocabulary to the form of `heads.parts.vocab`, with draft ids in the order of
    their target ids, and reorder the tensors that have a row per draft id. Afterwards both tables are present, or
    neither."""
    d2t = weights.get("d2t")
    if d2t is None or d2t.shape != (Vd,) or d2t.is_floating_point():
        return  # reported when the tables are read
    token_ids, order = (d2t.long() + torch.arange(Vd)).sort()
    if token_ids[0] < 0 or token_ids[-1] >= V:
        raise UserError(f"{path}: d2t: expected target ids below {V}, as offsets from the draft ids")
    weights["d2t"] = token_ids - torch.arange(Vd)
    marks = torch.zeros(V, dtype=torch.bool).index_fill(0, token_ids, True)
    if "t2d" in weights and not torch.equal(weights["t2d"].bool(), marks):
        raise UserError(f"{path}: t2d marks other target ids than d2t names")
    weights["t2d"] = marks
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if len(weights.get(name, ())) == Vd:
            weights[name] = weights[name][order]
    if Vd == V:
        del weights["d2t"], weights["t2d"]


def captured(source: Source, nested: Mapping[str, Any], target: FrozenTarget) -> list[int]:
    """Return the residual streams that the trainer meant: those in config.json, numbered by the layers that they enter,
    else those in `nested` or in `target_layer_ids`, numbered by the layers that they leave, else the default ones."""
    ids = source.config.get(IDS)
    if ids is None:
        by_output = nested.get(IDS) or source.config.get("target_layer_ids")  # the latter by DeepSpec
        ids = [k + 1 for k in by_output] if by_output else low_middle_high(target.num_layers)
    check_streams(source, ids, target)
    return sorted(ids)


def misread(fields: Mapping[str, Any], nested: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return a line for each thing that engines read differently from `read_eagle3`."""
    ids, layers = config["aux_layer_ids"], config["num_target_layers"]
    of_vllm, of_sglang, default = fields.get(IDS), nested.get(IDS), list(low_middle_high(layers))
    of_speculators = "transformer_layer_config" in fields
    uneven = config["hidden_size"] % config["num_attention_heads"] and not config["qk_norm"]
    classes, layers_made = fields.get("architectures") or [None], fields.get("num_hidden_layers", 1)
    lines = [
        (
            of_vllm is None and of_sglang is not None,
            f"{VLLM} with the V1 runner (every CPU build, and GPUs where V2 does not apply) takes the layer ids in "
            f"eagle_config as its own and captures {of_sglang} in the place of {ids}: give them as {IDS}",
        ),
        (
            of_vllm is None and of_sglang is not None and ids != default,
            f"{VLLM} with the V2 runner ignores the layer ids in eagle_config and captures {default} in the place of "
            f"{ids}",
        ),
        (
            of_vllm is not None and of_sglang is not None and sorted(of_sglang) != [k - 1 for k in ids],
            f"{SGLANG} reads the layer ids in eagle_config, {of_sglang}: other layers than {IDS} names",
        ),
        (
            of_vllm is not None and of_sglang is None and not of_speculators and ids != default,
            f"{SGLANG} reads no layer ids but those in eagle_config and captures {default} in the place of {ids}",
        ),
        (
            any(sorted(named) != named for named in (of_vllm, of_sglang) if named is not None),
            f"the layer ids are not ascending: engines capture {ids}, in this order",
        ),
        (layers in ids, f"{SGLANG} never captures the output of the last layer"),
        (config["norm_before_residual"], f"{SGLANG} does not read norm_before_residual: another head would run"),
        (
            config["sliding_window"],
            f"{SGLANG} does not read sliding_window: serve it with {window_option(config['sliding_window'] or 0)}",
        ),
    ]
    of_files = [
        (
            config["qk_norm"] and classes[0] not in (*QWEN3["architectures"], "Qwen3ForCausalLM"),
            f"{VLLM} knows no {classes[0]}: {QWEN3['architectures'][0]} is its name of this head",
        ),
        (uneven, f"{VLLM} and {SGLANG} refuse the hidden_size: {UNEVEN}"),
        (
            layers_made != config["num_layers"],
            f"{VLLM} and {SGLANG} make {layers_made} layers by num_hidden_layers, and the file has "
            f"{config['num_layers']}",
        ),
        (
            "LlamaForCausalLMEagle3" not in classes,
            f"{SGLANG} loads no head whose architectures are not LlamaForCausalLMEagle3",
        ),
    ]
    if of_speculators:
        of_files = [(True, f"{SGLANG} does not read speculators' form")]
    return [
        *(line for applies, line in lines if applies),
        *misread_rotation(config),
        *(line for applies, line in of_files if applies),
    ]
