"""What the machine offers: memory by the system, the container and the limit; and how to end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minivit import machine

GIGABYTE = 2**30


@pytest.mark.parametrize(
    ("files", "free"),
    [
        # 8 of 10 GB are used, of which 3 are a cache.
        ({"memory.max": 10, "memory.current": 8, "memory.stat": "anon 5\ninactive_file {3}"}, 5),
        ({"memory.max": "max", "memory.current": 8, "memory.stat": "inactive_file {3}"}, None),
        (
            {
                "memory/memory.limit_in_bytes": 10,
                "memory/memory.usage_in_bytes": 8,
                "memory/memory.stat": "inactive_file {1}\ntotal_inactive_file {3}",
            },
            5,
        ),
        ({"memory/memory.limit_in_bytes": 2**33, "memory/memory.usage_in_bytes": 8}, None),
        ({}, None),
    ],
    ids=["two", "two without a limit", "one", "one without a limit", "none"],
)
def test_memory_of_a_container(files, free, tmp_path, monkeypatch):
    """Its limit, less what is used, the cache not counted; in both versions of control groups."""
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    whole = machine.memory()
    for name, value in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(value, int):
            value = value * GIGABYTE
        elif "{" in value:
            value = value.replace("{1}", str(GIGABYTE)).replace("{3}", str(3 * GIGABYTE))
        path.write_text(f"{value}\n")
    # What others take and give back meanwhile is less than a gigabyte.
    expected = whole if free is None else min(whole, free * GIGABYTE)
    assert machine.memory() == pytest.approx(expected, abs=GIGABYTE)


def test_memory_under_a_limit():
    """`ulimit -v` counts, less what the process has already."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
    code += "from minivit import machine; print(machine.memory())"
    free = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert 2**29 < free < 2**30


def test_what_cannot_fit_is_refused(monkeypatch):
    """With what was asked for, what there is, and what to do."""
    monkeypatch.setattr(machine, "memory", lambda: 2e9)
    machine.check_memory(2e9, "a batch", "take less")
    with pytest.raises(MemoryError, match=r"a batch would take at least 3\.0 GB of memory, and 2"):
        machine.check_memory(3e9, "a batch", "take less")


WATCHED = "from minivit.machine import end_at_interrupt, leave; end_at_interrupt('interrupted')\n"
READY = "print('now', flush=True)\n"
SCRIPTS = {
    "load": WATCHED + READY + "import jax, matplotlib.pyplot",
    # As JAX's: what is raised there is lost, but for a line that says so.
    "callback": WATCHED
    + "import gc, time; gc.callbacks.append(lambda *_: time.sleep(20))\n"
    + READY
    + "gc.collect()",
    # As JAX's: another Ctrl-C would meet it.
    "end": WATCHED
    + "import atexit, time; atexit.register(time.sleep, 20)\n"
    + READY
    + "time.sleep(0.05); leave(130)",
}
TRAIN = ["-m", "minivit.train", "--tiny", "--output"]


def interrupt_twice(command, marker, wait, delay):  # -> exit status, all that was said
    """Two Ctrl-C so many seconds apart, the first `wait` after a line with the marker."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    variables = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    with subprocess.Popen([sys.executable, *command], env=os.environ | variables, **pipes) as p:
        said = ""
        while marker not in said:
            line = p.stdout.readline()
            assert line, said
            said += line
        time.sleep(wait)
        p.send_signal(signal.SIGINT)
        time.sleep(delay)
        p.send_signal(signal.SIGINT)
        said += p.communicate(timeout=120)[0]
    return p.returncode, said


@pytest.mark.parametrize(
    ("what", "wait", "delay"),
    [
        ("load", 0.1, 0.03),
        ("callback", 0.1, 0.03),
        ("end", 0.0, 0.1),
        ("compile", 0.0, 0.1),
        ("compile", 1.5, 0.2),
        ("train", 0.3, 0.2),
    ],
)
def test_two_interruptions(what, wait, delay, tmp_path):
    """Whatever is going on: status 130, no traceback, no exception ignored, no signal."""
    marker = {"compile": "parameters, on", "train": "first step"}.get(what, "now")
    command = ["-c", SCRIPTS[what]] if what in SCRIPTS else [*TRAIN, str(tmp_path / "run")]
    status, said = interrupt_twice(command, marker, wait, delay)
    assert status == 130, said
    assert not any(word in said for word in ("Traceback", "Exception ignored", "Error")), said


def test_an_interruption_when_the_reader_has_gone():
    """What could not be printed any more is no error."""
    code = WATCHED + READY + "import time; input(); print('lost'); time.sleep(0.1)\n"
    code += "import os, signal; os.kill(os.getpid(), signal.SIGINT); time.sleep(20)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    variables = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, "-c", code], env=variables, **pipes) as process:
        process.stdout.readline()
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.stderr.read() == b"interrupted\n"
    assert process.returncode == 130


def test_every_command_answers_an_interruption_so():
    """Before its libraries load and at its end; what is imported leaves signals alone."""
    package = Path(machine.__file__).parent
    for path in (*package.glob("*.py"), package / "figures" / "__main__.py"):
        text = path.read_text()
        if "main()" in text and path.stem not in ("machine", "contestants", "recipes"):
            assert text.index("end_at_interrupt(") < text.index("\n\n\n"), path.name
            assert "leave(main())" in text, path.name
