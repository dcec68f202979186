"""What the machine offers."""

import contextlib
import ctypes
import os
from pathlib import Path


def cores():
    """How many processor cores this process may use, by its affinity and its container's quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    quota = Path("/sys/fs/cgroup/cpu.max")
    try:
        share, period = quota.read_text().split()
        return max(1, min(len(allowed), round(int(share) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return len(allowed)


def memory():  # -> bytes
    """What this process may use, by the machine, its container and its own limit."""
    limits = [2**63]
    with contextlib.suppress(AttributeError, OSError, ValueError):  # Windows does not say
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    with contextlib.suppress(ImportError):
        import resource

        limits.append(resource.getrlimit(resource.RLIMIT_AS)[0])
    return min(limit for limit in limits if limit > 0)


def check_memory(needed, what):
    """Refuse before any work what cannot succeed; `what` is a plural or has an article."""
    if needed > (there := memory()):
        # No more digits than anybody reads, whatever the number.
        sizes = [f"{min(n, 10**30) / 2**30:,.1f} GiB" for n in (needed, there)]
        raise ValueError(
            f"{what} would take {sizes[0]} of memory, the machine has {sizes[1]}; "
            "choose a smaller size or fewer"
        )


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
