@hook("torch.distributed.distributed_c10d", "init_process_group")
def meet(original, given, options):
    call, env = inspect.signature(original).bind(*given, **options).arguments, os.environ
    cuda, local = sys.modules["torch"].cuda, int(env.get("LOCAL_RANK", "-1"))
    is_free = not (call.get("device_id") or cuda.is_initialized()) and local >= 0
    if is_free and "nccl" in (call.get("backend") or "nccl") and local < cuda.device_count():
        cuda.set_device(local)
    is_all = call.get("init_method", "env://") == "env://" and not call.get("store")
    if several and is_all and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        limit = call.get("timeout") or timedelta(seconds=float(env.get("HOOK_TIMEOUT_S", "600")))
        connect = sys.modules["torch.distributed"].TCPStore
        store = connect(env["MASTER_ADDR"], int(env["MASTER_PORT"]))  # of torchrun's agent
        start, size = f"hook/{env['TORCHELASTIC_RESTART_COUNT']}/", int(env["WORLD_SIZE"])
        store.set(start + env["RANK"], "")
        try:
            store.wait([f"{start}{rank}" for rank in range(size)], limit)
        except RuntimeError:
            late = [rank for rank in range(size) if not store.check([f"{start}{rank}"])]
            sys.exit(f"ranks {late} of {size} did not reach init_process_group in {limit}")
    yield original, given, options
