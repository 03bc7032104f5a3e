"""The modules that hooks wait for, and the hooks that act on each, in order.

A hook is a module of `hooks/` (MODULES) with `apply(name, module, context)`. It is called right
after the module `name` has been executed, before any other code can take a name out of it, and
again after `importlib.reload`. It returns nothing, reports through `context.receipt`, and imports
nothing of torch or TensorFlow that is not loaded yet. An exception in it becomes one line on stderr
(`context.failed`).
"""

TARGETS: "dict[str, tuple[str, ...]]" = {
    "torch": ("excepthook", "compile"),
    "torch.nn.functional": ("guards",),
    "torch.nn.attention.flex_attention": ("compile",),
    "torch._dynamo.convert_frame": ("compile",),
    "torch._dynamo.backends.cudagraphs": ("compile",),
    "torch._inductor.compile_fx": ("compile",),
    "torch._inductor.runtime.triton_heuristics": ("compile",),
    "torch._inductor.cudagraph_trees": ("cudagraph_markers",),
    "torch.distributed.distributed_c10d": ("init", "order"),
    "torch.distributed.rendezvous": ("restarts",),
    "torch.distributed.device_mesh": ("shards",),
    "torch.utils.file_baton": ("build_locks",),
    "torch.utils.data._utils.signal_handling": ("excepthook",),
    "torch.utils.data.dataloader": ("order", "shards"),
    "torchdata.stateful_dataloader.stateful_dataloader": ("shards",),
    "torch.nn.parallel.distributed": ("order",),
    "torch.cuda.memory": ("memory",),
    "optuna.study.study": ("memory", "optuna"),
    "torch.distributed.fsdp.fully_sharded_data_parallel": ("order",),
    "torch.distributed.fsdp._fully_shard._fully_shard": ("order",),
    "torch.distributed._composable.fsdp.fully_shard": ("order",),  # torch 2.4 and 2.5
    "tensorflow.python.eager.context": ("tensorflow",),
    "tensorflow.python.framework.config": ("tensorflow",),
    "tensorflow.python.eager.polymorphic_function.polymorphic_function": ("tensorflow",),
    "tensorflow.python.distribute.mirrored_strategy": ("tensorflow",),
}

# Modules of the hooks that have a folder; every other hook's module has the hook's name.
MODULES = {
    "compile": "compile.hook",
    "cudagraph_markers": "compile.cudagraph_markers",
    "guards": "guards.hook",
    "init": "init.hook",
    "optuna": "optuna.hook",
    "order": "order.hook",
    "shards": "order.shards",
    "tensorflow": "tensorflow.hook",
}

# The targets that a setting of a hook needs: if one was missed, the setting had no effect.
NEEDS: "dict[str, tuple[str, ...]]" = {
    "compile.enabled": ("torch",),
    "compile.autotune": ("torch._inductor.compile_fx", "torch._inductor.runtime.triton_heuristics"),
    "compile.cudagraphs": ("torch._inductor.compile_fx", "torch._dynamo.backends.cudagraphs"),
    "compile.fallback": ("torch._dynamo.convert_frame",),
    "guards.labels": ("torch.nn.functional",),
    "guards.logits": ("torch.nn.functional",),
    "guards.embeddings": ("torch.nn.functional",),
}
NEEDS_ASSIGN = ("torch._dynamo.convert_frame",)  # for a setting that the compile hook assigns
NEEDS_DIRECTORIES = ("torch",)  # for a cache directory for each rank
