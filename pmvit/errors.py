"""The one error class of pmvit's own."""


class PmvitError(ValueError):
    """Something that was given does not fit; the message says what was expected, what came and what to do."""
