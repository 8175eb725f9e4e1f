"""The files beside a target's weights: its config, tokenizer and chat template, and the tokens that end its texts."""

import json
import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.hub import LocalEntryNotFoundError, cached_file, is_offline_mode  # type: ignore[attr-defined]

from heads.core.errors import UserError, first_line, warn_once
from heads.targets.families import eos_ids, register_mimo
from heads.targets.gguf_settings import complete
from heads.targets.hub import INDEX, MODEL, TOKENIZER_CONFIG, find_file, has_file, is_here, repo_and_revision

ONLY = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_ALONE = (
    "holds a peft adapter and no model; name the model with target.path, and this adapter with target.adapter, which "
    "merges it"
)
CODE_SETTINGS = {"output_attentions": False, "output_hidden_states": False, "return_dict": True, "use_cache": True}
"""Fields of a config that say how other programs run the model, and what they must be here."""


def check_index(path: str) -> None:
    """Raise UserError for a folder with the weights of two checkpoints: transformers would read model.safetensors, and
    engines the files that the index names. Also for one whose index names files that are not there."""
    index = Path(path) / INDEX
    if not index.is_file():
        return
    try:
        names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, LookupError, AttributeError, TypeError):  # reported by the loader
        return
    if ONLY not in names and (Path(path) / ONLY).is_file():
        raise UserError(
            f"{path}: holds {ONLY} beside {INDEX}, which names {names[0]} and others: engines read those, transformers "
            f"the former; remove one of the two"
        )
    if absent := [name for name in names if not (Path(path) / name).is_file()]:
        raise UserError(f"{path}: lacks {len(absent)} of the files that {INDEX} names, {absent[0]} first; fetch them")


def load_config(path: str, *, trust_remote_code: bool = False, gguf_file: str | None = None) -> Any:
    """Load the config of the model at `path`. UserError if it is missing or cannot be read."""
    if gguf_file is not None and find_spec("gguf") is None:
        raise UserError(f"{gguf_file}: needs the package gguf, which is not installed; pip install -e '.[gguf]'")
    name = gguf_file or "config.json"
    if is_here(path) and not (Path(path) / name).is_file():
        if is_adapter(path):
            raise UserError(f"{path}: {ADAPTER_ALONE}")
        raise UserError(f"{path}: expected a model folder, found no {name} in it")
    register_mimo()
    repo, revision = repo_and_revision(path)
    how = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        config: Any = AutoConfig.from_pretrained(
            repo, revision=revision, trust_remote_code=trust_remote_code, **how, attn_implementation=None
        )
    except Exception as error:  # OSError, ValueError, KeyError and the validators' own
        if is_adapter(path):
            raise UserError(f"{path}: {ADAPTER_ALONE}") from error
        raise unreadable(path, "no model that can be read", error, "fix its config.json, or name another") from error
    if gguf_file is not None and (file := find_file(path, gguf_file)) is not None:
        complete(config, file)
    for each in (config, config.get_text_config()):
        for setting, value in CODE_SETTINGS.items():
            setattr(each, setting, value)
    config._attn_implementation = config._experts_implementation = None  # also of its parts
    return config


def load_tokenizer(
    path: str,
    *,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    adapter: str | None = None,
    fix_mistral_regex: bool | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model at `path`, else of its GGUF file, or that beside its adapter if there is one.
    `fix_mistral_regex`: whether transformers replaces the pattern by which it splits text; None: it stays, and a line
    says so if transformers doubts it. UserError if it cannot be loaded."""
    # With a GGUF file named, transformers 5.24 reads a tokenizer.json without the end token and template beside it.
    from_gguf = gguf_file is not None and not holds(path, "tokenizer.json")
    how: dict[str, object] = {"gguf_file": gguf_file} if from_gguf else {}
    try:
        if adapter is not None and has_file(adapter, TOKENIZER_CONFIG):
            warn_once(f"{adapter}: brings a tokenizer and its chat template, which replace those of {path}")
            path = adapter
            how = {}
        if fix_mistral_regex is not None:
            how["fix_mistral_regex"] = fix_mistral_regex
        repo, revision = repo_and_revision(path)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            repo, revision=revision, trust_remote_code=trust_remote_code, **how
        )
    except Exception as error:  # the tokenizer backends raise bare Exception, TypeError and OSError alike
        is_there = is_here(path) and (Path(path) / "tokenizer.json").is_file()
        remedy = "replace its tokenizer files" if is_there else "put tokenizer.json beside config.json"
        raise unreadable(path, "no tokenizer that can be loaded", error, remedy) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    doubted: bool | None = getattr(backend, "fix_mistral_regex", None)  # set by transformers where it warns
    if doubted is False and fix_mistral_regex is None:
        warn_once(
            f"{path}: its tokenizer may split text otherwise than the model was trained with: transformers takes its "
            "pattern for the wrong one of older Mistral files; target.fix_mistral_regex=true in the recipe, or "
            "--fix-mistral-regex true, replaces it, and false says that it is right; engines have the same choice"
        )
    if fix_mistral_regex and doubted is not True:
        raise UserError(
            f"{path}: fix_mistral_regex has no effect: its tokenizer is not one of Mistral's of before transformers 5; "
            "leave it out"
        )
    take_processor_template(tokenizer, path)
    return tokenizer


def is_adapter(path: str) -> bool:
    """Return True for a folder or a repository of a peft adapter without a model's weights."""
    return [holds(path, name) for name in (ADAPTER_CONFIG, ONLY, INDEX)] == [True, False, False]


def holds(path: str, name: str) -> bool:
    """Return True if a folder or a repository has a file, False also where that cannot be known."""
    try:
        return has_file(path, name)
    except (OSError, ValueError):
        return False


def take_processor_template(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Give a tokenizer the chat template of the processor of the model at `path`, which transformers' tokenizers do not
    read. A template of its own stays that of prompts with tools, as in vLLM."""
    found: dict[str, object] = {}
    for name in ("processor_config.json", "preprocessor_config.json", "chat_template.json"):
        try:
            if (file := find_file(path, name)) is not None:
                found[name] = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
        except (OSError, ValueError, AttributeError) as error:
            raise unreadable(path, f"no {name} that can be read", error, "fetch it again") from error
    place, template = next(((name, text) for name, text in found.items() if text), ("", None))
    own = tokenizer.chat_template
    has_processor = found.keys() != {"chat_template.json"}
    if template is None or template == own or (own is not None and not has_processor):
        return
    if own is not None:
        warn_once(
            f"{path}: {place} and its tokenizer have chat templates that differ: the former renders prompts, and the "
            "latter those with tools, as in vLLM"
        )
        own = own if isinstance(own, dict) else {"default": own}
        template = {"default": template, "tool_use": own.get("tool_use", own.get("default"))}
    tokenizer.chat_template = template


def load_end_ids(
    path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False, gguf_file: str | None = None
) -> tuple[int, ...]:
    """Return the tokens that end a text of the model at `path`, as engines do: its tokenizer's, and those of its
    generation config, or of its config if that names none. Say if the files disagree, or if none names a token."""
    config = load_config(path, trust_remote_code=trust_remote_code, gguf_file=gguf_file)
    check_generation_config(path)
    repo, revision = repo_and_revision(path)
    generation = file = None
    try:
        file = cached_file(repo, "generation_config.json", revision=revision)
        generation = GenerationConfig.from_pretrained(repo, revision=revision or "main")
    except Exception as error:  # the hub and its client raise many kinds
        # transformers gives no cause where there is no such file; offline, what is not cached counts as not there.
        offline = isinstance(error.__cause__, LocalEntryNotFoundError) and is_offline_mode()
        if file is not None or not isinstance(error, OSError) or not (error.__cause__ is None or offline):
            remedy = "fetch it again, or set HF_HUB_OFFLINE=1 to read what is cached"
            raise unreadable(path, "no generation_config.json that can be read", error, remedy) from error
    from_tokenizer = eos_ids(tokenizer)
    generated = eos_ids(generation)
    described = eos_ids(config, config.get_text_config())
    ends = tuple(dict.fromkeys((*(generated or described), *from_tokenizer)))

    def names(ids: Iterable[int]) -> str:
        return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in ids) or "none"

    if not ends:
        warn_once(
            f"{path}: neither its tokenizer nor its configs name a token that ends a text: texts go on to their limit"
        )
    elif not {*from_tokenizer} <= {*(generated or described)} or not {*described} <= {*ends}:
        warn_once(
            f"{path}: its files disagree on the tokens that end a text: its tokenizer names {names(from_tokenizer)}, "
            f"generation_config.json {names(generated)}, config.json {names(described)}; here a text ends at "
            f"{names(ends)}"
        )
    return ends


def unreadable(path: str, what: str, error: Exception, remedy: str) -> UserError:
    """Return a UserError of one line for an exception from a transformers loader."""
    if "trust_remote_code" in str(error):
        return UserError(
            f"{path}: comes with Python code of its own, which is not run unasked; read it, then set "
            "target.trust_remote_code=true in the recipe, or --trust-remote-code on the command line"
        )
    if not is_here(path) and not MODEL.fullmatch(repo_and_revision(path)[0]):
        return UserError(f"{path}: no such folder; expected one with config.json, or a Hub id (OWNER/NAME)")
    if not is_here(path):
        return UserError(
            f"{path}: neither a folder here nor found on the Hub ({first_line(error)}); check the name, and the network"
        )
    return UserError(f"{path}: {what} ({first_line(error)}); {remedy}")


def check_generation_config(path: str) -> None:
    """Raise UserError if the folder's generation_config.json is damaged. transformers would ignore it, including the
    tokens that end a text."""
    file = Path(path) / "generation_config.json"
    if not is_here(path) or not os.path.lexists(file):
        return
    remedy = "replace it, or delete it so that config.json alone says which tokens end a text"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({first_line(error)}); {remedy}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{file}: expected a JSON object, got {type(settings).__name__}; {remedy}")
