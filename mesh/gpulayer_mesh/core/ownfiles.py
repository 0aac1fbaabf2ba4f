"""Names of the files that we put among a job's own, in the output directory of a rank.

They come home with the others and are not listed. Imports nothing, so that a rank can read them
without the rest.
"""

from __future__ import annotations

FOLDER = ".gpulayer-result"
FUNCTION_RESULT = f"{FOLDER}/value"  # what a submitted function returned
FUNCTION_HOPELESS = f"{FOLDER}/hopeless"  # is there where no other attempt would return either
SERVICE_STATE = f"{FOLDER}/service.json"  # what became of a service's process
RESUME = f"{FOLDER}/resume"  # what the next attempt of a job goes on from; stays there


def is_outcome(path: str) -> bool:
    """Return whether a file of a rank's output directory tells what its attempt came to.

    It is no start for the next one: that would be taken at its word for what this one had done.
    """
    return path.startswith(f"{FOLDER}/") and not path.startswith(f"{RESUME}/")


def checkpoint(call: int) -> str:
    """Return where rank 0 keeps the newest checkpoint of one Trainer call."""
    return f"{RESUME}/{call}.ckpt"
