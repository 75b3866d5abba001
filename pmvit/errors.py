"""What pmvit raises and warns of itself, and errors of others in one line."""


class PmvitError(ValueError):
    """Something that was given does not fit; the message says what was expected, what came and what to do."""


class PmvitWarning(UserWarning):
    """Something that goes on, but perhaps not as it was meant."""


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line; its name if it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
