def clear(study, trial):
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    for step in (cuda.empty_cache, gc.collect, cuda.empty_cache) if cuda else ():
        guarded(step)

@hook("optuna.study.study", "Study.optimize")
def clear_after_trials(original, given, options):
    call = signature(original).bind(*given, **options)
    call.arguments["callbacks"] = [*(call.arguments.get("callbacks") or ()), clear]
    yield original, call.args, call.kwargs
