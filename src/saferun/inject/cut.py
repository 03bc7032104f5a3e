"""Text that is cut for a record, before saferun masks the secrets in it.

A secret of which half is left has no form by which it is known, so no word is cut in two.
"""


def beginning(text: str, most: int) -> str:
    """Return the whole words at the beginning of a text.

    Args:
        text: of the job.
        most: characters.
    """
    if len(text) <= most:
        return text
    words = text[:most].rsplit(None, 1)
    return f"{words[0]} …" if len(words) > 1 else "…"


def end(text: str, most: int) -> str:
    """Return the whole lines at the end of a text.

    Args:
        text: of the job.
        most: characters.
    """
    return text if len(text) <= most else text[-most:].partition("\n")[2]
