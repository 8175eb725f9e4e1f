"""The one error that users cause and can mend."""


class UserError(ValueError):
    """The message is one clear line: what was expected, what came, what to do. Commands print it and exit with status 2."""
