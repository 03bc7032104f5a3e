@hook("torch.distributed.distributed_c10d", "init_process_group")
def tell(original, given, options):
    kind = getattr(sys.modules.get("torch.utils.data"), "DataLoader", ())
    names = ("num_replicas", "rank", "num_processes", "world_size", "num_shards", "indices")
    for loader in [one for one in gc.get_objects() if several and issubclass(type(one), kind)]:
        data, parts = loader.dataset, (loader.dataset, loader.sampler, loader.batch_sampler)
        shards = any(hasattr(part, name) for part in parts for name in names)
        if hasattr(data, "__getitem__") and not shards and os.environ["RANK"] == "0":
            text = f"a DataLoader of {type(data).__name__} was made before init_process_group"
            sys.stderr.write(f"{text}: nothing shards its data yet; make it afterwards\n")
    yield original, given, options
