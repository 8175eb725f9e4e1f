"""The one error that users cause and can mend."""

import logging
from functools import cache


class UserError(ValueError):
    """One clear line: what was expected, what came, what to do. Commands print it and exit with status 2."""


def shown(value: object) -> str:
    """A value in an error's line, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without its trailing stop."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


logger = logging.getLogger("draftsmith")


@cache
def warn_once(text: str) -> None:
    """A warning, unless the process has given the very same one."""
    logger.warning(text)
