"""The head of programs whose data come as torchtitan's: a dataset by data rank, an own loader."""


# ruff: noqa: F821 - what stands before it gives the names that it lacks
class HuggingFaceText(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world, self.taken = rank, world, 0

    def __iter__(self):
        rows = torch.randint(0, 99, (400, 4), generator=torch.Generator().manual_seed(2))
        for row in rows[self.rank :: self.world]:
            self.taken += 1
            yield {"input": row}, row

    def state_dict(self):
        return {"taken": self.taken}


class ParallelAware(DataLoader):
    def __init__(self, data, rank, world, batch):
        self._rank, self._world = rank, world
        super().__init__(data, batch)


def first(loader):
    for inputs, _ in loader:
        yield inputs["input"]
