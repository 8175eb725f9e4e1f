"""The text of a UserError."""

from collections.abc import Callable

import pytest

from heads.core.errors import UserError


def refused(action: Callable[..., object], *arguments: object, **settings: object) -> str:
    """Return the text of the UserError that an action raises. It must be a single line."""
    with pytest.raises(UserError) as caught:
        action(*arguments, **settings)
    text = str(caught.value)
    assert text and "\n" not in text, text
    return text
