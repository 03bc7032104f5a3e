"""The head of programs that compile a function or a module."""

import torch


def body(x):
    return x @ x


class M(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Linear(2, 2)

    def forward(self, x):
        return body(self.w(x))


x = torch.ones(2, 2)
