"""What the machine offers."""

import ctypes
import math
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
    """How much memory this process may use, by the machine and its container's limit."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows
        return math.inf
    try:
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or "max": no limit
        return whole


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
