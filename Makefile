# Two commands: `make demo` trains the example, `make test` proves the project. Both set up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TENSORFLOW := .venv-tensorflow
DOCS := .venv-docs
ECOSYSTEM := .venv-ecosystem
RAY := .venv-ray
AXE := .axe
PEERS := .venv-peers
MUTANTS := .venv-mutants
# What needs nothing but $(VENV).
PLAIN := not slurm and not tensorflow and not ecosystem and not browser
# Whoever has GPUs may be training on them: `pytest tests/gpu/real` is asked for by name.
PYTEST := $(BIN)/pytest --ignore tests/gpu/real

# Every saferun that a test starts would compile all of its files, as no user's does.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-rights strangers test-slurm quick-slurm test-tensorflow test-ecosystem test-browser lint unit slow
.PHONY: test-ray bench bench-peers docs pictures check-pictures mutants fuzz clean

demo: $(READY)
	$(BIN)/saferun --profile cpu --nproc-per-node 2 examples/train_gpt.py --max-seconds 60 --out out/demo

test: lint unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/saferun profiles check profiles/*.yaml
	tools/shell-check

# What is slower than a few seconds and asserts more is in `make slow`.
# Three processes keep two cores busy: some tests wait.
unit: $(READY)
	$(PYTEST) -n 3 --dist worksteal -m "$(PLAIN) and not slow"

slow: $(READY)
	$(PYTEST) -n 2 --dist worksteal -m "$(PLAIN) and slow"

# What an ordinary user may not: to mount, to become others, to make namespaces.
test-rights: $(READY)
	$(PYTEST) -n 3 --dist worksteal -m "rights and $(PLAIN) and not slow"

# The two commands as strangers run them, each way in a fresh clone of what is committed: hours.
strangers:
	$(PYTHON) tools/strangers.py $(WAYS)

# A real TensorFlow on two logical CPU devices: 1.6 GB, in an environment of its own.
test-tensorflow: $(READY) $(TENSORFLOW)/.ready
	$(BIN)/pytest -n 2 tests/tensorflow -m tensorflow

# Notebooks, submitit, pipx, uv and pre-commit, with saferun in an environment without torch.
test-ecosystem: $(READY) $(ECOSYSTEM)/.ready
	$(BIN)/pytest tests/ecosystem -m "ecosystem and not slow"

# The same with Ray, whose own start gives up on a busy machine; not in CI.
test-ray: $(READY) $(RAY)/.ready
	$(BIN)/pytest tests/ecosystem -m "ecosystem and slow"

# The page of `saferun runs report`, and the site where `make docs` has made it, in a headless
# Chromium, which is skipped where there is none (apt-get install chromium), and axe-core, which a
# package carries.
test-browser: $(READY) $(AXE)/.ready
	$(BIN)/pytest tests/browser -m browser

# Slurm on three nodes of this machine. Needs root, and:
# apt-get install --no-install-recommends slurm-wlm munge
test-slurm: $(READY)
	$(BIN)/pytest tests/slurm -m slurm

# Those of them that do not wait for Slurm's own timers: a minute.
quick-slurm: $(READY)
	$(BIN)/pytest tests/slurm -m "slurm and not slow"

bench: $(READY)
	$(BIN)/python benchmarks/launch.py
	$(BIN)/python benchmarks/inject.py

# The same jobs under other launchers, which have an environment of their own. It takes long: KINDS
# names rows of the mitigation table.
bench-peers: $(READY) $(PEERS)/.ready
	$(BIN)/python benchmarks/peers.py --peers $(PEERS) $(KINDS)

# Which changes of the diagnosis does no test notice? ONLY='saferun.diagnosis.deciding.retry_policy.*' is one
# file's; then `$(MUTANTS)/bin/mutmut results`, and `show NAME`. Not in CI.
ONLY ?= *
mutants: $(MUTANTS)/.ready
	$(MUTANTS)/bin/mutmut run --max-children 1 '$(ONLY)'

# Random and broken inputs for what reads them.
SECONDS ?= 600
fuzz: $(READY)
	$(BIN)/python tools/fuzz.py --seconds $(SECONDS)

# The documents as a site, in out/site; a broken link is an error.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(DOCS)/bin/mkdocs build

# The pictures of README.md, made anew: one crash under torchrun and under saferun, and a report,
# which needs a Chromium. The check runs the crash again and compares; not in CI.
pictures: $(READY)
	$(BIN)/python tools/pictures.py

check-pictures: $(READY)
	$(BIN)/python tools/pictures.py --check

# One install for all: the constraints pin torch, whose registry build for GPUs is gigabytes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,lint]"
	touch $(READY)

# tf_keras, which is Keras 2, asks for the TensorFlow with GPU support: another gigabyte, not needed.
$(TENSORFLOW)/.ready: constraints-tensorflow.txt
	$(PYTHON) -m venv $(TENSORFLOW)
	$(TENSORFLOW)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-tensorflow.txt tensorflow-cpu
	$(TENSORFLOW)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-tensorflow.txt --no-deps tf_keras
	touch $(TENSORFLOW)/.ready

$(ECOSYSTEM)/.ready: pyproject.toml constraints-ecosystem.txt
	$(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-ecosystem.txt -e . ipykernel nbclient submitit pipx uv debugpy viztracer opentelemetry-distro
	touch $(ECOSYSTEM)/.ready

$(RAY)/.ready: pyproject.toml constraints-ecosystem.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-ecosystem.txt -e . ray
	touch $(RAY)/.ready

$(DOCS)/.ready: constraints-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-docs.txt mkdocs-material click pyyaml filelock
	touch $(DOCS)/.ready

# Its file alone: the package is for another way to drive a browser.
$(AXE)/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(AXE) axe-playwright-python==0.1.8
	touch $(AXE)/.ready

# dlrover needs grpcio and protobuf, and does not say so.
$(PEERS)/.ready: constraints-peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-peers.txt nvidia-resiliency-ext accelerate dlrover grpcio protobuf lm-resiliency 'ray[train]'
	touch $(PEERS)/.ready

# saferun itself is read from mutants/src; of what it needs, torch is needed by no test of this room.
$(MUTANTS)/.ready:
	$(PYTHON) -m venv $(MUTANTS)
	$(MUTANTS)/bin/python -m pip install --quiet --disable-pip-version-check mutmut==3.8.1 pytest pytest-timeout pytest-xdist hypothesis click pyyaml filelock
	touch $(MUTANTS)/.ready

clean:
	rm -rf $(VENV) $(TENSORFLOW) $(DOCS) $(ECOSYSTEM) $(RAY) $(AXE) $(PEERS) $(MUTANTS) mutants out
