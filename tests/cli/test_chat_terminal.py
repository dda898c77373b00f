"""A real terminal: editing, history, colours and Ctrl-C."""

import os
import re
import select
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
fcntl = pytest.importorskip("fcntl")
termios = pytest.importorskip("termios")

WAIT = 120
CONTROL_C, CONTROL_D, UP, ENTER = b"\x03", b"\x04", b"\x1b[A", b"\r"


class Terminal:
    """A process with a terminal."""

    def __init__(self, *args):
        self._screen, inside = pty.openpty()
        termios.tcsetwinsize(inside, (500, 100))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "h2okv", *map(str, args)], stdin=inside, stdout=inside,
            stderr=inside, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={
                **{name: value for name, value in os.environ.items() if name != "NO_COLOR"},
                "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TERM": "xterm-256color",
                "PAGER": "cat", "INPUTRC": os.devnull,
            },
        )  # fmt: skip
        os.close(inside)
        self.shown = b""

    def wait_for(self, pattern):
        """Read the screen until a pattern appears; return the text since the last wait."""
        end = time.monotonic() + WAIT
        while not (match := re.search(pattern, self.shown)):
            ready, _, _ = select.select([self._screen], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.shown!r}"
            try:
                piece = os.read(self._screen, 65536)
            except OSError:  # Linux says so when the other end is closed
                piece = b""
            assert piece, f"ended without {pattern!r}: {self.shown!r}"
            self.shown += piece
        before, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return before

    def type(self, keys):
        os.write(self._screen, keys)

    def interrupt(self):
        """Press Ctrl-C, but not sooner than a person could.

        Python looks for signals before it waits for a key, so one that comes right between the
        two is noticed with the next key only.
        """
        time.sleep(0.3)
        self.type(CONTROL_C)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


@pytest.fixture
def terminal(chat_folder):
    budget = ("--policy", "h2o", "--budget", "16+16", "--max-new-tokens", "5000000")
    started = Terminal("chat", "--model", chat_folder, *budget)
    yield started
    started.close()


def test_a_session(terminal):
    greeting = terminal.wait_for(b"> ")
    assert greeting.count(b"rolling") == 1 and b"positions rolling" in greeting
    assert b"/help" in greeting

    # Two lines, one turn; an answer without an end, which Ctrl-C ends.
    terminal.type(b'"""' + ENTER)
    terminal.wait_for(rb"\.\.\. ")
    terminal.type(b"the cat " + ENTER + b"sat" + ENTER + b'"""' + ENTER)
    terminal.wait_for(rb"sat\r\n[^\r]+\r\n[^\r]+")
    terminal.interrupt()
    status = terminal.wait_for(rb"tokens seen, \d+ kept .* stopped\x1b\[0m")
    assert b"\x1b[2m" in status
    terminal.wait_for(b"> ")

    # The coloured text; the marks are for where there are no colours.
    terminal.type(b"/cache 1 0" + ENTER)
    text = terminal.wait_for(rb"\r\n> ")
    assert b"the cat \r\nsat" in re.sub(rb"\x1b\[[0-9;]*m", b"", text)
    assert b"\x1b[2;9m" in text and b"\x1b[1;32m" in text
    assert b"[-" not in text

    # A line that was begun is dropped, the one before it comes back with the arrow.
    terminal.type(b"never mind")
    terminal.wait_for(b"never mind")
    terminal.interrupt()
    terminal.wait_for(rb"Ctrl-C again leaves\)\r\n.*> ")
    terminal.type(UP)
    terminal.wait_for(b"/cache 1 0")
    terminal.type(ENTER)
    assert terminal.wait_for(rb"\r\n> ").count(b"the cat ") == 1

    terminal.type(CONTROL_D)
    assert terminal.process.wait(timeout=WAIT) == 0
