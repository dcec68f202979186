"""What JAX runs on: all cores, and several processes as one program.

Each process runs the same command. JAX joins their devices to one mesh; each makes its share of
every batch; process 0 alone writes files and speaks.
"""

import contextlib
import os
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from .machine import cores

NUMBER, FLAG = "JAX_NUM_CPU_DEVICES", "--xla_force_host_platform_device_count"
MOST = 4096  # CPU devices that somebody may want to pretend
UNASKED = {"devices": False}  # whether we chose their number, and no user did
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


@dataclass(frozen=True)
class Processes:
    """This process among `count`."""

    index: int = 0
    count: int = 1

    @property
    def leads(self):
        """Whether this process writes files and speaks."""
        return self.index == 0

    def share(self, size):  # -> slice
        """This process's part of so many rows, which must divide over all."""
        each = size // self.count
        return slice(self.index * each, (self.index + 1) * each)

    def any(self, flag):  # -> bool, the same in all
        """Whether it is true in any of them; all must ask."""
        return any(self.gathered(flag))

    def gathered(self, value):  # -> list
        """The number that each of them has; all must ask."""
        if self.count == 1:
            return [value]
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(np.array(value)).tolist()

    @contextlib.contextmanager
    def together(self):
        """What any of them cannot do, none goes on from: else the others would wait for ever."""
        try:
            yield
        except Apart:
            raise
        except Exception:
            self.any(True)
            raise
        self.check()

    @contextlib.contextmanager
    def leader_first(self):
        """Process 0 does what it may have to mend; then the others do the same."""
        if not self.leads:
            self.check()
        yield
        if self.leads:
            self.check()

    def check(self):
        """Wait for the others, and stop if one of them had to."""
        if self.any(False):
            raise Apart("another process could not start; its message says why")

    def same(self, what, number):
        """Stop where the processes have different numbers."""
        numbers = self.gathered(number)
        if len(set(numbers)) > 1:
            raise Apart(f"the processes have different {what}: {numbers}")

    def leave(self, status):
        """End at once where others take part: JAX's own end would wait for them for minutes."""
        if self.count > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            if self.leads:  # the others talk through this one, and have a word to say too
                time.sleep(2)
            os._exit(status)


class Apart(ValueError):
    """All processes know already that they cannot go on together."""


ALONE = Processes()


def chosen_devices():  # -> {where: text}
    """How many CPU devices the environment asks for; XLA would die of nonsense."""
    flags = re.findall(rf"{FLAG}(?:=(\S*))?", os.environ.get("XLA_FLAGS", ""))
    chosen = {f"XLA_FLAGS={FLAG}": text for text in flags}
    if os.environ.get(NUMBER, "-1") != "-1":  # JAX's own word for none
        chosen[NUMBER] = os.environ[NUMBER]
    for where, text in chosen.items():
        if not text.isdecimal() or not 1 <= int(text[:9]) <= MOST:
            raise ValueError(f"{where} is {text!r}; unset it, or give a number from 1 to {MOST}")
    return chosen


def use_all_cores():
    """Let JAX see every CPU core as a device of its own.

    One program a core on its share of the batch scales better than several threads inside each
    operation. It works before JAX's first use only; later the devices stay as they are. A number
    that somebody chose in one of JAX's ways (two variables, its configuration) is respected.
    """
    chosen = chosen_devices()
    import jax

    if not chosen and jax.config.jax_num_cpu_devices == -1:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", cores())
            UNASKED["devices"] = True


@contextlib.contextmanager
def usable_jax():
    """Say in one line why JAX cannot be used, and what does without it."""
    try:
        yield
    except Exception as error:  # a broken installation raises anything, an absent GPU an assertion
        reason = re.sub(r" \(set JAX_PLATFORMS.*", "", " ".join(str(error).split()))
        reason, where = reason or type(error).__name__, "JAX cannot be used"
        if chosen := os.environ.get("JAX_PLATFORMS"):
            where += f" with JAX_PLATFORMS={chosen}"
        raise OSError(
            f"{where}: {reason}; {'unset that, or choose' if chosen else 'choose'} "
            "--backend numpy, which does without JAX"
        ) from None


def jax_devices():  # -> list
    """JAX's devices, where it has any; OSError says why not."""
    chosen_devices()
    with usable_jax():
        use_all_cores()
        import jax

        return jax.devices()


def join():  # -> Processes
    """Meet the other processes, before JAX is used for anything else.

    Three variables say where and who; Slurm, Open MPI and TPU pods say it themselves, Kubernetes
    with `jax[k8s]`. What is not set is left to JAX to find out.
    """
    chosen_devices()
    with usable_jax():
        use_all_cores()
        import jax
    given = {"num_processes": os.environ.get(COUNT), "process_id": os.environ.get(INDEX)}
    try:
        numbers = {name: int(value) for name, value in given.items() if value is not None}
        jax.distributed.initialize(os.environ.get(ADDRESS), **numbers)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--distributed cannot start: {str(error).rstrip('.')}; start it under Slurm, Open MPI "
            f"or on a TPU pod, or set {ADDRESS} (host:port of process 0), {COUNT} and {INDEX} in "
            "each process"
        ) from None
    except RuntimeError as error:
        raise OSError(f"--distributed: the processes did not meet: {error}") from None
    each = Counter(device.process_index for device in jax_devices())
    if len(set(each.values())) > 1:
        raise ValueError(f"--distributed: the processes have {[*each.values()]} devices, not alike")
    return Processes(jax.process_index(), jax.process_count())
