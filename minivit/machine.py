"""What the machine offers."""

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
