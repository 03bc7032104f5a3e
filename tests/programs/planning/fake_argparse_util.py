"""torch.distributed.argparse_util of a fake torch."""

import argparse
import os


class Env(argparse.Action):
    def __call__(self, *_):
        pass


class CheckEnv(argparse.Action):
    def __init__(self, dest, **kwargs):
        int(os.environ.get("PET_" + dest.upper(), 0))
        super().__init__(dest=dest, nargs=0, **kwargs)


env, check_env = Env, CheckEnv
