"""What all commands share: a user's mistake is one line, never a traceback."""

import contextlib
import os
import signal
import sys
import warnings


def run(name, work):  # -> exit status
    """Call `work()` and return its status; say in one line what a user can mend.

    Warnings are one line each too, without the source that a user did not write. Status 2 is a
    mistake, 130 an interruption; a reader that has gone (`… | head`) is no error.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `train` has it while it loads
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(AttributeError):  # whatever stands in for a terminal
        sys.stdout.reconfigure(errors="backslashreplace")  # a plain locale knows no other letters
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a box in a picture will do
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        try:
            return work() or 0
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (ValueError, OSError) as error:
            print(f"minivit.{name}: error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"minivit.{name}: interrupted", file=sys.stderr)
            return 130
