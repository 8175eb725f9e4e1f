"""What a user is told of a slower way that was taken for them: once, however many engines are made."""

import logging
from functools import cache

logger = logging.getLogger("draftsmith")


@cache
def say_once(text: str) -> None:
    """A warning, unless the process has given the very same one."""
    logger.warning(text)
