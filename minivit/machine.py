"""What the machine offers, and how to leave it."""

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
# Limit, use, and what of the use is a cache that goes when memory is short: cgroups 2, then 1.
MEMORY_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def cores():
    """How many processor cores this process may use, by its affinity and its container's quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    quota = Path("/sys/fs/cgroup/cpu.max")
    try:
        share, period = quota.read_text().split()
        return max(1, min(len(allowed), round(int(share) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return len(allowed)


def numbers(path):  # lines "name: 12 kB" or "name 12" -> {name: 12}
    """What the system says in a file of names and numbers."""
    lines = (line.replace(":", " ").split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def memory():  # -> bytes; infinity where the system does not say
    """How much more memory this process may take: by the machine, its container and its limits."""
    free = [math.inf]
    with contextlib.suppress(OSError, KeyError):
        free.append(numbers("/proc/meminfo")["MemAvailable"] * 1024)
    for folder, limit, used, cache in MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError, KeyError):  # none, or "max": no limit
            limit, used = (int((CGROUPS / folder / name).read_text()) for name in (limit, used))
            free.append(limit - used + numbers(CGROUPS / folder / "memory.stat")[cache])
    with contextlib.suppress(ImportError, OSError, AttributeError):  # not every system has these
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            free.append(limit - pages * resource.getpagesize())
    return max(0, min(free))


class DoesNotFit(MemoryError, ValueError):
    """It is known beforehand that there is not enough memory; the text names the sizes."""


def check_memory(needed, what, remedy="choose a smaller size or fewer"):
    """Refuse what cannot fit before it is begun: a system that runs out of memory kills.

    `needed` is in bytes; `what` is a plural or has an article.
    """
    if needed > (free := memory()):
        # No more digits than anybody reads, whatever the number.
        sizes = [f"{min(n, 10**30) / 1e9:,.1f} GB" for n in (needed, free)]
        raise DoesNotFit(
            f"{what} would take at least {sizes[0]} of memory, and {sizes[1]} are free; {remedy}"
        )


ANSWERED = threading.Semaphore(0)  # how many more Ctrl-C the program itself answers


def end_at_interrupt(text):
    """From now on Ctrl-C ends the process at once, with a last word and status 130.

    For commands, before their libraries load. It raises no exception, which a callback would
    swallow, and skips Python's shutdown, where JAX crashes while a program is being compiled. A
    thread listens, since the main one may be inside a library for half a minute. As many Ctrl-C as
    `ANSWERED` counts are left to the handler that the program has set.
    """
    reader, writer = os.pipe()
    with contextlib.suppress(AttributeError):  # Windows does without
        os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch():
        while True:
            (number,) = os.read(reader, 1)
            if number == signal.SIGINT and not ANSWERED.acquire(blocking=False):
                end_now(130, text)

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGINT, lambda *_: None)  # the thread has heard it


def end_now(status, text=""):
    """End at once, without Python's shutdown; what was printed is flushed."""
    if text:
        line = "\n" if os.isatty(2) else ""  # below what the terminal shows of the keys
        with contextlib.suppress(OSError):  # not through a stream, which another thread may hold
            os.write(2, f"{line}{text}\n".encode())

    def flush():
        with contextlib.suppress(OSError):  # the reader has gone
            sys.stdout.flush()

    # A reader that does not read would make this wait for ever.
    flushing = threading.Thread(target=flush, daemon=True)
    with contextlib.suppress(RuntimeError):  # no memory for a thread
        flushing.start()
        flushing.join(1)
    os._exit(status)


def leave(status):
    """End a command: at once, unless all is well.

    After an interruption the next Ctrl-C may be on its way. Where one of JAX's devices ran out of
    memory the others wait for it, and XLA aborts with a page of its own.
    """
    if status:
        end_now(status)
    sys.exit(status)


def keep_memory():
    """Let the process keep the memory that it frees, where the C library is glibc.

    A training step frees and takes the same large arrays again and again; by default each returns
    to the system and comes back page by page, emptied. The process never gives memory back then,
    so this is for commands, not for a library that somebody imports.
    """
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version()  # only glibc has it
    except (AttributeError, OSError, TypeError):
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # names of glibc's mallopt(3)
    library.mallopt(mmap_max, 0)
    library.mallopt(trim_threshold, 2**31 - 1)
    library.mallopt(top_pad, 2**26)
