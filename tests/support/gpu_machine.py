"""A driver's files and programs on PATH, as a machine with GPUs has them."""

import shutil

from sandbox import executable

from saferun.system import gpus as gpu

A = "GPU-14e799be-cee2-7364-1ed2-56588c2c62e3"
B = "GPU-e533a614-68dd-10bf-5cbb-1d78bacbb601"
INFORMATION = """\
Model: \t\t {name}
IRQ:   \t\t 41
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.a5.00.1a
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t {bus}
Device Minor: \t {minor}
GPU Firmware: \t 580.159.04
GPU Excluded:\t {excluded}
"""
H200_PAIR = f"GPU 0: NVIDIA H200 (UUID: {A})\nGPU 1: NVIDIA H200 (UUID: {B})\n"


class FakeMachine:
    """A driver's /proc and /dev tree, and programs on PATH, in a directory of the test's."""

    def __init__(self, root):
        self.proc, self.dev, self.bin = root / "proc", root / "dev", root / "bin"
        self.dev.mkdir()
        self.bin.mkdir()
        for tool in ("cat", "dirname", "sleep", "touch", "yes"):  # no more: a real nvidia-smi
            (self.bin / tool).symlink_to(shutil.which(tool))  # may lie beside them

    def add(self, name, uuid, *, bus, minor, excluded="No", node=True):
        folder = self.proc / "gpus" / bus
        folder.mkdir(parents=True)
        text = INFORMATION.format(name=name, uuid=uuid, bus=bus, minor=minor, excluded=excluded)
        (folder / "information").write_text(text, encoding="utf-8")
        if node:
            (self.dev / f"nvidia{minor}").touch()
        return folder / "information"

    def add_h200_pair(self):
        self.add("NVIDIA H200", B, bus="0000:00:07.0", minor=1)
        self.add("NVIDIA H200", A, bus="0000:00:06.0", minor=0)

    def nvidia_smi(self, script):
        executable(self.bin / "nvidia-smi", f"#!/bin/sh\n{script}\n")

    def nvidia_smi_prints(self, text, status=0):
        (self.bin / "answer").write_text(text, encoding="utf-8")
        self.nvidia_smi(f'cat "$(dirname "$0")/answer"; exit {status}')

    def detect(self, visible=None, timeout_s=300.0, **environ):
        environ["PATH"] = str(self.bin)
        if visible is not None:
            environ["CUDA_VISIBLE_DEVICES"] = visible
        return gpu.detect(environ, proc=str(self.proc), dev=str(self.dev), timeout_s=timeout_s)


def uuids(facts):
    return [found.uuid for found in facts.gpus]
