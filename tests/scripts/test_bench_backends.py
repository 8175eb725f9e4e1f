"""Every piece of a round is timed in both forms, with heads that are new."""

import pytest

from heads.backends.cpu import library
from scripts.bench_backends import DRAFTS, main
from tests.test_readme import ROOT


@pytest.mark.slow
@pytest.mark.skipif(library.load() is None, reason="no C compiler")
def test_each_draft_is_timed_on_both_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT / "recipes/quickstart/target"), "--repeats", "1", "--calls", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    for kind, tree, temperature in DRAFTS:
        assert any(line.startswith(f"{kind} {tree} T={temperature} round".lstrip()) for line in lines)
