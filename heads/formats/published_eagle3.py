"""EAGLE-3 heads in the forms of other projects: raw, as SpecForge, Model Optimizer, DeepSpec and the EAGLE repository
write them, and speculators'.

Letters: D width of the head, Dt width of the target, V vocabulary, Vd draft vocabulary.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from heads.core.errors import UserError, shown
from heads.formats.engine_folder import SGLANG, VLLM, Reading, misread_rotation, window_option
from heads.formats.source import Source, check_same, check_streams, decoder_settings, is_same_table, refuse_settings
from heads.methods.head_shape import low_middle_high
from heads.methods.layers import SLIDING
from heads.targets.model import FrozenTarget

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
IDS = "eagle_aux_hidden_state_layer_ids"
QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
"""Fields of a head whose attention norms queries and keys."""
UNEVEN = "transformers' Llama, by which config.json is read, takes only a multiple of num_attention_heads"
BEFORE = {VLLM: "input_layernorm", SGLANG: "hidden_norm"}
"""Norm that each engine applies before a layer after the first. A saved head has one norm under both names."""
UNTRAINED, LIKENESS_ROWS = 0.1, 4096
"""Mean cosine of embeddings to the target's below which they look untrained, and the number of rows compared."""
DROPPED = ("verifier_norm.weight", "verifier_lm_head.weight", "midlayer.self_attn.rotary_emb.inv_freq")
"""Tensors in files that are the target's or have no effect."""


def read_eagle3(source: Source, target: FrozenTarget) -> Reading | None:
    """Read a head, raw or in speculators' form. Every config field that may be absent in Llama's config may be absent
    here. A head of the whole vocabulary without an output head borrows the target's."""
    raw, path = source.config, source.path
    layer, kind = raw.get("transformer_layer_config"), raw.get("speculators_model_type")
    named = any("eagle3" in str(name).lower() for name in raw.get("architectures") or ())
    bare = "draft_vocab_size" in raw and "dflash_config" not in raw
    if kind not in (None, "eagle3") or not (named or kind or bare):
        return None
    decoder = raw if layer is None else layer
    llama, block = decoder_settings(source, decoder, "llama", target)
    V, Vd = llama.vocab_size, raw.get("draft_vocab_size") or llama.vocab_size
    D, Dt = llama.hidden_size, raw.get("target_hidden_size") or llama.hidden_size
    check_same(source, target, width=Dt, vocabulary=V)
    said = raw.get("eagle_config")
    nested: dict[str, Any] = said if isinstance(said, dict) else {}
    refuse_settings(source, {"eagle_config.use_aux_hidden_state": nested.get("use_aux_hidden_state") is False})
    if "fc.weight" not in source.files:
        raise UserError(f"{path}: tensor fc.weight: expected the fusion of the target's layers, found none")
    weights = source.read()
    weights = {re.sub(r"^layers\.0\.", "midlayer.", name): value for name, value in weights.items()}
    for name in DROPPED:
        weights.pop(name, None)
    embed: Any = target.shared.embed_tokens
    if EMBEDDING in weights and is_same_table(weights[EMBEDDING], embed.weight):
        del weights[EMBEDDING]
    borrows = Vd == V and HEAD not in weights
    for name, needed in ((EMBEDDING, Dt != D and EMBEDDING not in weights), (HEAD, Dt != D and borrows)):
        if needed:
            raise UserError(f"{path}: tensor {name}: expected one of width {D}, the target's has {Dt}; found none")
    if borrows:
        weights[HEAD] = target.lm_head_weight.detach().cpu()
    sort_vocab(path, weights, V, Vd)
    layers = 1 + max((int(name.split(".")[1]) for name in weights if name.startswith("layers.")), default=0)
    kinds = set((decoder.get("layer_types") or ["full"])[:layers])
    slides = kinds == {SLIDING}
    refuse_settings(source, {"layer_types": SLIDING in kinds and not slides})
    config = {
        **block,
        "draft_vocab_size": Vd,
        "target_hidden_size": Dt if Dt != D else None,
        "num_layers": layers,
        "qk_norm": "midlayer.self_attn.q_norm.weight" in weights,
        "own_embeddings": EMBEDDING in weights,
        **{name: bool(raw.get(name)) for name in ("fc_norm", "norm_output", "norm_before_residual")},
        "norm_before_fc": bool(raw.get("norm_before_fc") or nested.get("norm_before_fc")),  # NVIDIA's is nested
        "sliding_window": decoder.get("sliding_window") if slides else None,
        "aux_layer_ids": captured(source, nested, target, weights["fc.weight"].shape[-1]),
    }
    form = "raw EAGLE-3" if layer is None else "speculators' EAGLE-3"
    differs = misread(raw, nested, config)
    if EMBEDDING in weights and weights[EMBEDDING].shape == embed.weight.shape:
        alike = likeness(weights[EMBEDDING], embed.weight)
        doubt = ": it looks untrained" if alike < UNTRAINED else ""
        differs.append(
            f"{EMBEDDING} is not the target's table (mean cosine {alike:.2f}{doubt}); it is used here, as by {VLLM}, "
            f"and {SGLANG} puts the target's in its place, so another head would run"
        )
    if Vd == V and "d2t" in source.files:
        differs.append(f"{VLLM} refuses a file with the d2t of a whole vocabulary")
    if borrows and raw.get("draft_vocab_size") is not None:
        differs.append(f"{SGLANG} borrows the target's output head only where draft_vocab_size is null")
    if not borrows and raw.get("draft_vocab_size", Vd) is None:
        differs.append(f"{SGLANG} takes the target's output head for the head's own where draft_vocab_size is null")
    return Reading(form, config, weights, (*differs, *pair_norms(path, weights, layers)))


def likeness(found: Tensor, ours: Tensor) -> float:
    """Return the mean cosine of the rows of two tables (V, D), over some of them."""
    few = slice(None, None, max(1, len(ours) // LIKENESS_ROWS))
    return float(cosine_similarity(found[few].float(), ours[few].detach().cpu().float(), dim=-1).mean())


def pair_norms(path: str, weights: dict[str, Tensor], layers: int) -> list[str]:
    """Give the norm before each layer after the first both of its names. Return a line for each that the file lacks."""
    differs = []
    for i in range(1, layers):
        names = {reader: f"layers.{i}.{name}.weight" for reader, name in BEFORE.items()}
        found = [weights[name] for name in names.values() if name in weights]
        if len(found) == 2 and not torch.equal(*found):
            raise UserError(f"{path}: {' and '.join(names.values())} differ: each engine reads one of them")
        for reader, name in names.items():
            if found and name not in weights:
                differs.append(f"{reader} norms the input of layer {i} by {name}, which the file lacks")
                weights[name] = found[0]
    return differs


def sort_vocab(path: str, weights: dict[str, Tensor], V: int, Vd: int) -> None:
    """Convert the tables of a draft vocabulary to the form of `heads.methods.vocab`, with draft ids in the order of
    their target ids, and reorder the tensors that have a row per draft id. Afterwards both tables are present, or
    neither."""
    d2t = weights.get("d2t")
    if d2t is None or d2t.shape != (Vd,) or d2t.is_floating_point():
        return  # reported when the tables are read
    kept, order = (d2t.long() + torch.arange(Vd)).sort()
    if kept[0] < 0 or kept[-1] >= V or not (kept.diff() > 0).all():
        raise UserError(f"{path}: d2t: expected target ids below {V}, each once, as offsets from the draft ids")
    marks = torch.zeros(V, dtype=torch.bool)
    marks[kept] = True
    if "t2d" in weights and not torch.equal(weights["t2d"].bool(), marks):
        raise UserError(f"{path}: t2d marks other target ids than d2t names")
    weights |= {"d2t": kept - torch.arange(Vd), "t2d": marks}
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if len(weights.get(name, ())) == Vd:
            weights[name] = weights[name][order]
    if Vd == V:
        del weights["d2t"], weights["t2d"]


def captured(source: Source, nested: Mapping[str, Any], target: FrozenTarget, width: int) -> tuple[int, ...]:
    """Return the residual streams that the trainer meant: those in config.json, numbered by the layers that they enter,
    else those in `nested` or in `target_layer_ids`, numbered by the layers that they leave, else the default ones."""
    path, ids = source.path, source.config.get(IDS)
    left = nested.get(IDS) or source.config.get("target_layer_ids")  # the latter by DeepSpec
    if ids is None and left is not None:
        ids = [k + 1 if type(k) is int else k for k in left] if isinstance(left, list) else left
    ids = low_middle_high(target.num_layers) if ids is None else ids
    if not isinstance(ids, list | tuple) or not all(type(k) is int for k in ids) or len(set(ids)) != len(ids):
        raise UserError(f"{path}: config.json: {IDS}: expected numbers of layers, each once, found {shown(ids)}")
    check_streams(source, ids, target)
    if width != len(ids) * target.hidden_size:
        raise UserError(
            f"{path}: tensor fc.weight: expected {len(ids) * target.hidden_size} columns for the layers {list(ids)}, "
            f"found {width}"
        )
    return tuple(sorted(ids))


def misread(raw: Mapping[str, Any], nested: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return a line for each thing that engines read differently from `read_eagle3`."""
    ids, layers = list(config["aux_layer_ids"]), config["num_target_layers"]
    outputs, default = [k - 1 for k in ids], list(low_middle_high(layers))
    named, said = (raw.get(IDS), nested.get(IDS)), []
    if named[0] is None and named[1] is not None and ids != default:
        said.append(f"{VLLM} ignores the layer ids in eagle_config and captures {default} in the place of {ids}")
    if None not in named and sorted(nested[IDS]) != outputs:
        said.append(f"{SGLANG} reads the layer ids in eagle_config, {named[1]}: other layers than {IDS} names")
    if named[0] is not None and named[1] is None and "transformer_layer_config" not in raw and ids != default:
        said.append(
            f"{SGLANG} reads no layer ids but those in eagle_config and captures {default} in the place of {ids}"
        )
    if any(sorted(found) != found for found in named if isinstance(found, list)):
        said.append(f"the layer ids are not ascending: engines capture {ids}, in this order")
    if layers in ids:
        said.append(f"{SGLANG} never captures the output of the last layer")
    if config["norm_before_residual"]:
        said.append(f"{SGLANG} does not read norm_before_residual: another head would run")
    if config["sliding_window"]:
        said.append(f"{SGLANG} does not read sliding_window: serve it with {window_option(config['sliding_window'])}")
    said += misread_rotation(config)
    if "transformer_layer_config" in raw:
        return [*said, f"{SGLANG} does not read speculators' form"]
    name = str((raw.get("architectures") or [None])[0])
    if config["qk_norm"] and name not in (*QWEN3["architectures"], "Qwen3ForCausalLM"):
        said.append(f"{VLLM} knows no {name}: {QWEN3['architectures'][0]} is its name of this head")
    if config["hidden_size"] % config["num_attention_heads"] and not config["qk_norm"]:
        said.append(f"{VLLM} and {SGLANG} refuse the hidden_size: {UNEVEN}")
    if raw.get("num_hidden_layers", 1) != config["num_layers"]:
        made = f"make {raw.get('num_hidden_layers')} layers by num_hidden_layers"
        said.append(f"{VLLM} and {SGLANG} {made}, and the file has {config['num_layers']}")
    if "LlamaForCausalLMEagle3" not in (raw.get("architectures") or []):
        said.append(f"{SGLANG} loads no head whose architectures are not LlamaForCausalLMEagle3")
    return said
