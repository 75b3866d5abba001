"""The command line: one verb a step, each a few lines over the function of the same name."""

import os

from pmvit.cli import comparison, compression, deployment, inspection, pictures, training
from pmvit.cli.common import app, fail
from pmvit.errors import PmvitError

__all__ = ["app", "comparison", "compression", "deployment", "inspection", "main", "pictures", "training"]


def main() -> None:
    """Run the command line.

    Exit code 0; 1 for what did not fit or failed, 2 for wrong usage, 130 when interrupted, 143 when terminated.
    """
    try:
        app()
    except PmvitError as error:
        fail(str(error), code=128 + getattr(error, "signal_number", -127))
    except Exception as error:
        if os.environ.get("PMVIT_DEBUG"):
            raise
        reason = str(error).strip().splitlines()
        message = f"{type(error).__name__}: {reason[0] if reason else 'no message'}"
        fail(f"{message} (PMVIT_DEBUG=1 shows where)")
