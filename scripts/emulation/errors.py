"""The one error that a user is meant to read."""


class RefusalError(Exception):
    """Bad input or a machine that cannot do it, in four parts; printed without a traceback, exit status 2."""

    def __init__(self, what: str, *, got: str = "", expected: str = "", advice: str = "") -> None:
        self.parts = (what, got, expected, advice)
        labels = ("", "  got: ", "  expected: ", "  try: ")
        super().__init__("\n".join(label + part for label, part in zip(labels, self.parts, strict=True) if part))
