if several or os.environ.get("HOOK_CUDAGRAPHS") != "off-when-distributed":
    off["triton.cudagraphs"] = False

    @hook("torch._dynamo.backends.cudagraphs", "cudagraphs")
    def run_without(original, given, options):
        registry = sys.modules["torch._dynamo.backends.registry"]
        yield registry.lookup_backend("aot_eager"), given, options
