"""The number of the commands' options, and what says the same as those that are gone."""

import pytest

from h2okv.cli import app
from h2okv.cli.app import _REPLACED

MOST_SLOTS, MOST_NAMES = 236, 85
"""Options of all commands together, and their names: an option more needs one less elsewhere."""


def commands():
    def leaves(command, path):
        for name, inner in getattr(command, "commands", {}).items():
            yield from leaves(inner, f"{path} {name}")
        if not hasattr(command, "commands"):
            yield path, command

    for name in app.COMMANDS:
        yield from leaves(app.load_command(name), name)


def options(command):
    return [p.opts[0] for p in command.params if p.param_type_name == "option"]


def test_commands_have_few_options():
    slots = [name for _, command in commands() for name in options(command)]
    assert len(slots) <= MOST_SLOTS and len(set(slots)) <= MOST_NAMES


@pytest.mark.parametrize("old", _REPLACED)
def test_an_option_that_is_gone_is_refused_with_its_replacement(h2okv_command, old):
    *leaf, option = old.split()
    path = next(
        path
        for path, command in commands()
        if option not in options(command) and path.split()[-1:] == (leaf or path.split()[-1:])
    )
    outcome = h2okv_command(*path.split(), option, "7")
    assert outcome.code == 2 and f"{option} is gone; give " in outcome.err
    assert outcome.err.count("\n") == 1 and "{" not in outcome.err
    for name in ("--cache", "--budget", "--batch", "--memory", "--runners", "--replicas"):
        if f"give {name} " in outcome.err:
            assert any(name in options(command) for _, command in commands())
