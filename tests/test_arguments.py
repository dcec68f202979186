"""Every number that a command takes: what its option does not mean is one line before any work."""

import importlib

import pytest

from minivit import datasets, opening

SIZES = ("0", "-1", "nan", "inf", "word", "", "1e9", "28x", "28x0", "28x28x28", "9" * 60, "10001")
# What each command needs besides the option that is tried; none of it is opened.
COMMANDS = {
    "evaluate": ["--checkpoint", "no.npz"],
    "finetune": ["no.npz", "--image-size", "28"],
    "predict": ["no.png", "--checkpoint", "no.npz"],
    "figures.__main__": ["--checkpoint", "no.npz"],
    "bench": [],
}


@pytest.fixture(autouse=True)
def no_work(monkeypatch, tmp_path):
    """Whatever begins to read or to write fails otherwise than it should."""
    monkeypatch.setattr(opening, "read", None)
    monkeypatch.setattr(datasets, "load", None)
    monkeypatch.setattr("minivit.bench.Worker", None)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_numbers(name, numeric_options, refusal):
    """Negative, zero, huge, NaN, infinite and words, by the limits that the option declares."""
    module = importlib.import_module(f"minivit.{name}")
    found = numeric_options(module.parser())
    assert found
    for option, text, meant in found:
        if not meant:
            error = refusal(module.main, [*COMMANDS[name], f"{option}={text}"])
            assert error.startswith(f"minivit.{name.split('.')[0]}: error: {option} is {text[:40]}")
            assert len(error) < 200


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "bench"])
@pytest.mark.parametrize("option", ["--image-size", "--old-grid"])
def test_sizes(name, option, refusal):
    """Sides of images and grids, likewise."""
    module = importlib.import_module(f"minivit.{name}")
    for text in SIZES:
        error = refusal(module.main, [*COMMANDS[name], f"{option}={text}"])
        assert f"{option} is {text[:40]}" in error
        assert len(error) < 200


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name):
    module = importlib.import_module(f"minivit.{name}")
    for action in module.parser()._actions:
        assert action.help, action.dest


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "bench"])
def test_every_reader_has_the_same_options(name):
    """NC-20: what a file does not tell can be said to every command."""
    options = importlib.import_module(f"minivit.{name}").parser().format_help()
    for option in ("--heads", "--pixels", "--old-grid", "--extra"):
        assert option in options
