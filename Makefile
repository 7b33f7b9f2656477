# Everything runs from a virtual environment in .venv, made once; `make clean` removes it.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test slow fuzz parity parity-table faults launchers bench gpu lint clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     set up, train a small model on real text with two processes, evaluate it, sample from it"
	@echo "make test     set up, run the tests"
	@echo "make slow     the tests that take too long for every day: a killed server, a browser on MLflow's page, full disks (12 minutes)"
	@echo "make fuzz     10,000 damaged files and recipes through the real loaders, and a table of what became of them (10 minutes)"
	@echo "make parity   every strategy against the single process, the whole product of options (long)"
	@echo "make parity-table  the same rows, and docs/parity.md from what they measured; goes on where it was killed (hours)"
	@echo "make faults   kills a job at drawn moments, 66 times, and compares its end: benchmarks/results/faults-cpu.md (30 minutes)"
	@echo "make launchers  jobs on several machines of this one's making: a real Slurm, mpirun, ssh (as root, on Debian or Ubuntu)"
	@echo "make bench    the cost of a step beside a plain PyTorch loop's (long)"
	@echo "make gpu      on a machine with an NVIDIA GPU: its tests and all benchmarks, into a folder of logs (15 minutes)"
	@echo "make lint     style and types"
	@echo "make clean    remove .venv"

.venv/.installed: pyproject.toml
	@echo "== setting up: a virtual environment in .venv, and echelon with what its tests need"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

.venv/.linters: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[lint]'
	@touch $@

demo: .venv/.installed
	@echo "== training a small Llama on the source of Python's standard library, on two processes"
	$(BIN)/echelon train recipes/demo.yaml --nproc 2
	@echo "== evaluating it on the text that was held out"
	$(BIN)/echelon eval runs/demo
	@echo "== sampling from it"
	$(BIN)/echelon generate runs/demo --prompt 'def read(' --max-tokens 120
	@echo "== the run, with its plan, metrics and checkpoints, is in runs/demo"

test: .venv/.installed
	@echo "== running the tests: units, then real processes over gloo"
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.venv/.slow: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[slow]'
	@touch $@

slow: .venv/.slow
	@echo "== running the tests that are marked slow, but for the product of strategies"
	$(BIN)/python -m pytest tests/dist tests/docs tests/unit -m slow

fuzz: .venv/.installed
	@echo "== loading 10,000 damaged files and recipes: a clean refusal each, or the right value"
	$(BIN)/python -m pytest tests/fuzz -m slow --show-capture=no

parity: .venv/.installed
	@echo "== comparing every strategy with the single process"
	$(BIN)/python -m pytest tests/parity -m "not gpu"

PARITY_RESULTS := benchmarks/results/parity-cpu.jsonl

parity-table: .venv/.installed
	@echo "== measuring what is not yet in $(PARITY_RESULTS), then writing docs/parity.md"
	$(BIN)/python -m pytest tests/parity -m "not gpu" --publish $(PARITY_RESULTS); status=$$?; \
	$(BIN)/python benchmarks/parity_table.py $(PARITY_RESULTS) && exit $$status

faults: .venv/.installed
	@echo "== killing jobs in every phase, and comparing them with those that were never interrupted"
	$(BIN)/python -m pytest tests/faults -v -m "slow or not slow"

# What the tests of launchers start besides Python.
LAUNCHER_PACKAGES := slurmctld slurmd slurm-client munge openmpi-bin openssh-server iproute2

launchers: .venv/.installed
	@missing=; for program in slurmctld slurmd sbatch munged mpirun sshd ip; do \
	    PATH="$$PATH:/usr/sbin" command -v $$program > /dev/null || missing="$$missing $$program"; \
	done; \
	if [ "$$(id -u)" != 0 ]; then \
	    echo "== not root: what needs daemons or network namespaces is skipped"; \
	elif [ -n "$$missing" ] && command -v apt-get > /dev/null; then \
	    echo "== installing $(LAUNCHER_PACKAGES)"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
	        $(LAUNCHER_PACKAGES) > /dev/null; \
	elif [ -n "$$missing" ]; then \
	    echo "== missing, and skipped what needs it:$$missing"; \
	fi
	@echo "== launching jobs, each by the real thing"
	$(BIN)/python -m pytest tests/launchers -m slow -rs

bench: .venv/.installed
	@echo "== timing echelon's step beside a plain loop's"
	$(BIN)/python benchmarks/overhead.py

gpu: .venv/.installed
	@echo "== running the tests marked gpu, and the benchmarks, on this machine's GPUs"
	PYTHON=$(BIN)/python benchmarks/gpu.sh

lint: .venv/.linters
	@echo "== checking style and types"
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

clean:
	rm -rf .venv
