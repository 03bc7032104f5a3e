"""Arm this Python: watch for the modules that a hook waits for, and act right after their import.

Armed costs a finder and nothing else (no json, no re, no torch). SAFERUN_INJECT is only parsed
when a watched module arrives. Not armed: torchrun's agent, multiprocessing's resource tracker and
fork server, inductor's compile workers. Children of `multiprocessing.spawn` are armed, since
`torch.multiprocessing.spawn` makes ranks of them.

A process that torchrun's agent started as a rank leaves one line at its start, and the kernel ends
it with the agent. All other receipts wait in memory until the process is *active*: it joined a
process group or compiled something. A DataLoader worker or a helper that merely imports torch
leaves none.
"""

import os
import sys

from _saferun_inject import contract
from _saferun_inject.hooks import TARGETS

_AGENT_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_AGENT_FILES = ("torchrun", "torch/distributed/run.py", "torch/distributed/launch.py")
_HELPER_CODE = ("from multiprocessing.resource_tracker ", "from multiprocessing.forkserver ")
_COMPILE_WORKER = "torch._inductor.compile_worker"
_SET_PDEATHSIG, _SIGKILL = 1, 9  # linux/prctl.h, signal.h; the module signal costs 2 ms
_PENDING_LIMIT = 1000  # receipts kept by a process that never becomes active


class Context:
    """What a hook may ask and say. One per process; created when the first hook needs it."""

    def __init__(self, text):
        self._contract = contract.decode(text)
        self.hooks = self._contract["hooks"]
        self.run = self._contract["run"]
        self.attempt = self._contract["attempt"]
        self.mitigations = self._contract["mitigations"]
        self.required = bool(self.hooks.get("required"))
        self._directory = self._contract.get("receipts")
        self._said = set()
        self._pid = os.getpid()
        self._active = False
        self._pending = []

    def say(self, text, once=None):
        """Write one `saferun:` line on stderr; with `once`, only the first time for that key."""
        if once is not None:
            if once in self._said:
                return
            self._said.add(once)
        say(text)

    def receipt(self, hook, outcome, **facts):
        """Append one line to this process's receipt. Never raises: a full disk stops no job.

        Kept in memory until the process is active (see `activate`); `facts` that JSON does not
        know are written as their `repr`.
        """
        try:
            self._notice_fork()
            self._pending.append((_now(), hook, outcome, facts))
            if self._active or _group_is_initialised():
                self.activate()
            del self._pending[_PENDING_LIMIT:]
        except Exception:
            self._pending = []

    def leave(self, ending, content):
        """Write a file of this process beside its receipts. Raises OSError where that fails."""
        if self._directory:
            _make(self._directory)
            name = self._file_name()[: -len(".jsonl")] + ending
            write_new(os.path.join(self._directory, name), content)

    def activate(self):
        """Say that this process is a rank or compiles: its receipts are written from now on."""
        try:
            self._notice_fork()
            self._active = True
            waiting, self._pending = self._pending, []
            if waiting and self._directory:
                _append(self._directory, self._file_name(), self._lines(waiting))
        except Exception:
            self._pending = []

    def failed(self, hook, error):
        """Report that a hook of ours failed; under `required` this ends the process (70)."""
        what = "{}: {}".format(type(error).__name__, " ".join(str(error).split()))
        self.receipt(hook, contract.FAILED, error=what)
        if not self.required:
            line = "inject: hook {}: {}; the job goes on without it".format(hook, what)
            self.say(line, once=line)
            return
        self.activate()
        self.say(
            "inject: hook {}: {}; it is required (hooks.required), so this process ends; set "
            "hooks.required to false to go on without it".format(hook, what)
        )
        refuse()

    def _notice_fork(self):
        # A forked child is a process of its own: not active, and its parent has said the rest.
        if os.getpid() != self._pid:
            self._pid, self._active, self._pending = os.getpid(), False, []

    def _file_name(self):
        return _receipt_name(self.attempt, self._pid)

    def _lines(self, entries):
        import json

        head = {"v": contract.VERSION, "pid": self._pid, "rank": rank()}
        return [
            json.dumps(dict(facts, at=at, hook=hook, outcome=outcome, **head), default=repr)
            for at, hook, outcome, facts in entries
        ]


class Finder:
    """Finds a watched module as the others find it, and lets its hooks act after its execution.

    No class of importlib.abc: importing that costs 15 ms.
    """

    def find_spec(self, name, path=None, target=None):
        """Return the others' spec with a loader of ours around theirs; None for other modules."""
        if name not in TARGETS:
            return None
        for finder in list(sys.meta_path):
            if finder is self:
                continue
            find = getattr(finder, "find_spec", None)
            if find is None:  # one that only speaks find_module: the import system asks it itself
                return None
            spec = find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = Loader(spec.loader)
                return spec
        return None


class Loader:
    """Somebody else's loader, which leaves the module's `__loader__` and spec as it found them."""

    def __init__(self, inner):
        self._saferun_inner = inner

    def __getattr__(self, name):
        if name == "_saferun_inner":  # a copy that has no state yet
            raise AttributeError(name)
        return getattr(self._saferun_inner, name)

    def create_module(self, spec):
        create = getattr(self._saferun_inner, "create_module", None)
        return None if create is None else create(spec)

    def exec_module(self, module):
        """Execute the module under its own loader, then run its hooks."""
        spec = module.__spec__
        if spec.loader is self:
            spec.loader = self._saferun_inner
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._saferun_inner
        self._saferun_inner.exec_module(module)
        arrived(spec.name, sys.modules.get(spec.name, module))


_text = ""  # SAFERUN_INJECT as it was at the start: a script may clear its environment
_context = None
_unusable = False  # SAFERUN_INJECT could not be read: said once


def start():
    """Arm this process, unless it is one that can never be a rank."""
    global _text
    _text = os.environ.get(contract.VARIABLE, "")
    if "RANK" in os.environ:
        _tie_to_agent()
    argv = _original_argv()
    kind = kind_of(argv)
    if kind == "agent":
        # Its workers are ranks of their own, whatever rank the agent itself was started by.
        os.environ.pop(contract.RANK_MARK, None)
        os.environ[contract.AGENT_MARK] = _agent_mark(argv)
        _end_quickly()
    if kind != "job" or any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    if "RANK" in os.environ and _is_agents_child():
        os.environ.setdefault(contract.RANK_MARK, str(os.getpid()))
    sys.meta_path.insert(0, Finder())


def _end_quickly():
    """Spare an agent the search for garbage cycles when it ends, which is most of its exit.

    Among all that `import torch` made it takes 0.25 s and more, and the next attempt waits for it.
    """
    import atexit
    import gc

    atexit.register(gc.freeze)


def _is_agents_child():
    # Under --no-python a shell is the rank, and a Python that it runs on the way is not.
    agent = _agent()[0]
    return agent is None or agent == os.getppid()


def _agent():
    # The pid of the agent (None: not started by one of ours) and its pid namespace ("": unknown).
    pid, _, namespace = os.environ.get(contract.AGENT_MARK, "").partition(" ")
    return (int(pid) if pid.isdigit() else None), namespace


def _agent_mark(argv):
    # An abbreviation may be as short as `--no-`; a script's own option only makes us careful.
    other = any(word.startswith(("--no-", "--no_")) for word in argv)
    if other or "PET_NO_PYTHON" in os.environ or "PYTHON_EXEC" in os.environ:
        return str(os.getpid())
    return "{} {}".format(os.getpid(), _namespace()).rstrip()


def _namespace():
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _tie_to_agent():
    """Have the kernel end this rank when its agent ends; end it now where that has happened.

    torchrun ends its ranks when it can; killed by SIGKILL it leaves them all, and their GPU
    memory. The kernel counts the end of the *thread* that started us: torchrun starts ranks from
    its main thread (torch/distributed/elastic, 2.4 to 2.13), and helpers of a rank, which any
    thread may start, are never tied.
    """
    agent, namespace = _agent()
    mark = os.environ.get(contract.RANK_MARK)
    if agent is None or mark not in (None, str(os.getpid())):
        return
    if os.getppid() == agent:
        _die_with_parent()
        gone = os.getppid() != agent
    else:
        gone = _is_orphan(agent, namespace)
    if gone:
        os.kill(os.getpid(), _SIGKILL)


def _is_orphan(agent, namespace):
    # Ranks are sessions of their own. In a container a pid of the outside says nothing.
    if not namespace or namespace != _namespace() or os.getsid(0) != os.getpid():
        return False
    try:
        os.kill(agent, 0)
        with open("/proc/{}/stat".format(agent), "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except ProcessLookupError:
        return True
    except OSError:
        return False


def _die_with_parent():
    """Set PDEATHSIG to SIGKILL; a kernel or a Python that cannot leaves things as they were."""
    arguments = (_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    try:
        try:  # what ctypes is made of, at a quarter of its cost
            import _ctypes

            prctl = _ctypes.dlsym(_ctypes.dlopen(None, os.RTLD_NOW), "prctl")
            _ctypes.call_function(prctl, arguments)
        except (ImportError, AttributeError):
            import ctypes

            ctypes.CDLL(None).prctl(*arguments)
    except Exception:
        pass


def settle():
    """Do what must come after the user's own sitecustomize, in rank processes only.

    Say that the hooks run here, and take sys.excepthook: Ubuntu's sitecustomize replaces it
    without calling the one before it.
    """
    if not is_rank_process():
        return
    leave_word(contract.APPLIED)
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from _saferun_inject.hooks import excepthook

        excepthook.watch()


def leave_word(outcome):
    """Leave a rank's first receipt or its last, without json. Never raises.

    What is wrong with the contract is said when torch arrives.
    """
    try:
        directory, attempt = contract.whereabouts(_text)
        if directory:
            _append(directory, _receipt_name(attempt, os.getpid()), [_word_of(outcome)])
    except Exception:
        pass


def _word_of(outcome):
    numbers = [_number(name) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    rank, local, size = ["null" if number is None else number for number in numbers]
    return (
        '{{"v":{},"at":{!r},"pid":{},"rank":{},"hook":"{}","outcome":"{}",'
        '"local_rank":{},"local_world_size":{}}}'
    ).format(
        *(contract.VERSION, _now(), os.getpid(), rank),
        *(contract.BOOTSTRAP, outcome, local, size),
    )


def _number(name):
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def is_rank_process():
    """Tell whether this very process is what the launcher started as a rank, not a helper of it."""
    return os.environ.get(contract.RANK_MARK) == str(os.getpid()) and "RANK" in os.environ


def current_context():
    """Return the process's Context; None where SAFERUN_INJECT cannot be read (said once)."""
    global _context, _unusable
    if _context is None and not _unusable:
        try:
            _context = Context(_text)
        except Exception as error:
            _unusable = True
            say("inject: SAFERUN_INJECT: {}; the job runs without hooks".format(error))
    return _context


def arrived(name, module):
    """Run the hooks of a watched module that has just been executed."""
    context = current_context()
    if context is None:
        return
    for hook in TARGETS[name]:
        try:
            _hook(hook).apply(name, module, context)
        except Exception as error:
            context.failed(hook, error)


def _hook(name):
    full = "_saferun_inject.hooks." + name
    __import__(full)
    return sys.modules[full]


def rank():
    """Return this process's global rank: the group's where there is one, else RANK, else None."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if _group_is_initialised():
        return c10d.get_rank()
    return _number("RANK")


def _group_is_initialised():
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    asked = getattr(c10d, "is_initialized", None)  # absent while the module is being executed
    try:
        return bool(asked and asked())
    except Exception:
        return False


def say(text):
    """Write one line on stderr, in one write, so that lines of ranks do not mix."""
    try:
        sys.stderr.write("saferun: " + " ".join(text.splitlines()) + "\n")
        sys.stderr.flush()
    except Exception:
        pass


def refuse():
    """End this process with 70, the one way out that nothing of the job can catch."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    os._exit(70)


def _original_argv():
    if hasattr(sys, "orig_argv"):
        return sys.orig_argv
    try:  # Python 3.9
        with open("/proc/self/cmdline", "rb") as file:
            return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    except OSError:
        return []


def kind_of(argv):
    """Return "agent", "helper" or "job" for the command line of a Python, as it was started."""
    how, what = _program(argv)
    if how == "-m":
        if what in _AGENT_MODULES:
            return "agent"
        return "helper" if what.startswith(_COMPILE_WORKER) else "job"
    if how == "-c":
        return "helper" if what.startswith(_HELPER_CODE) else "job"
    if what.endswith(tuple("/" + file for file in _AGENT_FILES)) or what in _AGENT_FILES:
        return "agent"
    return "helper" if _COMPILE_WORKER.replace(".", "/") + "/" in what else "job"


def _program(argv):
    """Return ("-m", module), ("-c", code) or ("", script) of a Python command line."""
    words = iter(argv[1:])
    for word in words:
        if word in ("-", "--") or not word.startswith("-"):
            return "", word
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(words, "")
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in "mcWX":  # takes a value: the rest of the word, or the next one
                value = word[place:] or next(words, "")
                if letter in "mc":
                    return "-" + letter, value
                break
    return "", ""


def _receipt_name(attempt, pid):
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return contract.receipt_name(attempt, _word(restart), rank(), pid)


def _word(text):
    return "".join(letter for letter in text if letter.isalnum()) or "0"


def _now():
    import time

    return time.time()


def write_new(path, content):
    """Make a file with its whole content at once: who reads it meanwhile finds none, or all of it.

    Raises:
        FileExistsError: there is one.
        OSError: it cannot be written.
    """
    draft = "{}.{}".format(path, os.getpid())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(draft, flags, 0o600)
    try:
        try:
            while content:
                content = content[os.write(file, content) :]
        finally:
            os.close(file)
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(path):
                raise FileExistsError(path) from None
            os.rename(draft, path)
    finally:
        try:
            os.unlink(draft)
        except OSError:
            pass


def _make(directory):
    """Make a directory 0700 with the parents that are missing; makedirs leaves those to umask."""
    try:
        _make_one(directory)
    except FileNotFoundError:
        parent = os.path.dirname(directory)
        if parent in ("", directory):
            raise
        _make(parent)
        _make_one(directory)


def _make_one(directory):
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:  # another rank was quicker, perhaps
        return


def _append(directory, name, lines):
    _make(directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(os.path.join(directory, name), flags, 0o600)
    try:
        os.write(file, "".join(line + "\n" for line in lines).encode("utf-8", "backslashreplace"))
    finally:
        os.close(file)
