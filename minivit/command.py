"""What all commands share: their arguments are checked first, and a user's mistake is one line."""

import argparse
import contextlib
import math
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

LONGEST = 1000  # characters of a message, whatever a file has put into it
PICTURES = (".png", ".pdf", ".svg")  # formats in which figures are written
# What XLA, CUDA and the libraries below them say when they get no memory.
OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|out.of.memory|bad_alloc|YNNPACK.*failed", re.I)
MOST = 2**31 - 1  # of any whole number: more steps, images or pixels than anybody has


class Parser(argparse.ArgumentParser):
    """argparse, without the usage of every option before the line that matters."""

    def error(self, message):
        """End with status 2 and that line."""
        message = re.sub(r"^argument (\S+): (?=is )", r"\1 ", message)
        self.exit(
            2, f"minivit.{name_of(self)}: error: {literal(message)}; --help lists all options\n"
        )


def name_of(parser):  # -> "train"
    """How a command calls itself."""
    return parser.prog.removeprefix("python -m minivit.").split()[0]


def whole(least=0, most=MOST):  # -> a type of argparse
    """Whole numbers from `least` to `most`."""
    return within(int, "a whole number", least, most, False, False)


def number(least=-math.inf, most=math.inf, open_left=False, open_right=False):
    # -> a type of argparse
    """Finite numbers from `least` to `most`, without an end that is open."""
    return within(float, "a number", least, most, open_left, open_right)


def within(kind, name, least, most, open_left, open_right):
    """What reads a text as a number, or says which numbers would do."""
    bounds = []
    if least != -math.inf:
        bounds.append(f"{'above' if open_left else 'at least'} {least:,}")
    if most != math.inf:
        bounds.append(f"{'below' if open_right else 'at most'} {most:,}")
    wanted = " and ".join(bounds) if bounds else "finite"

    def read(text):
        try:
            value = kind(text)
        except ValueError:  # also of more digits than Python reads
            raise argparse.ArgumentTypeError(f"is {text[:40]}, not {name}") from None
        inside = least <= value <= most and abs(value) != math.inf
        if not inside or (open_left and value == least) or (open_right and value == most):
            raise argparse.ArgumentTypeError(f"is {text[:40]}; it must be {wanted}")
        return value

    read.limits = kind, least, most, open_left, open_right  # for tests of every option
    return read


def literal(text):  # -> one line
    """A text that may hold anything, such as a file's name, as a terminal can show it."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"


def writable(path, option):  # -> Path
    """Refuse, before the work, a file that could not be written after it."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{option} {path}: there is no folder {path.parent}")
    with writing(path, option):
        if path.exists():
            open(path, "ab").close()
        tempfile.TemporaryFile(dir=path.parent).close()
    return path


def picture(path, option):  # -> Path
    """The same of a picture, whose format is the ending of its name."""
    if Path(path).suffix.lower() not in PICTURES:
        raise ValueError(
            f"{option} {path} must end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
        )
    return writable(path, option)


def folder(path, option):  # -> Path
    """The same of a folder, which may still have to be made."""
    path = Path(path)
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(
            f"{option} {path}: {nearest} is a file; it must be a folder, or a new name"
        )
    with writing(path, option):
        tempfile.TemporaryFile(dir=nearest).close()
    return path


@contextlib.contextmanager
def writing(path, option):
    """Say of what the system refuses which option asked for it."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{option} {path} cannot be written: {error.strerror}") from None


def counted(count, noun, many=None):  # -> "1 picture", "2 pictures"
    """A number of things."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def explain(error):  # exception -> text
    """What an exception says, in one line; the system's errors begin with the file."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return literal(f"{os.fsdecode(error.filename)}: {error.strerror}")
    return literal(" ".join(str(error).split()) or type(error).__name__)


def out_of_memory(error):  # -> bool
    """Python and NumPy have an exception for it, JAX words in the text of a general one."""
    return isinstance(error, MemoryError) or bool(OUT_OF_MEMORY.search(str(error)))


class Patient:
    """A stream whose reader may go (`… | head -1`): what is written then is lost, and no error."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        """Write, or drop it."""
        with self.unbroken():
            self.stream.write(text)
        return len(text)

    def flush(self):
        """Flush, or not."""
        with self.unbroken():
            self.stream.flush()

    @contextlib.contextmanager
    def unbroken(self):
        """From the first failure on, everything goes nowhere."""
        try:
            yield
        except BrokenPipeError:
            silence(self.stream)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def silence(stream):
    """Let a stream write to nowhere, also what it still holds."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def start():
    """Before the first word: letters that the terminal lacks are shown by their numbers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # whatever stands in for a terminal
            stream.reconfigure(errors="backslashreplace")


def main(parser, work, argv=None, **options):  # -> exit status
    """The whole of a command: read its arguments, then do `work(arguments)` as `run` does."""
    start()
    parser = parser()
    args = parser.parse_args(argv)
    return run(name_of(parser), lambda: work(args), **options)


def run(name, work, *, remedy="try smaller images or fewer of them", patient=False):
    # -> exit status
    """Call `work()` and return its status; say in one line what a user can mend.

    Warnings are one line each too, without the source that a user did not write. `remedy` is what
    helps where memory is short, or a function that says it then. Status 2 is a mistake, 130 an
    interruption. A reader that has gone (`… | head`) is no error: the command ends, or if it is
    `patient` goes on in silence.
    """
    start()
    if patient:
        out, error = Patient(sys.stdout), Patient(sys.stderr)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            return run(name, work, remedy=remedy)

    def say(text, status):
        with contextlib.suppress(BrokenPipeError):
            print(text, file=sys.stderr, flush=True)
        return status

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a box in a picture will do
        warnings.showwarning = lambda message, *_: say(f"warning: {literal(message)}", None)
        try:
            status = work() or 0
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            silence(sys.stdout)
            return 0
        except (ValueError, OSError) as error:
            return say(f"minivit.{name}: error: {explain(error)}", 2)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            helps = remedy() if callable(remedy) else remedy
            return say(f"minivit.{name}: error: out of memory; {helps}", 2)
        except KeyboardInterrupt:
            return say(f"minivit.{name}: interrupted", 130)
