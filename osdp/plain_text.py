"""Text of others on a terminal."""


def plain(text: str) -> str:
    """Return text that a terminal takes for nothing but text: file names, files and arguments may hold its commands.

    Control characters, which begin escape sequences, and others that are not printable (those that turn the direction
    of writing, halves of characters) become Python's notation of them. Line ends and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)
