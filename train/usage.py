"""The keys of recipes as --help prints them. They are read from recipes/README.md, since the schema imports torch."""

import re
import textwrap
from pathlib import Path

from heads.files import read_given

PAGE = Path(__file__).resolve().parents[1] / "recipes/README.md"
RECIPE_PART, TARGET_PART = "keys of a training recipe", "keys of a target recipe"
"""The generated parts of the page, named as in the comments around them."""
HEADING = "| key | type | default | meaning |"
WIDTH = 100


def recipe_keys(kind: str | None = None) -> str:
    """Return the keys of a training recipe as text. `kind`: list only the head settings of that kind."""
    return _as_text(RECIPE_PART, kind)


def target_recipe_keys() -> str:
    """Return the keys of a recipe of scripts/make_target.py as text."""
    return _as_text(TARGET_PART, None)


def find_part(page: str, name: str) -> re.Match[str]:
    """Return the match of one generated part of the page, without the comments around it."""
    found = re.search(f"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", page, flags=re.DOTALL)
    assert found is not None, f"the part {name!r} is not on the page"
    return found


def _as_text(name: str, kind: str | None) -> str:
    part = find_part(read_given(PAGE, "the keys of recipes"), name)
    lines = ["Keys of the recipe. Any of them may be given on the command line, as in train.max_steps=100."]
    for section in re.split(r"^### ", part[0], flags=re.MULTILINE)[1:]:
        title, _, about, _, *rows = section.replace("`", "").splitlines()
        if kind is not None and title.startswith("head") and f"kind {kind}" not in title:
            continue
        lines += ["", *textwrap.wrap(f"{title}: {about}", WIDTH)]
        for row in rows:
            if row.startswith("| ") and row != HEADING:
                key, type_, default, meaning = row[2:-2].split(" | ")
                lines.append(f"  {key} ({type_}; {default if default == 'required' else f'default {default}'})")
                lines += textwrap.wrap(meaning, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
