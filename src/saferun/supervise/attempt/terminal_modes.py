"""The settings of our terminal, which a job may change without restoring them."""

from __future__ import annotations

import os
import termios


class TerminalModes:
    """The settings of our terminal, restored if a job was killed while it read from it."""

    def __init__(self) -> None:
        self._fd = next((fd for fd in (0, 1, 2) if os.isatty(fd)), None)
        self._saved = termios.tcgetattr(self._fd) if self._fd is not None else None

    def restore(self) -> None:
        """Restore the settings, unless another process group is in the foreground."""
        if self._fd is None or self._saved is None:
            return
        try:
            if os.tcgetpgrp(self._fd) != os.getpgrp():
                return
            if termios.tcgetattr(self._fd) != self._saved:
                termios.tcsetattr(self._fd, termios.TCSANOW, self._saved)
        except (OSError, termios.error):  # the terminal is not ours, or is gone
            return
