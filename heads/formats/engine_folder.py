"""Format of the folder that heads of one kind are saved in, and what engines and the papers' repositories load from it.

The limits of each reader are data, taken from the source code of the versions named here. No reader reliably reports a
mismatch: SGLang skips tensors with unknown names, vLLM leaves absent tensors uninitialised, and the EAGLE repository
does both.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from heads.core.engines import ALL_ENGINES, ENGINES, LLAMACPP, MLX, OPENVINO, READERS, SGLANG, VLLM
from heads.core.serve_commands import SCHEDULE, Command, Setting, vllm_serve
from heads.core.tree import is_chain
from heads.foreign.published_files import Reading, Source
from heads.formats.quantized import SCALE
from heads.parts.layers import BlockConfig
from heads.targets.frozen_target import FrozenTarget

TRIED = (
    "Small heads of this kind were run in vLLM 0.32.0, the newest version with a build for CPUs, on a CPU: it wrote "
    "the same text as draftsmith's runtime and accepted the same draft tokens."
)
SAMPLING = (
    "where a request names no sampling, vLLM takes it from the target's generation_config.json, as --sampling model "
    "does here; --generation-config vllm turns that off"
)
BY_LOAD = (
    f"{SCHEDULE} holds first and last number of requests, draft tokens: as measured, between two measured sizes the "
    "smaller number, above them none; vLLM ignores it where --data-parallel-size is above 1"
)
DRAFT_TYPE = "--spec-type draft-"
"""Option of llama.cpp's server, and the beginning of the name of a draft by a head."""
INSTEAD = (
    "to serve one, train an EAGLE-3 head (train/eagle.py), which engines load for most targets, or a draft model "
    "(train/distill.py), which they load for nearly all"
)
"""Advice on a head that no engine serves."""
BOTH = "to serve both drafts, take a head that llama.cpp loads"
"""Advice on one behind a lookup."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Folder:
    """A head's folder, to compare with what readers support."""

    config: Mapping[str, Any]
    """Contents of config.json, with draftsmith's own config of the head under `draftsmith`."""
    shapes: Shapes
    target: Mapping[str, object]
    """The head's record of its target."""


def any_number(config: Mapping[str, Any], steps: int) -> int:
    return steps


@dataclass(frozen=True, kw_only=True)
class Format:
    """Format of the folder that heads of one kind are saved in."""

    weights_file: str = "model.safetensors"
    """File in which engines look for the tensors."""
    engine_config: Callable[[Any, dict[str, object], str], dict[str, Any]]
    """(the head's config, `heads.saved.target_record` with `config`, dtype) -> config.json for engines."""
    readers: Mapping[str, Command]
    """Command for each reader, by the reader's name."""
    check: Callable[[Folder, str], tuple[str | None, list[str]]]
    """(folder, reader) -> the reason why the reader supports no such head, or None, and what it would misread."""
    write_beside: Callable[[Path, dict[str, object]], None] | None = None
    """Write the other files that the folder needs, from the record of the target."""
    read: Callable[[Source, FrozenTarget], Reading | None]
    """Read a head of the target in other projects' forms. Returns None for a folder without a head of this kind. Raises
    UserError for a head of another target, or of a kind that cannot be run. Names and shapes of the tensors are checked
    later."""
    nearest_steps: Callable[[Mapping[str, object], int], int] = any_number
    """(the head's config, wanted draft tokens a round) -> the nearest number that engines draft with it."""
    grows_trees: bool = False
    """True if SGLang also drafts dynamic trees with such heads."""
    quantizes: bool = False
    """True if both engines read such heads with projections in 8 bits (`heads.formats.quantized`)."""
    tried: str | None = None
    """Sentence on the run of small heads of this kind in an engine (`tests/engines`)."""
    tried_settings: Mapping[str, object] = field(default_factory=dict)
    """Settings that all heads of that run had; the sentence is of no others."""
    converters: Callable[[str, str, Mapping[str, object]], list[str]] = lambda head, target, config: []
    """(head, target, the head's config) -> lines on how to convert the folder, and what its own form costs."""


# The check of a folder


@dataclass(frozen=True)
class Verdict:
    """Result of checking a folder against one reader."""

    reader: str
    command: str
    unsupported: str | None
    """Reason why the reader supports no such head, whatever its settings."""
    errors: tuple[str, ...]
    """Parts of the folder that the reader would refuse or, worse, load as another head."""
    notes: tuple[str, ...] = ()
    """What to know before the command is used."""
    otherwise: str | None = None
    """Reason why the command serves something else than was measured, in words that follow the reader's name."""

    @property
    def shown(self) -> str:
        """The command, with its notes as comments."""
        return "\n".join([self.command, *(f"# {note}" for note in self.notes)])

    @property
    def serves(self) -> bool:
        return self.unsupported is None and not self.errors

    @property
    def is_as_measured(self) -> bool:
        """True if the command serves what was measured."""
        return self.serves and self.otherwise is None

    @property
    def reason(self) -> str:
        """Reason why the command does not serve the head, in words that follow the reader's name."""
        if not self.errors:
            return str(self.unsupported)
        more = f" (and {len(self.errors) - 1} more)" if len(self.errors) > 1 else ""
        return f"would misread it: {self.errors[0]}{more}"


def check_contents(
    config: Mapping[str, Any],
    shapes: Shapes,
    form: Format,
    kind: str,
    target: Mapping[str, Any],
    setting: Setting | None = None,
    *,
    trained: int | None = None,
) -> list[Verdict]:
    """Return the verdicts on a folder with this config.json and tensors of these shapes, the engines' first.

    target: the head's record of its target. `trained`: the number of draft tokens for which the head was trained, if it
    was for one.
    """
    folder = Folder(config, {key: shape for key, shape in shapes.items() if not key.endswith(SCALE)}, target)
    setting = replace(setting or Setting(), code="auto_map" in config)
    if setting.tree is None:
        setting = replace(setting, steps=form.nearest_steps(config["draftsmith"]["config"], setting.steps))
    verdicts = []
    for reader in dict.fromkeys((*ALL_ENGINES, *form.readers)):
        if reader not in form.readers:
            verdicts.append(Verdict(reader, "", f"has no method for heads of kind {kind}", ()))
            continue
        unsupported, errors = form.check(folder, reader)
        if reader not in (*ENGINES, LLAMACPP) and "quantization_config" in config:
            errors = [*errors, "8-bit weights are not read"]
        command = form.readers[reader](setting, config)
        notes = notes_of(command, setting)
        notes += NOTES.get(reader, ())
        made, whole = config.get("max_position_embeddings"), target.get("context_length", 0)
        if isinstance(made, int) and made < whole:
            notes.append(
                f"made for {made:,} of the target's {whole:,} positions: beyond them engines may stop drafting or "
                f"fail, unless vLLM's --max-model-len or SGLang's --context-length is {made}"
            )
        if trained is not None and setting.steps > trained:
            notes.append(
                f"{setting.steps} draft tokens are more than the head was trained for, {trained}: the last ones are "
                "accepted less"
            )
        other = why_otherwise(form, reader, setting, config["draftsmith"]["config"]) or why_incomplete(target)
        verdicts.append(Verdict(reader, command, unsupported, tuple(errors), tuple(notes), other))
    return verdicts


def behind_lookup(verdict: Verdict, match: int, steps: int) -> Verdict:
    """Return the verdict on a head that drafts where a lookup finds no match of `match` tokens. llama.cpp asks several
    kinds of drafts in turn for `steps` tokens. The other engines have one."""
    if DRAFT_TYPE not in verdict.command:
        both = "drafts by a lookup or by a head, not by both"
        return replace(verdict, unsupported=verdict.unsupported or both, errors=())
    command = verdict.command.replace(DRAFT_TYPE, DRAFT_TYPE.replace("draft-", "ngram-simple,draft-"))
    command += f" --spec-ngram-simple-size-n {match} --spec-ngram-simple-size-m {steps}"
    note = (
        f"llama.cpp's lookup follows the latest match of {match} tokens, ours the longest, after which it may draft "
        f"more than {steps}; llama.cpp's drafts no more than stand behind the match, and none if these are fewer than "
        f"{match}: rounds may differ, texts do not"
    )
    return replace(verdict, command=command, notes=(*verdict.notes, note))


def why_otherwise(form: Format, reader: str, setting: Setting, config: Mapping[str, object]) -> str | None:
    """Return why a reader drafts otherwise with such a head than was measured, or None."""
    shape = setting.tree
    if shape is None:
        return None
    if not is_chain(shape) and not (reader == SGLANG and form.grows_trees and shape.paths is None):
        return f"does not draft the tree {shape}; measure a chain (--tree chain:{shape.depth})"
    if (steps := form.nearest_steps(config, setting.steps)) != setting.steps:
        return f"drafts {steps} tokens a round with this head, not {setting.steps}; measure --tree chain:{steps}"
    return None


def why_incomplete(target: Mapping[str, object]) -> str | None:
    """Return why the name of a target is not all that an engine needs, or None. `target`: a head's record of it."""
    if adapter := target.get("adapter"):
        return f"would serve the target without the adapter {adapter}; save them merged, and measure that model"
    if file := target.get("gguf_file"):
        return f"would not find the target in its GGUF file {file}; give it that file and a tokenizer"
    return None


def notes_of(command: str, setting: Setting) -> list[str]:
    """Return what to know before a command is used."""
    notes = [SAMPLING] * command.startswith("vllm serve") + [BY_LOAD] * (SCHEDULE in command)
    if command.startswith("vllm serve") and setting.overrides:
        named = ", ".join(f"{name} {value}" for name, value in setting.overrides.items())
        notes.append(
            "the target's generation_config.json names settings that vLLM refuses with a draft, and the command sets "
            f"{named}"
        )
    if setting.template and "template-kwargs" not in command:
        notes.append(f"requests need chat_template_kwargs {json.dumps(dict(setting.template))}, as they were measured")
    return notes


def why_unfit(verdicts: Sequence[Verdict], serve: Sequence[str] | None = None) -> str | None:
    """Return the reason why a head is unfit for engines, or None. `serve`: names of the engines that it is for
    (`READERS`), each of which must serve it. Without them, none of `ENGINES` may misread it and some engine must serve
    it."""
    if serve is not None:
        meant = [READERS[name] for name in serve]
        return _reasons(verdicts, meant) or None
    if any(verdict.errors for verdict in verdicts if verdict.reader in ENGINES):
        return _reasons(verdicts, ENGINES)
    return why_unserved(verdicts)


def why_unserved(verdicts: Sequence[Verdict], advice: str = INSTEAD) -> str | None:
    """Return the reason why no engine serves a head, with advice, or None if one does."""
    if any(verdict.serves for verdict in verdicts if verdict.reader in ALL_ENGINES):
        return None
    return f"no engine serves it, so it runs in this runtime only: {_reasons(verdicts, ALL_ENGINES)}; {advice}"


def _reasons(verdicts: Sequence[Verdict], readers: Sequence[str]) -> str:
    others = [verdict for verdict in verdicts if verdict.reader in readers and not verdict.serves]
    return "; ".join(f"{verdict.reader} {verdict.reason}" for verdict in others)


# Parts of formats


def look_up_in_vllm(setting: Setting, longest: int, notes: Sequence[str] = ()) -> Verdict:
    """Return the verdict of vLLM on prompt lookup with matches of 1 to `longest` tokens."""
    draft = {
        "method": "ngram",
        "num_speculative_tokens": setting.steps,
        "prompt_lookup_max": longest,
        "prompt_lookup_min": 1,
    }
    command = vllm_serve(setting, draft)
    return Verdict(VLLM, command, None, (), (*notes_of(command, setting), *notes))


NOTES = {
    LLAMACPP: (
        "the converter is in llama.cpp's sources, and takes folders",
        "without the options llama-server drafts 3 tokens; its caches have 16 bits unless -ctk f32 -ctv f32 is given",
    ),
    OPENVINO: (
        "without the last command OpenVINO GenAI reads layers one too deep; openvino_genai.draft_model then takes the "
        "folder of the head; greedy only, as its sampled drafts change the distribution",
    ),
    MLX: ("once a text exceeds a sliding window of the target, rejected tokens stay in its cache and change the text",),
}
"""What to know before a reader's command is used, for heads of any kind."""


def decoder_config(config: BlockConfig, target: Mapping[str, object], dtype: str) -> dict[str, object]:
    """Return the fields of a decoder's layers in config.json."""
    scaling = getattr(config, "rope_scaling", None)
    if scaling and "factor" in scaling:
        scaling = {**scaling, "factor": float(scaling["factor"])}  # as vLLM needs
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "max_position_embeddings": config.max_position_embeddings,
        **{name: target.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "torch_dtype": dtype,
    }


def with_both_rotations(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a language model with its rotary positions in both forms: in `rope_parameters`, which
    transformers 5 and newer engines read, and in `rope_theta` and `rope_scaling`, which all others do.

    The older form is left out where transformers 5 would read other positions from both.
    """
    if isinstance(text := fields.get("text_config"), Mapping):
        return {**fields, "text_config": with_both_rotations(text)}
    parameters: Any = fields.get("rope_parameters") or {}
    whole = parameters if "rope_theta" in parameters else parameters.get("full_attention") or {}
    if "rope_theta" not in whole:
        return {**fields}
    scaling = {name: value for name, value in whole.items() if name not in ("rope_theta", "type") and value is not None}
    if "factor" in scaling:
        scaling["factor"] = float(scaling["factor"])  # as vLLM needs
    part = scaling.get("partial_rotary_factor")
    is_plain = scaling.get("rope_type", "default") == "default" and not {*scaling} & {"mrope_section"}
    older = {"rope_theta": whole["rope_theta"], "rope_scaling": None if is_plain else scaling}
    older |= {} if part is None else {"partial_rotary_factor": part}
    if (local := parameters.get("sliding_attention")) is not None:
        older["rope_local_base_freq"] = local["rope_theta"]
    try:
        one, both = (AutoConfig.for_model(**deepcopy({**fields, **more})) for more in ({}, older))
    except Exception:  # each family's config has checks of its own
        return {**fields}
    return {**fields, **(older if one.rope_parameters == both.rope_parameters else {})}


def named_class(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures") or [None]
    name: str | None = names[0]
    return name
