"""Pure: phrases that a text is searched for."""


def says(parts: tuple[str, ...], text: str) -> bool:
    """Return whether a text (lower case) holds a phrase's parts one after the other."""
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True
