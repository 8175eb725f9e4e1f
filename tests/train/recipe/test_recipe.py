"""Recipes: every fault at once, each with its file or override, key and remedy."""

from pathlib import Path
from typing import Any

import pytest

from eval.bench import parse_arguments as bench_arguments
from eval.records.measure_settings import BenchSettings
from heads.core.errors import UserError
from train.data.corpus import cache_root
from train.recipe.recipe import Recipe, Train, dump_recipe, load_recipe, plain_settings, with_steps

GOOD = """\
output_dir: runs/x
target: {path: some/target}
head: {kind: eagle3, depth: 3, aux_layer_ids: [1, 2, 3]}
data:
  sources:
    - {kind: python, limit: 10}
train:
  max_steps: 10
  lr: 1e-4
eval: {prompts: python-heldout}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    (tmp_path / "r.yaml").write_text(text)
    return load_recipe(tmp_path / "r.yaml", overrides)


def faults(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def test_paths_are_read_as_a_shell_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every place of a recipe, and of a command line; what is there under the name as it stands is that."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DRAFTSMITH_DATA_CACHE", "~/c")
    source = "{kind: chat, path: ~/d.jsonl, chat_template: $HOME/t.jinja, held_out: ~/h.jsonl}"
    named = ["output_dir=~/o", "target.path=~/T", "target.adapter=$HOME/A", "head.init_from=~/i", "eval.prompts=~/p,q"]
    named += ["features={kind: cache, folder: '${HOME}/F'}", f"data.sources=[{source}]"]
    recipe = load(tmp_path, GOOD, *named)
    found = [recipe.output_dir, recipe.target.path, recipe.target.adapter, recipe.head.init_from, recipe.eval.prompts]
    found += [recipe.features.model_dump()["folder"], *recipe.data.sources[0].model_dump().values(), str(cache_root())]
    assert sum(isinstance(value, str) and value.startswith(f"{tmp_path}/") for value in found) == 10
    assert "~" not in str(found) and "$" not in str(found)
    options = bench_arguments(["~/head", "--target", "$HOME/T", "--prompts", "~/p", "--out", "~/r"])
    assert {*options.heads, options.target, options.prompts, str(options.out)} == {
        f"{tmp_path}/{name}" for name in ("head", "T", "p", "r")
    }
    (fault,) = faults(tmp_path, GOOD, "output_dir=$NOWHERE/o")
    assert "output_dir: $NOWHERE/o: no variable $NOWHERE here; write the whole path" in fault
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~/x").mkdir(parents=True)
    assert load(tmp_path, GOOD, "output_dir=~/x").output_dir == "~/x"


def test_only_the_report_looks_for_drafts(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD, "eval.report.tree=[auto, 'chain:2']")
    assert recipe.eval.report.tree == ("auto", "chain:2")
    assert load(tmp_path, GOOD, "eval.report.tree=auto").eval.final().trees == ("auto",), "of one value, too"


def test_all_faults_are_given_at_once_with_file_key_and_suggestion(tmp_path: Path) -> None:
    text = GOOD.replace("lr: 1e-4", "lr: fast\n  batch_sise: 2").replace("limit: 10", "limt: 10")
    text = text.replace("depth: 3", "dept: 3").replace("max_steps: 10", "max_steps: 1.5\n  schedule: cosin")
    assert faults(tmp_path, text) == [
        "r.yaml: head.dept: unknown key; did you mean 'depth'?",
        "r.yaml: data.sources.0.limt: unknown key; did you mean 'limit'?",
        "r.yaml: train.max_steps: expected a number of steps, or at most '1000 epochs', got 1.5",
        "r.yaml: train.lr: should be a valid number, got 'fast'",
        "r.yaml: train.schedule: got 'cosin'; did you mean 'cosine'?",
        "r.yaml: train.batch_sise: unknown key; did you mean 'batch_size'?",
    ]


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        ("train.max_stps=3", "train.max_stps: unknown key; did you mean 'max_steps'?"),
        ("train.lr='1e-4'", "train.lr: should be a valid number, got '1e-4'"),
        ("train.decay_fraction=0.1", "train.decay_fraction: has no effect with"),
        ("train.max_steps=null", "train.max_steps: is missing; give it a value"),
        ("train.max_steps=0 epochs", "train.max_steps: expected a number of steps, or at most '1000 epochs'"),
        ("train.epochs=2", "train.epochs: is no key any more; give train.max_steps, such as '8 epochs'"),
        ("train.grad_accum=2", "train.grad_accum: is no key any more; give train.tokens_per_step"),
        ("eval.report.trees=[chain:1]", "eval.report.trees: is no key any more; give eval.report.tree"),
        ("eval.report.batch_size=[]", "eval.report.batch_size: expected a value, or a list of several"),
        ("head={depth: 3}", "head.kind: is missing; one of eagle3"),
        ("data.template.a=[1]", "data.template.a: should be a valid boolean or a valid integer or a valid number or"),
        ("head.kind=null", "head.kind: got None; known: eagle3"),
        ("head.tree_nodes=3", "head.tree_nodes: has no effect here: it belongs to kind medusa"),
        ("data.sources.4.limit=1", "there is no such entry"),
        ("data.sources.0.weight=2", "data.sources.0.weight: has no effect with one"),
        ("tracking.project=x", "tracking.project: has no effect without tracking.wandb"),
        ("eval.top_p=0.9", "eval.top_p: has no effect at eval.temperature 0"),
        ("eval.rule=ratio", "eval.rule: has no effect at eval.temperature 0"),
        (["eval.report.sampling=model", "eval.top_k=3"], "eval.top_k: has no effect at eval.temperature 0"),
        (["eval.report.sampling=model", "eval.report.temperature=[1]"], "no effect with eval.report.sampling"),
        (["eval.rule=typical", "eval.temperature=1"], "eval.rule: got 'typical'; known: match, ratio, block"),
        ("eval.tree=chain:0", "eval.tree: tree 'chain:0': a chain has at least 1 draft token"),
        ("eval.tree=auto", "eval.tree: the same tree is measured every time, got 'auto'"),
    ],
)
def test_overrides_go_through_the_same_checks(overrides: str | list[str], fault: str, tmp_path: Path) -> None:
    (line,) = faults(tmp_path, GOOD, *([overrides] if isinstance(overrides, str) else overrides))
    assert line.startswith("override '") and fault in line, line


def test_a_split_has_no_effect_on_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    file, hub = (
        GOOD.replace("{kind: python, limit: 10}", f"{{kind: text, path: {path}, subset: all, split: test}}")
        for path in (tmp_path / "a.jsonl", "some/set")
    )
    said = "\n".join(faults(tmp_path, file))
    assert all(f"data.sources.0.{key}: has no effect on files" in said for key in ("subset", "split"))
    assert "subset: all\n    split: test" in dump_recipe(plain_settings(load(tmp_path, hub)))


SECOND = "10, weight: 1.0}\n    - {kind: text, path: a.jsonl}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: 1\na: 2\n", "found duplicate key a"),
        ("a: [1\nb: 2\n", "line 2, column 2"),
        ("- 1\n", "expected settings, each as `name: value`, got a list"),
        (GOOD.replace("10}", SECOND), "data.sources.1.weight: is missing: give every source a weight, or none"),
    ],
)
def test_files_that_are_no_recipe(text: str, fault: str, tmp_path: Path) -> None:
    (line,) = faults(tmp_path, text)
    assert line.startswith("r.yaml: ") and fault in line, line


def test_a_recipe_extends_another(tmp_path: Path) -> None:
    """Mappings are merged, lists are replaced, and a fault names the file that has the key."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base/target.yaml").write_text(
        GOOD.replace("output_dir: runs/x\n", "extends: ../all.yaml\n").replace("depth: 3", "depth: 2")
    )
    (tmp_path / "all.yaml").write_text("train: {lr: 1, seed: 4}\neval: {report: {tree: [chain:2, chain:1]}}\n")
    text = "extends: base/target.yaml\noutput_dir: runs/x\neval: {report: {tree: [chain:3]}}\nhead: {depth: 3}\n"
    recipe = load(tmp_path, text, "train.lr=2e-4")
    assert recipe.head.model_dump(exclude_unset=True) == {"kind": "eagle3", "depth": 3, "aux_layer_ids": (1, 2, 3)}
    assert (recipe.train.lr, recipe.train.seed, recipe.eval.report.tree) == (2e-4, 4, ("chain:3",))
    assert load(tmp_path, dump_recipe(plain_settings(recipe))) == recipe
    (tmp_path / "all.yaml").write_text("train: {sead: 4}\n")
    assert faults(tmp_path, text) == ["all.yaml: train.sead: unknown key; did you mean 'seed'?"]
    (tmp_path / "all.yaml").write_text("extends: base/target.yaml\n")
    assert faults(tmp_path, text) == ["all.yaml: extends: base/target.yaml: extends this file itself"]
    (tmp_path / "all.yaml").unlink()
    assert faults(tmp_path, text) == ["base/target.yaml: extends: all.yaml: no such file"]


def test_an_interpolation_is_text(tmp_path: Path) -> None:
    text = GOOD.replace("runs/x", "'runs/${oc.env:HOME}'").replace("lr: 1e-4", "lr: 1e-4\ntracking: {wandb: offline}")
    recipe = load(tmp_path, text, "tracking.name=${output_dir}")
    assert (recipe.output_dir, recipe.tracking.name) == ("runs/${oc.env:HOME}", "${output_dir}")


def test_off_is_what_yaml_reads_as_false(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD + "\ntracking: {wandb: off}\n").tracking.wandb == "off"
    assert load(tmp_path, GOOD, "tracking.wandb=off").tracking.wandb == "off"


def test_the_final_measurement_has_the_settings_of_the_report_or_else_those_of_eval(tmp_path: Path) -> None:
    words = "eval.temperature=0.5", "eval.top_k=3", "eval.presence_penalty=1", "eval.report.tree=[auto]"
    assert load(tmp_path, GOOD, *words).eval.final() == BenchSettings(
        num_prompts=32, max_prompt_tokens=256, trees=("auto",), temperatures=(0.5,), top_k=3, presence_penalty=1, seed=1
    )
    assert load(tmp_path, GOOD, "eval.report.sampling=model", "eval.rule=ratio").eval.final().sampling == "model"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"a": False, "b": 2}),
        (["data.template.b=3"], {"a": False, "b": 3}),
        (["data.template={b: 3}"], {"b": 3}),
        (["data.template=null"], {}),
        (["data.template.a=null"], {"b": 2}),
    ],
)
def test_an_override_replaces_what_was_there(overrides: list[str], expected: dict[str, Any], tmp_path: Path) -> None:
    """Only the parts of its dotted key are merged, and null is the default."""
    chat = "{kind: chat, path: x}\n  template: {a: false, b: 2}"
    text = GOOD.replace("{kind: python, limit: 10}", chat)
    assert load(tmp_path, text, *overrides).data.template == expected


def test_null_in_an_override_is_none_where_that_is_a_value(tmp_path: Path) -> None:
    text = GOOD.replace("lr: 1e-4", "lr: 1e-4\n  tokens_per_step: 5\n  seed: 3")
    train = load(tmp_path, text, "train.tokens_per_step=null", "train.seed=null", "train.lr=null").train
    assert (train.tokens_per_step, train.seed, train.lr) == (None, 0, 1e-4)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_steps": 1000, "warmup_steps": 40}, [63, 99, 157, 250, 397, 630, 1000]),
        ({"max_steps": 160, "warmup_steps": 30}, [40, 63, 101, 160]),
        ({"max_steps": 6400, "eval_points": 4}, [1600, 2540, 4032, 6400]),
        ({"max_steps": 12}, [12]),
    ],
)
def test_tau_is_measured_at_points_spaced_evenly_in_the_logarithm_of_the_steps(
    settings: dict[str, int], expected: list[int]
) -> None:
    assert sorted(Train.model_validate(settings).measured_steps) == expected


def test_a_warm_up_takes_at_most_a_fifth_of_the_run(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD.replace("max_steps: 10", "max_steps: 0.5 epochs\n  warmup_steps: 600"))
    assert recipe.train.epochs == 0.5
    for steps, warmup in ((133, 26), (3_000, 600), (40_000, 600), (1, 0)):
        train = with_steps(recipe, steps).train
        assert (train.steps, train.epochs, train.warmup_steps) == (steps, None, warmup)
