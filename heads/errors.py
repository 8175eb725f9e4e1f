"""The one error that users cause and can mend."""


class UserError(ValueError):
    """One clear line: what was expected, what came, what to do. Commands print it and exit with status 2."""
