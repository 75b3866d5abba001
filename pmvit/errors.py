"""What pmvit raises and warns of itself."""


class PmvitError(ValueError):
    """Something that was given does not fit; the message says what was expected, what came and what to do."""


class PmvitWarning(UserWarning):
    """Something that goes on, but perhaps not as it was meant."""
