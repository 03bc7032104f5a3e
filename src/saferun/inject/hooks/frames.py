"""Whose code a frame belongs to: the script's, torch's, an installed library's or ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType

from .. import hidden_frames

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_WRAPPERS = hidden_frames.__file__
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


def user_place(frame: FrameType | None) -> str:
    """Return "file:line" of the innermost frame of the user's: not of torch, ours or libraries.

    If there is none, return the innermost one outside torch and our code.
    """
    nearest = None
    for outer in _callers(frame):
        place = f"{outer.f_code.co_filename}:{outer.f_lineno}"
        if not _is_library(outer.f_code.co_filename):
            return place
        nearest = nearest or place
    return nearest or "unknown place"


def called_by_library(frame: FrameType | None) -> bool:
    """Return whether the innermost frame outside torch and our code is an installed library's."""
    caller = next(_callers(frame), None)
    return caller is not None and _is_library(caller.f_code.co_filename)


def is_users(frame: FrameType) -> bool:
    """Return whether this frame itself is in the user's own code.

    If another hook has also replaced the function, its frame counts as its caller.
    """
    outer = frame.f_back
    while outer is not None and outer.f_back is not None and outer.f_code.co_filename == _WRAPPERS:
        frame, outer = outer.f_back, outer.f_back.f_back
    return is_users_file(frame.f_code.co_filename)


def is_users_file(name: str) -> bool:
    """Return whether a file holds the user's own code."""
    return not (is_torch(name) or name.startswith(_OURS) or _is_library(name))


def is_torch(name: str) -> bool:
    """Return whether a file is one of torch's, if this process has torch."""
    file = getattr(sys.modules.get("torch"), "__file__", None)
    return file is not None and name.startswith(os.path.dirname(file) + os.sep)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    # Yield the frame and its callers, innermost first, without those of torch and ours.
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_torch(name) and not name.startswith(_OURS):
            yield frame
        frame = frame.f_back


def _is_library(name: str) -> bool:
    parts = name.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts or name.startswith("<frozen"):
        return True
    return name.startswith(_STANDARD_LIBRARY)
