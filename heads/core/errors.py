"""UserError, the one error that users cause and can fix."""

import logging
from functools import cache


class UserError(ValueError):
    """An error that the user can fix, in one line: expected, got, what to do. Commands print it and exit with status
    2."""


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def expect(holds: bool, name: str, what: object, got: object) -> None:
    """Raise UserError unless `holds`. The message names the setting and has the expected (`what`) and the given
    value."""
    if not holds:
        raise UserError(f"{name}: expected {what}, got {got!r}")


logger = logging.getLogger("draftsmith")


@cache
def warn_once(text: str) -> None:
    logger.warning(text)
