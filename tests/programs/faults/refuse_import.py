"""As a sitecustomize.py of the user's: the module that REFUSED_MODULE names cannot be imported."""

import os
import sys


class Refuser:
    """A finder that fails for one module."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == os.environ["REFUSED_MODULE"]:
            raise RuntimeError("refused by the test")


sys.meta_path.insert(0, Refuser())
