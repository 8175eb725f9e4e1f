"""The commands that serve a target with a draft in each engine. Texts alone: no model code is imported."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from heads.core.engines import window_option
from heads.core.tree import TreeShape

LIKELIEST = "likeliest"
"""The acceptance rule that vLLM has by default, and SGLang."""
SCHEDULE = "num_speculative_tokens_per_batch_size"

Schedule = Sequence[tuple[int, int, int]]
"""First and last number of requests, and the draft tokens of a round for as many. The first range starts at 1."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a command serves: a target with a draft, as they were measured. Both are paths or Hub ids."""

    target: str = "TARGET"
    head: str = "HEAD"
    steps: int = 1
    """Draft tokens of a round."""
    tree: TreeShape | None = None
    """The tree that was measured. None: nothing was, and any number of draft tokens will do."""
    schedule: Schedule = ()
    rule: str | None = None
    """The acceptance rule of a measurement above temperature 0, if there was one."""
    template: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the target's chat template."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    """Settings of the target's generation_config.json that vLLM refuses with a draft, and what to put there."""
    match: int | None = None
    """Tokens of the match after which a lookup drafts in a head's place."""
    code: bool = False
    """True if the target brings its own Python code."""


Command = Callable[[Setting, Mapping[str, object]], str]
"""(what is served, the head's config.json) -> command that serves it."""


def vllm(method: str, *, fixed: bool = False) -> Command:
    """Return a function that makes vLLM's command. `fixed`: the method drafts one number of tokens at any load."""

    def run(setting: Setting, config: Mapping[str, object]) -> str:
        draft: dict[str, object] = {"method": method, "model": setting.head, "num_speculative_tokens": setting.steps}
        if setting.rule not in (None, LIKELIEST):
            draft["draft_sample_method"] = "probabilistic"
        if setting.rule == "block":
            draft["rejection_sample_method"] = "block"
        if setting.schedule and not fixed:
            draft[SCHEDULE] = setting.schedule
        return vllm_serve(setting, draft)

    return run


def vllm_serve(setting: Setting, draft: Mapping[str, object]) -> str:
    """Return vLLM's command. `draft`: its speculative config."""
    words = ["vllm", "serve", setting.target, *["--trust-remote-code"] * setting.code]
    for option, value in (
        ("--default-chat-template-kwargs", setting.template),
        ("--override-generation-config", setting.overrides),
        ("--speculative-config", draft),
    ):
        words += [option, json.dumps(dict(value))] if value else []
    return shlex.join(words)


def sglang(algorithm: str, *, block: bool = False) -> Command:
    """Return a function that makes SGLang's command. `block`: the method drafts a block, and the command has no options
    of a chain."""

    def run(setting: Setting, config: Mapping[str, Any]) -> str:
        steps, shape = setting.steps, setting.tree
        children, nodes = (shape.top_k, shape.nodes) if shape else (1, steps + 1)
        words = ["python", "-m", "sglang.launch_server", "--model-path", setting.target]
        words += ["--trust-remote-code"] * setting.code
        words += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", setting.head]
        if not block:
            words += ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(children)]
        if algorithm == "DSPARK":  # which would refuse any other number than that of config.json's block_size
            words += ["--speculative-dspark-block-size", str(steps)]
        else:
            words += ["--speculative-num-draft-tokens", str(nodes)]
        if algorithm == "EAGLE3" and (window := config.get("sliding_window")):
            words += window_option(window).split()
        return shlex.join(words)

    return run


def llama_cpp(kind: str) -> Command:
    """Return a function that makes llama.cpp's commands: two of its converter, and that of its server. `kind`: name of
    the method in its option --spec-type. A file whose name begins with it is found in a repository of the Hub. The head
    is in 8 bits, a quarter of its size in float32."""

    def run(setting: Setting, config: Mapping[str, object]) -> str:
        target = shlex.quote(setting.target)
        head = shlex.quote(setting.head)
        file = shlex.quote(gguf_name(kind, setting.head))
        return (
            f"python convert_hf_to_gguf.py {target} --outtype f32 --outfile target.gguf\n"
            f"python convert_hf_to_gguf.py {head} --target-model-dir {target} --outtype q8_0 "
            f"--outfile {file}\n"
            f"llama-server -m target.gguf -md {file} --spec-type draft-{kind} --spec-draft-n-max {setting.steps} "
            "--metrics"
        )

    return run


def gguf_name(kind: str, head: str) -> str:
    """Return the name of the GGUF file of a head of this kind. llama.cpp finds a draft beside a model by the prefixes
    eagle3-, dflash- and dspark-."""
    prefix = {"simple": "draft", "dflash2": "dflash"}.get(kind, kind)
    name = head.rstrip("/").rpartition("/")[2]
    return f"{name if name.startswith(f'{prefix}-') else f'{prefix}-{name}'}.gguf"


OPENVINO_FOLDER = "-openvino"
"""End of the names of exported folders."""


def openvino(setting: Setting, config: Mapping[str, Any]) -> str:
    """Return OpenVINO's commands: the export of target and head, and which layers the head reads."""
    target = shlex.quote(setting.target) + " --trust-remote-code" * setting.code
    export = "--task text-generation-with-past --weight-format fp32"
    layers = ",".join(str(k - 1) for k in config["draftsmith"]["config"]["aux_layer_ids"])
    head = shlex.quote(setting.head)
    return (
        f"optimum-cli export openvino -m {target} {export} target{OPENVINO_FOLDER}\n"
        f"optimum-cli export openvino -m {head} {export} --trust-remote-code head{OPENVINO_FOLDER}\n"
        f"python eval/servers/inside/openvino_layers.py head{OPENVINO_FOLDER} {layers}"
    )


def mlx(setting: Setting, config: Mapping[str, object]) -> str:
    words = ["mlx_lm.server", "--model", setting.target, *["--trust-remote-code"] * setting.code]
    return shlex.join([*words, "--draft-model", setting.head, "--num-draft-tokens", str(setting.steps)])
