"""The sign of life that all commands share."""

import io

import pytest

from minivit.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("kind", "seen"), [(io.StringIO, False), (Terminal, True)])
def test_only_a_terminal_sees_it(kind, seen):
    file = kind()
    assert list(progress(range(3), "decoding", file=file, delay=0)) == [0, 1, 2]
    assert ("decoding" in file.getvalue()) == seen
    assert ("/3" in file.getvalue()) == seen


def test_quick_work_stays_quiet():
    file = Terminal()
    list(progress(range(3), "decoding", file=file))
    assert "3/3" not in file.getvalue()
