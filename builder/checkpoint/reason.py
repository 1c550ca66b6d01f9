"""A library's error, as part of a one-line message of ours."""


def reason(error: BaseException) -> str:
    """The error's own words on one line; its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
