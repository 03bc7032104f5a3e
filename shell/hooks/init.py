@hook("torch.distributed.distributed_c10d", "init_process_group")
def meet(original, given, options):
    call, env = signature(original).bind(*given, **options).arguments, os.environ
    torch, local = sys.modules["torch"], int(env.get("LOCAL_RANK", "-1"))
    is_free = not (call.get("device_id") or torch.cuda.is_initialized()) and local >= 0
    if is_free and "nccl" in (call.get("backend") or "nccl") and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    is_all = several and not call.get("store") and call.get("init_method", "env://") == "env://"
    if is_all and env.get("TORCH_DIST_INIT_BARRIER") == "1" and "TORCHELASTIC_RESTART_COUNT" in env:
        limit = call.get("timeout") or timedelta(seconds=float(env.get("HOOK_TIMEOUT_S", "600")))
        is_host = env["RANK"] == "0" and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        where = env["MASTER_ADDR"], int(env["MASTER_PORT"]), None, is_host, limit
        store = torch.distributed.TCPStore(*where, wait_for_workers=False, multi_tenant=True)
        start, size = f"hook/{env['TORCHELASTIC_RESTART_COUNT']}/", int(env["WORLD_SIZE"])
        store.set(start + env["RANK"], "")
        try:
            store.wait([f"{start}{rank}" for rank in range(size)], limit)
        except RuntimeError:
            late = [rank for rank in range(size) if not store.check([f"{start}{rank}"])]
            sys.exit(f"ranks {late} of {size} did not reach init_process_group in {limit}")
    yield original, given, options
