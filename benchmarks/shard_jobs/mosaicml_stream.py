"""A StreamingDataset of MosaicML's; HOW has more arguments of it."""

# ruff: noqa: F821 - what stands before it gives the names that it lacks
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

if rank == 0:
    with MDSWriter(out="rows", columns={"row": "ndarray:float32:4"}) as writer:
        for n in range(160):
            writer.write({"row": torch.full((4,), float(n)).numpy()})
dist.barrier()
rows = StreamingDataset(local="rows", shuffle=True, batch_size=4, **HOW)
mosaic = StreamingDataLoader(rows, batch_size=4)  # here
loader = (batch["row"] for batch in mosaic)
