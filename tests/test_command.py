"""What all commands share."""

import subprocess
import sys
import warnings

import pytest

from minivit import command


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("--steps is 0"), 2, "minivit.x: error: --steps is 0\n"),
        (FileNotFoundError("a.npz is missing"), 2, "minivit.x: error: a.npz is missing\n"),
        (KeyboardInterrupt(), 130, "minivit.x: interrupted\n"),
    ],
)
def test_a_mistake_is_one_line(error, status, text, capsys):
    assert command.run("x", lambda: fail(error)) == status
    assert capsys.readouterr().err == text


def test_status_and_warnings(capsys):
    """A function's own status counts, None is success; a warning is one line."""
    assert [command.run("x", lambda s=s: s) for s in (None, 0, 1)] == [0, 0, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert command.run("x", lambda: warnings.warn("slow", stacklevel=1)) == 0
    assert capsys.readouterr().err == "warning: slow\n"


def test_our_own_fault_is_not_hidden():
    with pytest.raises(KeyError):
        command.run("x", lambda: {}["absent"])


def test_a_reader_that_has_gone():
    """`… | head -1`: no traceback, no error."""
    code = "from minivit import command; command.run('x', lambda: [print(i) for i in range(10**5)])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.wait()
    process.stderr.close()


@pytest.mark.parametrize("name", ["train", "predict", "evaluate", "finetune", "checkpoint"])
def test_help(name):
    """Every command explains itself, without JAX."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", f"minivit.{name}", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage: python -m minivit" in result.stdout
    assert " jax\n" not in result.stderr
