"""What all commands share."""

import argparse
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


@pytest.mark.parametrize("text", ["-1", "0", "1e9", "nan", "inf", "word", "9" * 60, "9" * 6000])
def test_whole_numbers(text, capsys):
    """What is out of range, or no number at all, is one line before any work."""
    parser = command.Parser(prog="python -m minivit.x")
    parser.add_argument("--steps", type=command.whole(1))
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--steps", text])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"minivit.x: error: --steps is {text[:40]}")
    assert len(line) < 200


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ((), "-1e300 0 2", "nan inf -inf word 1e999"),
        ((0, 1), "0 1 0.5", "-1e-9 1.1 nan inf"),
        ((0, 1, True), "1e-9 1", "0 -0.0 nan"),
        ((0, 1, False, True), "0 0.999", "1"),
    ],
)
def test_numbers(options, good, bad):
    """Ends are open or closed; what is not finite is never in range."""
    read = command.number(*options)
    assert [read(text) for text in good.split()] == [float(text) for text in good.split()]
    for text in bad.split():
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)


def test_what_a_user_supplies_is_shown_literally(capsys):
    """Control characters never reach the terminal, and no line is endless."""
    assert command.literal("a\x1b[31m\nb ä") == r"a\x1b[31m\nb ä"
    assert len(command.literal("x" * 5000)) == command.LONGEST
    assert command.run("x", lambda: fail(ValueError("a\x1b[2J\nb"))) == 2
    assert capsys.readouterr().err == "minivit.x: error: a\\x1b[2J b\n"


def test_errors_of_the_system_name_the_file(capsys):
    """An error number without a file helps nobody."""
    error = OSError(28, "No space left on device", "run/state-5.npz")
    assert command.run("x", lambda: fail(error)) == 2
    assert capsys.readouterr().err == "minivit.x: error: run/state-5.npz: No space left on device\n"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")]
)
def test_memory_is_told_with_a_remedy(error, capsys):
    """Python's, NumPy's and JAX's ways of saying it."""
    assert command.run("x", lambda: fail(error), remedy="try --accumulate 2") == 2
    assert "out of memory; try --accumulate 2" in capsys.readouterr().err


def test_a_patient_command_goes_on_without_a_reader(tmp_path):
    """`train | head -1` must not end the training: what is printed is lost, the work is not."""
    code = f"""
import sys
from minivit import command
def work():
    for i in range(10**5): print(i)
    print("gone", file=sys.stderr)
    open({str(tmp_path / "done")!r}, "w").close()
sys.exit(command.run("x", work, patient=True))"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"gone\n"
    assert process.wait() == 0
    assert (tmp_path / "done").exists()
    process.stderr.close()


@pytest.mark.parametrize("check", [command.writable, command.picture, command.folder])
def test_what_cannot_be_written(check, tmp_path):
    """Found by trying, so also for a superuser; an error names the option, and nothing is left."""
    (tmp_path / "a.png").write_bytes(b"old")
    assert check(str(tmp_path / "new.png"), "--output") == tmp_path / "new.png"
    with pytest.raises(OSError, match=r"--output /proc/x.png cannot be written: "):
        check("/proc/x.png", "--output")
    if check is command.folder:
        assert check(tmp_path / "a" / "b", "--output") == tmp_path / "a" / "b"
        for path in ("a.png", "a.png/b"):
            with pytest.raises(NotADirectoryError, match=r"a.png is a file; it must be a folder"):
                check(tmp_path / path, "--output")
    else:
        assert check(tmp_path / "a.png", "--output").read_bytes() == b"old"
        with pytest.raises(FileNotFoundError, match=r"--output .*x.png: there is no folder .*a"):
            check(tmp_path / "a" / "x.png", "--output")
        (tmp_path / "b.png").mkdir()
        with pytest.raises(IsADirectoryError, match=r"b.png is a folder; name a file in it"):
            check(tmp_path / "b.png", "--output")
    assert {path.name for path in tmp_path.iterdir()} <= {"a.png", "b.png"}


def test_pictures_say_their_format(tmp_path):
    for name in ("x", "x.doc", "x.npz"):
        with pytest.raises(ValueError, match=r"--output x.* must end in .png, .pdf or .svg"):
            command.picture(name, "--output")
    assert command.picture(tmp_path / "x.PDF", "--output").name == "x.PDF"
