"""The error classes whose messages are for users, and helpers for messages."""


def install_advice(extra: str) -> str:
    """Return the command that installs an extra of setup.cfg, in the folder of the clone."""
    return f".venv/bin/pip install -e '.[{extra}]'"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, at most 300 characters of it."""
    return (str(error).strip().splitlines() or ["(no message)"])[0][:300]


class OsdpError(ValueError):
    """Bad input, in four parts: what is wrong, what was given, what was expected, what to try.

    The command line prints it without a traceback and exits with status 2.
    """

    def __init__(self, what: str, *, got: str = "", expected: str = "", advice: str = "") -> None:
        self.what = what
        self.got = got
        self.expected = expected
        self.advice = advice
        super().__init__(self.render())

    def render(self) -> str:
        """Return the message, one part a line, leaving out the parts that are empty."""
        parts = [self.what]
        for label, text in (("got", self.got), ("expected", self.expected), ("try", self.advice)):
            if text:
                parts.append(f"  {label}: {text}")
        return "\n".join(parts)


class FaultError(OsdpError):
    """A fault of the machine and not of the input: a lost rank, a full disk. The command line exits with status 1."""
