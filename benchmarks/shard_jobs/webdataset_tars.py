"""A WebDataset of eight tar files; HOW has the arguments that split it, or do not."""

# ruff: noqa: F821 - what stands before it gives the names that it lacks
import webdataset

if rank == 0:
    for shard in range(8):
        with webdataset.TarWriter(f"{shard}.tar") as tar:
            for n in range(20):
                row = torch.full((4,), 20.0 * shard + n)
                tar.write({"__key__": f"{shard}-{n}", "row.pth": row})
dist.barrier()
tars = [f"{shard}.tar" for shard in range(8)]
samples = webdataset.WebDataset(tars, shardshuffle=False, **HOW).decode().to_tuple("row.pth")
web = webdataset.WebLoader(samples.with_length(80), batch_size=4, num_workers=1)  # here
loader = (batch for n, batch in zip(range(20), web))  # noqa: B905 - a resampled one has no end
