"""Import torch, as HOW says, past a finder of the user's own, which FINDER names."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

asked = []


class Asked:
    def find_spec(self, name, path=None, target=None):
        asked.append(name)


class Finding:
    def find_spec(self, name, path=None, target=None):
        asked.append(name)
        return PathFinder.find_spec(name, path, target)


class Asking:
    asking = False

    def find_spec(self, name, path=None, target=None):
        asked.append(name)
        if self.asking:
            return None
        self.asking = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.asking = False


finder = os.environ["FINDER"]
if finder.startswith("one in front"):
    kinds = {"nothing": Asked, "everything": Finding, "others": Asking}
    sys.meta_path.insert(0, kinds[finder.split()[-1]]())
elif finder == "one at the end":
    sys.meta_path.append(Asked())
    asked.append("torch")
else:
    sys.meta_path = list(sys.meta_path)[-3:]
    asked.append("torch")

if os.environ["HOW"] == "import":
    import torch
else:
    torch = importlib.import_module("torch")
print("torch" in asked, type(torch.__loader__).__name__, torch.compile is len)
print(hasattr(torch.compile.__wrapped__, "__wrapped__"))
