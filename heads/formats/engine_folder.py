"""Format of the folder that heads of one kind are saved in, and what engines and the papers' repositories load from it.

The limits of each reader are data, taken from the source code of the versions named here. No reader reliably reports a
mismatch: SGLang skips tensors with unknown names, vLLM leaves absent tensors uninitialised, and the EAGLE repository
does both.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from heads.core.engines import ALL_ENGINES, ENGINES, LLAMACPP, READERS, window_option
from heads.foreign.published_files import Reading, Source
from heads.formats.quantized import SCALE
from heads.methods.layers import BlockConfig
from heads.targets.frozen_target import FrozenTarget

TRIED = (
    "Small heads of this kind were run in vLLM 0.32.0, the newest version with a build for CPUs, on a CPU: it wrote "
    "the same text as draftsmith's runtime and accepted the same draft tokens."
)
SAMPLING = (
    "where a request names no sampling, vLLM takes it from the target's generation_config.json, as --sampling model "
    "does here; --generation-config vllm turns that off"
)
SCHEDULE = "num_speculative_tokens_per_batch_size"
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

Shapes = dict[str, tuple[int, ...]]

Schedule = Sequence[tuple[int, int, int]]
"""First and last number of requests, and the draft tokens of a round for as many. The first range starts at 1."""

Command = Callable[[str, str, int, Mapping[str, Any], Schedule], str]
"""(target with its options, head, draft tokens per round, the head's config.json, fewer draft tokens by load) ->
command that serves them."""


@dataclass(frozen=True)
class Folder:
    """A head's folder, to compare with what readers support."""

    config: Mapping[str, Any]
    """Contents of config.json, with draftsmith's own config of the head under `draftsmith`."""
    shapes: Shapes
    target: Mapping[str, Any]
    """The head's record of its target."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """Format of the folder that heads of one kind are saved in."""

    weights_file: str = "model.safetensors"
    """File in which engines look for the tensors."""
    engine_config: Callable[[Any, dict[str, Any], str], dict[str, Any]]
    """(the head's config, `heads.saved.target_record` with `config`, dtype) -> config.json for engines."""
    readers: Mapping[str, Command]
    """Command for each reader, by the reader's name."""
    check: Callable[[Folder, str], tuple[str | None, list[str]]]
    """(folder, reader) -> the reason why the reader supports no such head, or None, and what it would misread."""
    write_beside: Callable[[Path, dict[str, Any]], None] | None = None
    """Write the other files that the folder needs, from the record of the target."""
    read: Callable[[Source, FrozenTarget], Reading | None]
    """Read a head of the target in other projects' forms. Returns None for a folder without a head of this kind. Raises
    UserError for a head of another target, or of a kind that cannot be run. Names and shapes of the tensors are checked
    later."""
    quantizes: bool = False
    """True if both engines read such heads with projections in 8 bits (`heads.formats.quantized`)."""
    tried: str | None = None
    """Sentence on the run of small heads of this kind in an engine (`tests/engines`)."""
    tried_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that all heads of that run had; the sentence is of no others."""
    converters: Callable[[str, str, Mapping[str, Any]], list[str]] = lambda head, target, config: []
    """(head, target, the head's config) -> lines on how to convert the folder into other forms."""


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

    @property
    def shown(self) -> str:
        """The command, with its notes as comments."""
        return "\n".join([self.command, *(f"# {note}" for note in self.notes)])

    @property
    def serves(self) -> bool:
        return self.unsupported is None and not self.errors

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
    *,
    name: str = "HEAD",
    base: str = "TARGET",
    steps: int = 1,
    schedule: Schedule = (),
    trained: int | None = None,
) -> list[Verdict]:
    """Return the verdicts on a folder with this config.json and tensors of these shapes, the engines' first.

    target: the head's record of its target. The commands name the head `name` and its target `base`, and draft `steps`
    tokens per round, or fewer by `schedule` where the engine takes one. `trained`: the number for which the head was
    trained, if it was for one.
    """
    folder = Folder(config, {key: shape for key, shape in shapes.items() if not key.endswith(SCALE)}, target)
    base = shlex.quote(base) + (" --trust-remote-code" if "auto_map" in config else "")
    verdicts = []
    for reader in dict.fromkeys((*ALL_ENGINES, *form.readers)):
        if reader not in form.readers:
            verdicts.append(Verdict(reader, "", f"has no method for heads of kind {kind}", ()))
            continue
        unsupported, errors = form.check(folder, reader)
        if reader not in (*ENGINES, LLAMACPP) and "quantization_config" in config:
            errors = [*errors, "8-bit weights are not read"]
        command = form.readers[reader](base, name, steps, config, schedule)
        notes = [SAMPLING] * command.startswith("vllm serve") + [BY_LOAD] * (SCHEDULE in command)
        notes += NOTES.get(reader, ())
        made, whole = config.get("max_position_embeddings"), target.get("context_length", 0)
        if isinstance(made, int) and made < whole:
            notes.append(
                f"made for {made:,} of the target's {whole:,} positions: beyond them engines may stop drafting or "
                f"fail, unless vLLM's --max-model-len or SGLang's --context-length is {made}"
            )
        if trained is not None and steps > trained:
            notes.append(
                f"{steps} draft tokens are more than the head was trained for, {trained}: the last ones are accepted "
                "less"
            )
        verdicts.append(Verdict(reader, command, unsupported, tuple(errors), tuple(notes)))
    return verdicts


def behind_lookup(verdict: Verdict, match: int, steps: int) -> Verdict:
    """Return the verdict on a head that drafts where a lookup finds no match of `match` tokens. llama.cpp asks several
    kinds of drafts in turn for `steps` tokens. The other engines have one."""
    if DRAFT_TYPE not in verdict.command:
        return replace(verdict, unsupported=verdict.unsupported or "drafts by a lookup or by a head, not by both")
    command = verdict.command.replace(DRAFT_TYPE, DRAFT_TYPE.replace("draft-", "ngram-simple,draft-"))
    command += f" --spec-ngram-simple-size-n {match} --spec-ngram-simple-size-m {steps}"
    note = (
        f"llama.cpp's lookup follows the latest match of {match} tokens, ours the longest; it drafts no more tokens "
        f"than stand behind the match, and none if these are fewer than {match}: rounds may differ, texts do not"
    )
    return replace(verdict, command=command, notes=(*verdict.notes, note))


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


def why_unserved(verdicts: Sequence[Verdict]) -> str | None:
    """Return the reason why no engine serves a head, or None if one does."""
    if any(verdict.serves for verdict in verdicts if verdict.reader in ALL_ENGINES):
        return None
    return f"no engine serves it, so it runs in this runtime only: {_reasons(verdicts, ALL_ENGINES)}; {INSTEAD}"


def _reasons(verdicts: Sequence[Verdict], readers: Sequence[str]) -> str:
    others = [verdict for verdict in verdicts if verdict.reader in readers and not verdict.serves]
    return "; ".join(f"{verdict.reader} {verdict.reason}" for verdict in others)


# Parts of formats


def vllm(method: str, *, fixed: bool = False) -> Command:
    """Return a function that makes vLLM's command. `fixed`: the method drafts one number of tokens at any load."""

    def run(target: str, head: str, steps: int, config: Mapping[str, Any], schedule: Schedule) -> str:
        settings: dict[str, Any] = {"method": method, "model": head, "num_speculative_tokens": steps}
        if schedule and not fixed:
            settings[SCHEDULE] = schedule
        return f"vllm serve {target} --speculative-config {shlex.quote(json.dumps(settings))}"

    return run


def sglang(algorithm: str, *, block: bool = False) -> Command:
    """Return a function that makes SGLang's command, for chains as in vLLM. `block`: the method drafts a block, and the
    command has no options of a chain."""

    def run(target: str, head: str, steps: int, config: Mapping[str, Any], schedule: Schedule) -> str:
        chain = "" if block else f"--speculative-num-steps {steps} --speculative-eagle-topk 1 "
        window = config.get("sliding_window") if algorithm == "EAGLE3" else None
        drafts = f"--speculative-num-draft-tokens {steps + 1}"
        if algorithm == "DSPARK":  # which would refuse any other number than that of config.json's block_size
            drafts = f"--speculative-dspark-block-size {steps}"
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} "
            f"--speculative-draft-model-path {shlex.quote(head)} {chain}{drafts}"
            + (f" {window_option(window)}" if window else "")
        )

    return run


def llama_cpp(kind: str) -> Command:
    """Return a function that makes llama.cpp's commands: two of its converter, and that of its server. `kind`: name of
    the method in its option --spec-type. A file whose name begins with it is found in a repository of the Hub."""

    def run(target: str, head: str, steps: int, config: Mapping[str, Any], schedule: Schedule) -> str:
        target = target.removesuffix(" --trust-remote-code")
        file = shlex.quote(gguf_name(kind, head))
        return (
            f"python convert_hf_to_gguf.py {target} --outtype f32 --outfile target.gguf\n"
            f"python convert_hf_to_gguf.py {shlex.quote(head)} --target-model-dir {target} --outtype f32 "
            f"--outfile {file}\n"
            f"llama-server -m target.gguf -md {file} --spec-type draft-{kind} --spec-draft-n-max {steps} --metrics"
        )

    return run


def gguf_name(kind: str, head: str) -> str:
    """Return the name of the GGUF file of a head of this kind. llama.cpp finds a draft beside a model by the prefixes
    eagle3-, dflash- and dspark-."""
    prefix = {"simple": "draft", "dflash2": "dflash"}.get(kind, kind)
    name = head.rstrip("/").rpartition("/")[2]
    return f"{name if name.startswith(f'{prefix}-') else f'{prefix}-{name}'}.gguf"


def openvino(target: str, head: str, steps: int, config: Mapping[str, Any], schedule: Schedule) -> str:
    """Return OpenVINO's commands: the export of target and head."""
    export = "--task text-generation-with-past --weight-format fp32"
    return (
        f"optimum-cli export openvino -m {target} {export} target-openvino\n"
        f"optimum-cli export openvino -m {shlex.quote(head)} {export} --trust-remote-code head-openvino"
    )


def mlx(target: str, head: str, steps: int, config: Mapping[str, Any], schedule: Schedule) -> str:
    return f"mlx_lm.server --model {target} --draft-model {shlex.quote(head)} --num-draft-tokens {steps}"


NOTES = {
    LLAMACPP: (
        "the converter is in llama.cpp's sources, and takes folders",
        "without the options llama-server drafts 3 tokens; its caches have 16 bits unless -ctk f32 -ctv f32 is given",
    )
}
"""What to know before a reader's command is used, for heads of any kind."""


def decoder_config(config: BlockConfig, target: Mapping[str, Any], dtype: str) -> dict[str, Any]:
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
