"""The two ways a command can end badly, and the line a person reads when it does."""

import sys
import traceback
from collections.abc import Callable


class PopError(Exception):
    """Something a user or a file caused: one line that names the thing, its value, what was expected and the fix."""

    exit_code = 1


class UsageError(PopError):
    """The command or the call was wrong (exit code 2)."""

    exit_code = 2


class EngineError(PopError):
    """The work could not be done: a damaged file, a full disk, a model that cannot be exported (exit code 1)."""


def exit_with_message(program: str, run: Callable[[], int], *, verbose: bool = False) -> int:
    """Run a command and turn what a user can cause into one line on stderr and an exit code.

    A traceback comes before that line only where the user asked for it (`verbose`).
    """
    try:
        return run()
    except PopError as error:
        if verbose:
            traceback.print_exc()
        message, code = str(error), error.exit_code
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    except BrokenPipeError:
        # The reader has gone (`pop-run … | head`): nobody is left to be told.
        sys.stderr.close()
        return 0
    except OSError as error:
        message, code = describe_os_error(error), 1
    except MemoryError:
        message, code = "out of memory: lower --max-seq-len or --max-batch-size, or use a machine with more", 1
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def describe_os_error(error: OSError) -> str:
    """One line for an operating system error, with the path and what to do about the common ones."""
    where = f"{error.filename}: " if error.filename else ""
    hints = {
        28: "free some space or choose another folder",
        13: "choose a folder you may write to, or change its permissions",
        17: "it is in the way; choose another folder",
        20: "a file is in the way; choose another folder",
        30: "the file system is read-only; choose another folder",
    }
    hint = hints.get(error.errno or 0)
    return f"{where}{error.strerror or error}" + (f"; {hint}" if hint else "")
