"""Text that is cut for a record, before saferun masks the secrets in it.

Half a secret has no form by which it is recognised, so no word is cut in two.
"""


def beginning(text: str, most: int) -> str:
    """Return the whole words at the beginning of a text.

    Args:
        text: of the job.
        most: how many characters to keep.
    """
    if len(text) <= most:
        return text
    words = text[:most].rsplit(None, 1)
    return f"{words[0]} …" if len(words) > 1 else "…"


def end(text: str, most: int) -> str:
    """Return the whole lines at the end of a text.

    Args:
        text: of the job.
        most: how many characters to keep.
    """
    return text if len(text) <= most else text[-most:].partition("\n")[2]
