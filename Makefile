# make help lists what there is.
PREFIX ?= /usr/local
.DEFAULT_GOAL := help
PYTEST_OPTIONS ?=
# tests wait as much as they compute: two workers for each processor
WORKERS ?= $(shell echo $$(( $$(nproc) * 2 )))
FUZZ_SECONDS ?= 600

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: ## run a real container with runc through ocigpu-runtime and show it seeing its GPUs
	@packaging/bootstrap.sh demo
	@.venv/bin/ocigpu demo

demo-tenants: ## a tenancy, a container with two GPUs and back, a failed firmware check: the parts for tenants in a minute
	@packaging/bootstrap.sh test
	@.venv/bin/python tests/demo_tenants.py

test: ## pass the test suite: lint, types, unit, real runtimes and engines; of each product a choice of rows
	@packaging/bootstrap.sh test
	@.venv/bin/python -m pytest -n $(WORKERS) $(PYTEST_OPTIONS)

test-all: ## pass the whole suite: make test, packages and wheels, and every row of every product
	@packaging/bootstrap.sh test
	@.venv/bin/python -m pytest -n $(WORKERS) --rows all $(PYTEST_OPTIONS)

test-pythons: ## pass the tests that need no root and no engine on every Python from 3.11 on that is here, or in Debian 13 and unstable (PYTHONS=FILES)
	@WORKERS=$(WORKERS) packaging/pythons.sh $(PYTEST_OPTIONS)

bench: ## measure ocigpu against bare runc (PEER_DIR=DIR: NVIDIA's programs beside; WRITE=1: the page in bench/, README)
	@SNAPSHOT=$${SNAPSHOT-yes} packaging/bootstrap.sh demo
	@$(if $(PEER_DIR),PEER_DIR='$(PEER_DIR)') .venv/bin/python -m bench $(if $(WRITE),--write) $(BENCH_OPTIONS)

load: ## 2,000 containers in sequence and 64 at once in each mode; nothing may fail or be left (REPORT=FILE)
	@packaging/bootstrap.sh demo
	@.venv/bin/python -m bench.load $(if $(REPORT),--report '$(REPORT)') $(LOAD_OPTIONS)

fleet: ## a model of 100 servers with 8 GPUs in front of the real service: rates, memory, times, a cut network (FLEET_OPTIONS='--nodes 1000 --no-agents')
	@packaging/bootstrap.sh demo
	@.venv/bin/python -m bench.fleet $(FLEET_OPTIONS)

fuzz: ## fuzz every reader of foreign data, two at a time (TARGET=NAME: one; FUZZ_SECONDS=600 for each)
	@packaging/bootstrap.sh demo
	@.venv/bin/python -c 'import atheris' 2>/dev/null || \
	  .venv/bin/pip install --quiet --disable-pip-version-check $(OCIGPU_PIP_OPTIONS) 'atheris>=2.3'
	@.venv/bin/python -m fuzz --seconds '$(FUZZ_SECONDS)' $(TARGET)

security: ## the battery of hostile images in full: every way in all surroundings, 10,000 races of each kind, 100,000 starts; whether Debian has a newer Python or musl than packages carry
	@packaging/bootstrap.sh test
	@OCIGPU_SECURITY=full .venv/bin/python -m pytest tests/security tests/test_snapshot.py -n logical --rows all --timeout=1800 $(PYTEST_OPTIONS)
	@made=$$(packaging/snapshot/build.sh "$$(packaging/find-python.sh)") && .venv/bin/python packaging/snapshot/newest.py "$$made"

cluster-test: ## judge manifests, policies, roles, drivers and the chart by a real Kubernetes: name its programs (CONTRIBUTING.md)
	@tests/grounds/cluster.sh

test-grounds: ## boot Debian 13 and unstable beside this system, install the package there, try every engine (GROUND=trixie)
	@tests/grounds/run.sh $(if $(GROUND),$(GROUND),trixie sid)

test-arm64: ## build package and wheel for arm64 and run them in virtual machines, with 4 and 16 KiB pages (MACHINE=arm64)
	@tests/machines/run.sh arm64 $(MACHINE)

test-kernels: ## run package and wheel in virtual machines with Linux 5.10, 6.1, 6.12 and unstable's (MACHINE=5.10)
	@tests/machines/run.sh kernels $(MACHINE)

gpu-test: ## on a machine with an NVIDIA driver: run real GPU work in containers, write docs/REAL-GPU.md
	@packaging/gpu-test.sh

install: ## install into PREFIX (/usr/local); VENDOR_NAMES=1 adds NVIDIA's names, WITH_SYSTEMD=1 units, WITH_KUBERNETES=1 its libraries
	@packaging/bootstrap.sh install
	@packaging/install.sh --prefix '$(PREFIX)' $(if $(CONFIG),--config '$(CONFIG)') $(if $(VENDOR_NAMES),--vendor-names) $(if $(WITH_SYSTEMD),--systemd) $(if $(WITH_KUBERNETES),--kubernetes)

deb: ## build the packages for Debian and its relatives, in build/packages
	@packaging/bootstrap.sh deb
	@packaging/package.sh deb

rpm: ## build the packages for Fedora and its relatives, in build/packages
	@packaging/bootstrap.sh rpm
	@packaging/package.sh rpm

image: ## build the image of the Kubernetes pods as an archive in build/, without a registry (IMAGE=NAME)
	@packaging/bootstrap.sh image
	@packaging/kubernetes/image.sh

release: ## build what a release consists of in build/release/VERSION, with apt and dnf repositories (VERSION=, KEY=FINGERPRINT, SUITES=)
	@packaging/release.sh '$(VERSION)'

uninstall: ## remove what make install put into PREFIX
	@packaging/install.sh --prefix '$(PREFIX)' --uninstall

docs: ## write the pages of docs/ that are made of the program: SETTINGS, METRICS, DOCTOR
	@.venv/bin/python packaging/documents.py docs

site: ## build the site of docs/ in build/site, with a page for each command, error code and message (SITE_URL=URL)
	@packaging/site.sh

casts: ## record demo, top and doctor as the README's moving pictures (as root)
	@packaging/bootstrap.sh test
	@.venv/bin/python packaging/casts.py

protocols: ## generate the modules of the kubelet's interfaces from ocigpu/kubernetes/api/*.proto
	@.venv/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. ocigpu/kubernetes/api/*.proto

format: ## format and fix the sources
	@.venv/bin/ruff format -q . && .venv/bin/ruff check -q --fix .

clean: ## remove what the targets above made in this directory
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help demo demo-tenants test test-all test-pythons bench load fleet fuzz security cluster-test test-grounds test-arm64 test-kernels gpu-test install deb rpm image release uninstall docs site protocols format clean
