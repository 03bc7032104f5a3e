"""As a sitecustomize.py of the user's: saferun's look at the ranks beside the job fails."""

import importlib.machinery
import sys
from types import ModuleType

MODULE = "saferun.supervise.attempt.evidence"


def refuse(*arguments: object) -> None:
    """Fail, in the place of what looks."""
    raise RuntimeError("refused by the test")


class Refuser:
    """A finder that replaces what looks as soon as the module is loaded."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            module.OutOfMemoryKills = module.ranks = refuse

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Refuser())
