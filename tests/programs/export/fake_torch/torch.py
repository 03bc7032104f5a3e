"""A torch with as many GPUs as are asked for; number BAD fails, and TESTED lists the tests."""

import os


class ones:  # noqa: N801 (as torch's function)
    def __init__(self, size, device):
        with open(os.environ["TESTED"], "a") as file:
            file.write(f"{device}\n")
        if device == f"cuda:{os.environ.get('BAD')}":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        self.size = size

    def sum(self):
        return self

    def item(self):
        return self.size
