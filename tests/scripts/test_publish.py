"""A published run loads again by its Hub id and names no path of this machine; nothing else of it goes out."""

import copy
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import CommitOperationAdd, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.errors import HTTPError as NetworkError  # type: ignore[attr-defined] # of whatever client it uses
from rich.console import Console

from eval import report
from eval.bench import parse_arguments
from eval.core.command_line import exit_status
from eval.measure.bench_heads import bench_heads
from eval.measure.model_facts import head_facts
from eval.pages import upload
from eval.pages.publication import collect
from eval.pages.run_report import save_and_print
from eval.records.measure_settings import BenchSettings, to_settings
from eval.records.results import as_record, read_results, write_record
from heads.saved import load_head, read_config, save_head, target_record
from heads.targets.load import load_target
from heads.targets.target_files import load_tokenizer
from scripts import publish
from tests.support.annotations import Capture, Patch
from tests.support.measurements import measurement
from tests.support.native_mtp import change_config, write_native
from tests.support.runs import same
from tests.support.small_targets import make_drafter

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_" + "s3cret" * 5
REPO = "ann/a-head"
Refused = Callable[..., str]


class StandInHub:
    """A hub in a cache folder of the form that huggingface_hub reads, so that what is committed can be loaded."""

    def __init__(self, cache: Path):
        self.cache = cache
        cache.mkdir()
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.private: dict[str, bool] = {}
        self.cards: dict[str, ModelCardData] = {}
        self.fault: Exception | None = None

    def model_info(self, repo_id: str) -> SimpleNamespace:
        if repo_id in self.cards:
            return SimpleNamespace(card_data=self.cards[repo_id])
        if repo_id not in self.repos:
            raise RepositoryNotFoundError("404", response=answer(404))
        return SimpleNamespace(private=self.private[repo_id])

    def revision_exists(self, repo_id: str, branch: str) -> bool:
        return False

    def list_repo_files(self, repo_id: str, *, revision: str | None) -> list[str]:
        return list(self.repos[repo_id])

    def hf_hub_download(self, repo_id: str, name: str, *, revision: str | None) -> str:
        file = self.cache / "fetched"
        file.write_bytes(self.repos[repo_id][name])
        return str(file)

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> None:
        assert exist_ok
        if self.fault is not None:
            raise self.fault
        self.repos.setdefault(repo_id, {".gitattributes": b""})
        self.private.setdefault(repo_id, bool(private))

    def create_branch(self, repo_id: str, *, branch: str, exist_ok: bool) -> None:
        assert exist_ok

    def create_commit(
        self, repo_id: str, operations: Sequence[CommitOperationAdd], *, commit_message: str, revision: str | None
    ) -> SimpleNamespace:
        for operation in operations:
            data = operation.path_or_fileobj
            whole = data if isinstance(data, bytes) else Path(str(data)).read_bytes()
            self.repos[repo_id][operation.path_in_repo] = whole
        commit = hashlib.sha1(repr(sorted(self.repos[repo_id].items())).encode()).hexdigest()
        self.commits.append(commit)
        folder = self.cache / f"models--{repo_id.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / (revision or "main")).write_text(commit)
        for name, data in self.repos[repo_id].items():
            file = folder / "snapshots" / commit / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/{commit}")


def answer(status: int) -> Any:
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """A run as training leaves it: head, results, report, and checkpoints; its data lay in a user's home."""
    run = tmp_path_factory.mktemp("runs") / "run"
    target, tokenizer = load_target(str(tiny_target_dir)), load_tokenizer(str(tiny_target_dir))
    head = make_drafter("eagle3", target, aux_layer_ids=[2, 4, 5])
    home = os.path.expanduser("~")
    sources = [{"kind": "chat", "path": f"{home}/secret/chats.jsonl"}, {"path": "org/chats"}]
    provenance: dict[str, Any] = {"command": ["eagle.py", f"{home}/recipes/mine.yaml"], "data": {"sources": sources}}
    provenance["target"] = {"path": target.name}
    save_head(head, run / "head", target=target_record(target), provenance=provenance)
    (run / "checkpoints/step-1").mkdir(parents=True)
    (run / "checkpoints/step-1/optimizer.safetensors").write_bytes(b"states")
    (run / "head/notes.txt").write_text("for me alone")
    (run / "recipe.yaml").write_text(f"output_dir: {run}\n")
    (run.parent / "prompts.jsonl").write_text('{"text": "import os"}\n{"text": "x = [1, 2"}\n')
    settings = BenchSettings(prompts=str(run.parent / "prompts.jsonl"), trees=("chain:2",), max_new_tokens=8, repeats=1)
    heads = {str(run / "head"): load_head(run / "head")}
    save_and_print(bench_heads(target, heads, tokenizer, settings), run, Console(quiet=True))
    return run


@pytest.fixture
def run(measured: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(measured, tmp_path / "run"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: Patch) -> StandInHub:
    hub = StandInHub(tmp_path / "hub")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(upload, "HfApi", lambda token: hub if token == TOKEN else None)
    return hub


def call(*words: object) -> int:
    return exit_status(lambda: publish.main([str(word) for word in words]))


@pytest.fixture
def refused(hub: StandInHub, capsys: Capture) -> Refused:
    """Runs a command that must be refused in one line, without the token, and with nothing published; the line."""

    def run(*words: object) -> str:
        before, commits = {name: dict(files) for name, files in hub.repos.items()}, len(hub.commits)
        capsys.readouterr()
        assert call(*words) == 2
        shown = capsys.readouterr()
        assert len(shown.err.splitlines()) == 1 and TOKEN not in shown.err + shown.out
        assert hub.repos == before and len(hub.commits) == commits
        return shown.err

    return run


def front_matter(card: bytes) -> Any:
    return yaml.safe_load(card.decode().split("---")[1])


@pytest.mark.slow
def test_what_is_published_is_measured_by_its_id(run: Path, hub: StandInHub, tiny_target_dir: Path) -> None:
    assert call(run, REPO, "--license", "apache-2.0") == 0 and len(hub.commits) == 1
    held = hub.repos[REPO]
    files = {"config.json", "model.safetensors", "README.md", "plots/acceptance.png", "results.json", "recipe.yaml"}
    assert held.keys() == {".gitattributes", "acceptance.json", *files}
    matter = front_matter(held["README.md"])
    card: Any = ModelCard(held["README.md"].decode()).data
    figures = {found.metric_type: found.metric_value for found in card.eval_results}
    results = json.loads((run / "results.json").read_text())
    assert figures.pop("tau") == round(results["tau"]["mean"], 3)
    assert not figures or figures == {"speedup": round(results["speedup"]["measured"], 3)}  # none of a busy machine
    assert matter.pop("model-index")[0]["name"] == "a-head"
    named = {"library_name": "draftsmith", "license": "apache-2.0", "pipeline_tag": "text-generation"}
    assert matter == named | {"datasets": ["org/chats"], "tags": ["speculative-decoding", "eagle3"]}
    snapshot = hub.cache / "models--ann--a-head/snapshots" / hub.commits[0]
    assert same(load_head(run / "head").state_dict(), load_head(snapshot).state_dict())
    words = [REPO, "--tree", "chain:2", "--repeats", "1", "--max-new-tokens", "8"]
    words += ["--prompts", str(run.parent / "prompts.jsonl"), "--out", str(run / "out")]
    (run.parent / "prompts.jsonl").write_text('{"text": "import os"}\n')
    measure = (
        "import json, sys; from eval import bench; from eval.core.command_line import exit_status\n"
        "from heads.saved import find_head\n"
        "print([find_head(name).name for name in sys.argv[2:]])\n"
        "print([exit_status(lambda: bench.main(words)) for words in json.loads(sys.argv[1])])"
    )
    assert call(run, REPO, "--revision", "v2", "--license", "mit") == 0
    first, second = hub.commits
    names = [REPO, f"{REPO}@v2", f"{REPO}@{first}"]
    given = json.dumps([words, [*words, "--target", str(tiny_target_dir)]])
    # A process of its own finds the hub's folder when it imports huggingface_hub.
    environment = {**os.environ, "HF_HUB_CACHE": str(hub.cache), "HF_HUB_OFFLINE": "1"}
    command: list[str] = [sys.executable, "-c", measure, given, *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert first != second and done.stdout.splitlines()[0] == str([first, second, first])
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]  # beside libraries' own
    assert len(said) == 1 and "give --target" in said[0], done.stderr
    assert "1 of 1" in done.stdout and done.stdout.splitlines()[-1] == "[2, 0]", done.stderr


def test_a_head_measured_at_several_loads_is_served_by_load(run: Path) -> None:
    results = read_results(run / "results.json")
    figures = [measurement("chain:2", speedup=1.3 - size / 20, low=1.05, batch_size=size, suites={}) for size in (1, 4)]
    results.measurements, results.chosen = figures, 0
    write_record(as_record(results), run / "results.json")
    card = collect(run, REPO).card
    assert "Draft tokens by load, greedy: 2 up to 4 requests (1.10x \\[1.05, 1.20\\] at 4), none above." in card
    taken = '"num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 4, 2], [5, 100000, 0]]'
    target = load_target(read_config(run / "head")["target"]["name"])
    here = head_facts(load_head(run / "head"), str(run), target, measurements=results.measurements).serve
    assert here is not None and taken in here and card.count(taken) == 1


def test_the_card_says_what_it_is_how_to_serve_it_and_what_it_was_trained_on(run: Path, hub: StandInHub) -> None:
    """And nothing that goes out names a path of this machine."""
    recipe = {"output_dir": str(run), "target": {"path": "/x/target"}, "train": {"lr": 0.01, "max_steps": 9}}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 9, "tokens": 12345}\n')
    hub.cards["org/the-target"] = ModelCardData(license="other", license_name="llama3.1", license_link="LICENSE")
    assert call(run, REPO, "--base-model", "org/the-target") == 0
    held = hub.repos[REPO]
    card = held["README.md"].decode()
    first, table, *_ = card[card.index("# eagle3 on") :].split("\n\n")[1:]
    assert re.match(r"A draft head \(`eagle3`, [\d,]+ parameters\) for `org/the-target`: tau \d\.\d\d", first)
    assert table.splitlines()[2].startswith("| tau, tokens per target pass | ")
    assert card.count('"method": "eagle3"') == 1
    trained = card[card.index("## Trained on") : card.index("## Measured with")].replace("\\", "")
    for part in ("chats.jsonl (chat)", "org/chats", "lr 0.01", "max_steps 9", "12,345 tokens", "depth 7"):
        assert part in trained, part
    commands = card[card.index("## Served by") :].split("```")[1:4:2]
    settings = json.loads(shlex.split(commands[0], comments=True)[-1])
    assert commands[0].startswith("\nvllm serve org/the-target ")
    assert settings == {"method": "eagle3", "model": REPO, "num_speculative_tokens": 2}
    assert "\n# where a request names no sampling" in commands[0] and "--generation-config vllm" in commands[0]
    words = shlex.split(commands[1], comments=True)
    assert words[words.index("--speculative-draft-model-path") + 1] == REPO and "EAGLE3" in words
    (again,) = re.findall(r"\n(python eval/bench.py .*)\n", card)
    options = to_settings(parse_arguments(shlex.split(again)[2:]))
    assert f"eval/bench.py {REPO} --target org/the-target " in again and "prompts are not published: `prompts" in card
    assert (options.prompts, options.trees, options.max_new_tokens) == ("prompts.jsonl", ("chain:2",), 8)
    assert '{"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}' in card  # for speculators' converter

    matter = front_matter(held["README.md"])
    assert (matter["base_model"], matter["license"], matter["license_name"]) == ("org/the-target", "other", "llama3.1")
    assert yaml.safe_load(held["recipe.yaml"])["target"]["path"] == "org/the-target"
    results = json.loads(held["results.json"])
    assert (results["target"]["name"], results["head"]["path"], results["samples"]) == ("org/the-target", REPO, [])
    (hub.cache / "results.json").write_bytes(held["results.json"])
    assert read_results(hub.cache / "results.json").headline == read_results(run / "results.json").headline
    before, record = read_config(run / "head"), json.loads(held["config.json"])["draftsmith"]
    assert record["target"]["name"] == "org/the-target"
    assert record["provenance"]["target"]["path"] == Path(before["target"]["name"]).name
    assert [source["path"] for source in record["provenance"]["data"]["sources"]] == ["chats.jsonl", "org/chats"]
    for secret in (os.path.expanduser("~") + "/", str(run.parent), before["target"]["name"], "mine.yaml", TOKEN):
        assert not any(secret.encode() in data for data in held.values()), secret


def test_modules_go_out_with_their_targets_own_config_and_where_its_code_is(tmp_path: Path) -> None:
    write_native(tmp_path / "target", "mimo")
    change_config(tmp_path / "target", auto_map={"AutoConfig": "configuration_mimo.MiMoConfig"})
    target = load_target(str(tmp_path / "target"))
    save_head(make_drafter("mtp", target, native=True), tmp_path / "run/head", target=target_record(target))
    beside = json.loads((tmp_path / "run/head/config.json").read_text())["auto_map"]
    assert beside == {"AutoConfig": f"{tmp_path}/target--configuration_mimo.MiMoConfig"}  # not in the head's folder
    publication = collect(tmp_path / "run", REPO, base_model="org/mimo", unmeasured=True)
    data = publication.files["config.json"]
    assert isinstance(data, bytes)
    config = json.loads(data)
    assert config["architectures"] == ["MiMoForCausalLM"]
    assert config["auto_map"] == {"AutoConfig": "org/mimo--configuration_mimo.MiMoConfig"}
    assert "modules of MiMo's family were run in vLLM" in publication.card
    assert publication.card.count("org/mimo --trust-remote-code") == 1


def test_what_an_engine_would_misread_goes_out_at_request(run: Path, hub: StandInHub, refused: Refused) -> None:
    change_config(run / "head", rope_scaling={"rope_type": "yarn", "attention_factor": 1.5})
    error = refused(run, REPO)
    assert "rope_scaling.attention_factor" in error and "--unserved" in error
    assert call(run, REPO, "--unserved") == 0
    assert b"rope_scaling.attention_factor" in hub.repos[REPO]["README.md"]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"norm_output": True}, "--gguf: llama.cpp b11549 would misread it: config.json: norm_output: is not read"),
        ({"fc_norm": True}, "--gguf: llama.cpp b11549 refuses heads with fc_norm; leave --gguf out"),
        ({}, "llama.cpp b11549 is not installed here; run scripts/make_engine.sh llama.cpp"),
    ],
)
def test_a_gguf_file_is_made_only_of_a_head_that_llama_cpp_serves(
    settings: dict[str, Any], fault: str, tiny_target_dir: Path, tmp_path: Path, refused: Refused, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_LLAMACPP_PYTHON", str(tmp_path / "none"))
    target = load_target(str(tiny_target_dir))
    save_head(make_drafter("eagle3", target, **settings), tmp_path / "run/head", target=target_record(target))
    assert fault in refused(tmp_path / "run", REPO, "--unmeasured", "--gguf")


def test_a_dry_run_lists_files_and_card_and_needs_no_hub(run: Path, capsys: Capture) -> None:
    (run / "plots/acceptance.png").unlink()
    assert call(run, REPO, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert f"{(run / 'head/model.safetensors').stat().st_size:,} bytes  model.safetensors" in shown
    assert "optimizer" not in shown and "notes.txt" not in shown and "acceptance.png" not in shown
    assert "| chain:2, greedy |" in shown and "2 of 2 prompts" in shown
    assert "\nlicense: none, as a dry run does not look up the target's;" in shown and "No licence is stated" in shown


def test_a_later_measurement_is_published_by_its_name_alone(run: Path, refused: Refused, capsys: Capture) -> None:
    later = run / "bench/later"
    later.mkdir(parents=True)
    results = json.loads((run / "results.json").read_text()) | {"measured_at": "2126-01-01T00:00:00.000+00:00"}
    (later / "results.json").write_text(json.dumps(results))
    for words, figures in (((), run), (("--results", later), later)):
        assert call(run, REPO, "--dry-run", *words) == 0
        shown = capsys.readouterr().out
        assert f"\nfigures: {figures}\n" in shown and (f"not published: {later}; --results" in shown) == (not words)
        assert report.find_results(figures)[0] == figures
    (run / "results.json").unlink()
    assert f"--results {later} names the newest" in refused(run, REPO)


def test_a_head_without_results_is_published_as_unmeasured(run: Path, hub: StandInHub, refused: Refused) -> None:
    (run / "results.json").unlink()
    assert "never measured" in refused(run, REPO)
    assert call(run / "head", REPO, "--unmeasured", "--private") == 0
    assert b"Not measured." in hub.repos[REPO]["README.md"] and hub.private[REPO]


def fail_audit(results: dict[str, Any]) -> None:
    texts = dict.fromkeys(("suite", "prompt", "tree", "plain_text", "text"), "x")
    numbers = dict.fromkeys(("temperature", "position", "top_two_margin"), 0)
    results["exact"]["divergences"].append({**texts, **numbers})
    for figures in results["measurements"]:
        for part in (figures, *figures["suites"].values()):
            part["speedup"] = None


SPOILED: dict[str, Callable[[dict[str, Any]], None]] = {
    "the audit failed": fail_audit,
    "measured another head": lambda results: results["head"].update(sha256="0"),
    "on another target": lambda results: results["target"].update(fingerprint="0"),
}


def test_what_does_not_vouch_for_the_head_is_refused(run: Path, refused: Refused, monkeypatch: Patch) -> None:
    """And what names no place on the Hub, or a path of this machine."""
    whole = json.loads((run / "results.json").read_text())
    for said, spoil in SPOILED.items():
        results = copy.deepcopy(whole)
        spoil(results)
        (run / "results.json").write_text(json.dumps(results))
        assert said in refused(run, REPO, "--unmeasured")
    (run / "results.json").write_text(json.dumps(whole))
    for name in ("a-head", "ann/a/head", "../head", "https://hub/ann"):
        assert "expected OWNER/NAME" in refused(run, name)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    assert "no token" in refused(run, REPO)
    change_config(run / "head", made_in=os.path.expanduser("~/work"))
    assert "config.json: would name a path" in refused(run, REPO)


FAULTS: dict[str, Exception] = {
    "HF_HUB_OFFLINE is set": OfflineModeIsEnabled("offline"),
    "cannot be reached": NetworkError(f"no route\nwith {TOKEN}"),
    "does not take the token": HfHubHTTPError(f"401 {TOKEN}", response=answer(401)),
    "may not write": HfHubHTTPError(f"403 {TOKEN}", response=answer(403)),
    "the Hub refused": HfHubHTTPError(f"500 {TOKEN}", response=answer(500)),
}


def test_a_fault_of_the_hub_is_one_line_without_the_token(run: Path, hub: StandInHub, refused: Refused) -> None:
    for said, hub.fault in FAULTS.items():
        assert said in refused(run, REPO)


def test_anothers_repository_and_another_model_are_left_alone(run: Path, hub: StandInHub, refused: Refused) -> None:
    hub.repos[REPO] = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"8B"}
    hub.private[REPO] = False
    assert "holds another model" in refused(run, REPO)
    hub.repos[REPO] = {"README.md": b"soon"}
    assert "is public" in refused(run, REPO, "--private")
    assert call(run, REPO) == call(run, REPO, "--revision", "v2") == 0  # a head's own place
