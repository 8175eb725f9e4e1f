"""The text of a refusal."""

from collections.abc import Callable

import pytest

from heads.errors import UserError


def refused(action: Callable[..., object], *arguments: object) -> str:
    """The one line of the UserError that an action raises."""
    with pytest.raises(UserError) as caught:
        action(*arguments)
    text = str(caught.value)
    assert text and "\n" not in text, text
    return text
