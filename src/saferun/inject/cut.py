"""Cut text for a record, before saferun masks the secrets in it.

Half a secret cannot be recognised, so no word is cut in two.
"""


def beginning(text: str, most: int) -> str:
    """Return the whole words at the beginning of a text.

    Args:
        text: text of the job.
        most: most characters to keep.
    """
    if len(text) <= most:
        return text
    words = text[:most].rsplit(None, 1)
    return f"{words[0]} …" if len(words) > 1 else "…"


def end(text: str, most: int) -> str:
    """Return the whole lines at the end of a text.

    Args:
        text: text of the job.
        most: most characters to keep.
    """
    return text if len(text) <= most else text[-most:].partition("\n")[2]
