MIRRORED = "tensorflow.python.distribute.mirrored_strategy"

@hook(MIRRORED, "MirroredStrategy.__init__")
def reduce_without_nccl(original, given, options):
    call = signature(original).bind(*given, **options)
    devices = call.arguments.get("devices") or sys.modules[MIRRORED].all_local_devices()
    gpus = ["gpu" in str(getattr(device, "name", device)).lower() for device in devices]
    if call.arguments.get("cross_device_ops") is None and len(gpus) > 1 and len(set(gpus)) == 1:
        kinds = sys.modules["tensorflow.python.distribute.cross_device_ops"]
        # The hierarchical one leaves the last of an odd number of replicas out of its sums.
        kind = kinds.ReductionToOneDevice if len(gpus) % 2 else kinds.HierarchicalCopyAllReduce
        call.arguments["cross_device_ops"] = kind()
    yield original, call.args, call.kwargs
