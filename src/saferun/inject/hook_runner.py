"""Run the hooks of watched modules, and keep the state of each: applied, not imported or missed.

A module that importlib loads is hooked right after its execution (finder.py). A module loaded in
another way (before us, or executed by hand) is hooked by the next `hook_late_imports`, which also
replaces names that other modules took from it. A module was *missed* if it was in use before, if a
hook could not be put in place, or if the script has replaced the hook since. The receipt has the
state of each target, so that a mitigation without effect does not count as tried.
"""

from __future__ import annotations

import atexit
import sys
from types import ModuleType

from . import contract, rank
from .context import Context, say
from .targets import MODULES, TARGETS

_context: Context | None = None
_is_unusable = False  # SAFERUN_INJECT could not be read, which was reported
_hooked: dict[str, ModuleType] = {}  # name -> the module whose hooks have run
_wrappers: dict[tuple[str, str], object] = {}  # (module, name) -> the wrapper that a hook put there


def current(text: str) -> Context | None:
    """Return the process's Context; the first call makes it from SAFERUN_INJECT's `text`.

    The result is None if the text cannot be read, which is reported once.
    """
    global _context, _is_unusable
    if _context is None and not _is_unusable:
        try:
            _context = Context(text, hook_late_imports)
            atexit.register(at_exit, _context)
        except Exception as error:
            _is_unusable = True
            say(f"inject: SAFERUN_INJECT: {error}; the job runs without hooks")
    return _context


def run_hooks(text: str, name: str, module: ModuleType) -> None:
    """Run the hooks of a watched module that has just been executed. Never raises.

    Args:
        text: the value of SAFERUN_INJECT.
        name: the module's name, a key of TARGETS.
        module: the module itself.
    """
    context = current(text)
    if context is not None:
        hook(context, name, module)


def hook(context: Context, name: str, module: ModuleType) -> dict[str, tuple[object, object]]:
    """Run the hooks of a watched module that has just been executed. Never raises.

    Args:
        context: the process's context.
        name: the module's name, a key of TARGETS.
        module: the module itself.

    Returns:
        The names in the module that the hooks changed, with the old and the new value.
    """
    before = dict(vars(module))
    holds = True
    for part in TARGETS[name]:
        try:
            full = f"{__package__}.hooks.{MODULES.get(part, part)}"
            __import__(full)
            sys.modules[full].apply(name, module, context)
        except Exception as error:
            holds = False
            context.failed(part, error)
    _hooked[name] = module
    changed = {
        key: (before.get(key), value)
        for key, value in list(vars(module).items())
        if before.get(key) is not value and callable(value)
    }
    _wrappers.update({(name, key): new for key, (_, new) in changed.items()})
    context.set_target(name, contract.APPLIED if holds else contract.MISSED)
    context.guard("start", lambda: context.list_imports(again=True))
    return changed


def hook_late_imports(context: Context) -> None:
    """Hook modules imported without the finder, and find hooks that the script replaced.

    Never raises.
    """
    for name in TARGETS:
        try:
            module = sys.modules.get(name)
            if module is not None and _hooked.get(name) is not module and _is_complete(module):
                _hook_late(context, name, module)
        except Exception as error:
            context.failed("targets", error)
    _notice_replaced(context)


def at_exit(context: Context) -> None:
    """Write the last state of each target; a loaded module that no hook has seen was missed."""
    if rank.is_started_by_launcher():
        context.guard("start", context.list_imports)
    for name in TARGETS:
        module = sys.modules.get(name)
        if module is not None and _hooked.get(name) is not module:
            context.set_target(name, contract.MISSED)
    _notice_replaced(context)


def _is_complete(module: ModuleType) -> bool:
    if type(module).__name__ == "_LazyModule":  # reading any attribute would load it
        return False
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _hook_late(context: Context, name: str, module: ModuleType) -> None:
    in_use = name.startswith(("torch._inductor", "torch._dynamo")) and _has_compiled()
    changed = hook(context, name, module)
    replacements = {id(old): new for old, new in changed.values() if old is not None}
    for other_name, other in list(sys.modules.items()):
        if not replacements or other_name.startswith("_saferun"):
            continue
        names = getattr(other, "__dict__", None)
        if isinstance(names, dict):
            taken = [key for key, value in list(names.items()) if id(value) in replacements]
            names.update({key: replacements[id(names[key])] for key in taken})
    if in_use:
        context.set_target(name, contract.MISSED)


def _has_compiled() -> bool:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(counters and counters["stats"]["unique_graphs"])


def _notice_replaced(context: Context) -> None:
    for (name, key), wrapper in _wrappers.items():
        present = getattr(_hooked[name], key, None)
        if present is not wrapper and not _leads_to(present, wrapper):
            context.set_target(name, contract.MISSED)


def _leads_to(function: object, wrapper: object) -> bool:
    """Return whether a function that replaced our wrapper can still call it."""
    seen = 0
    while function is not None and seen < 20:
        cells = getattr(function, "__closure__", None) or ()
        code = getattr(function, "__code__", None)
        names = getattr(function, "__globals__", {})
        held = [cell.cell_contents for cell in cells if _is_filled(cell)]
        held += [names.get(word) for word in getattr(code, "co_names", ())]
        held += [*(getattr(function, "__defaults__", None) or ())]
        if any(one is wrapper for one in held):
            return True
        function, seen = getattr(function, "__wrapped__", None), seen + 1
        if function is wrapper:
            return True
    return False


def _is_filled(cell: object) -> bool:
    try:
        cell.cell_contents  # type: ignore[attr-defined]  # noqa: B018 - raises if it is empty
    except ValueError:
        return False
    return True
