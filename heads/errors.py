"""UserError, the one error that users cause and can fix."""

import logging
from functools import cache


class UserError(ValueError):
    """An error in one clear line: expected, got, what to do. Commands print it and exit with status 2."""


def shown(value: object) -> str:
    """Return a value for an error's line, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without its trailing period."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


logger = logging.getLogger("draftsmith")


@cache
def warn_once(text: str) -> None:
    """Give a warning, unless the process has given the same one before."""
    logger.warning(text)
