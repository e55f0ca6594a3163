# `make` lists the verbs; each is one thing CI also runs. Every verb does its own set-up.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(CURDIR)/build/etcd:$(PATH)
# Tests start hundreds of processes: none of them should compile everything anew.
unexport PYTHONDONTWRITEBYTECODE
PROTOS := $(shell find protos/baton -name '*.proto')
ETCD_PROTOS := $(shell find protos/batonmq_server -name '*.proto')
SETUP := $(VENV)/.installed
# What the demo and a local cluster need; all of it is part of the whole set-up.
LOCAL := $(or $(wildcard $(SETUP)),$(VENV)/.local)
MAIN ?= main

.PHONY: help setup local lock fmt lint types layers proto proto-check breaking test quick pythons coverage audit sim e2e spark spark-demo faults check bench demo examples docs up clean \
  etcd observe wheels images k8s kind-up kind-down kind-test minikube-up minikube-down minikube-test e2e-containers

help:           ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

setup: $(SETUP) ## virtual environment with all locked dependencies and this project

PROJECTS := pyproject.toml services/pyproject.toml spark-jobs/pyproject.toml
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed")'
	$(PYTHON) -m venv $(VENV)

$(SETUP): requirements.lock $(PROJECTS) | $(VENV)/bin/python
	$(PIP) --require-hashes -r requirements.lock
	$(PIP) --no-build-isolation -e . -e services -e spark-jobs
	touch $@

$(VENV)/.local: local.lock pyproject.toml services/pyproject.toml | $(VENV)/bin/python
	$(PIP) --require-hashes -r local.lock
	$(PIP) --no-build-isolation -e . -e services
	touch $@

local: $(LOCAL) ## virtual environment of a local cluster and the demo only: small, in seconds

LOCK = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --custom-compile-command 'make lock' \
  --no-emit-package batonmq --no-emit-package batonmq-server
# Dependencies of the data set's package; the demo reads its file only.
UNUSED := pandas python-dateutil pytz tzdata six
LOCK_IMAGE = $(LOCK) --constraint requirements.lock

lock: $(SETUP)  ## choose newest allowed versions anew, into requirements.lock
	$(LOCK) --extra prometheus --extra redis --extra sql --extra local --group dev $(PROJECTS) -o requirements.lock
	$(LOCK_IMAGE) --extra local --group build $(foreach name,$(UNUSED),--no-emit-package $(name)) \
	  pyproject.toml services/pyproject.toml -o local.lock
	$(LOCK_IMAGE) services/pyproject.toml -o deploy/images/services.lock
	$(LOCK_IMAGE) spark-jobs/pyproject.toml -o deploy/images/spark.lock
	$(LOCK_IMAGE) --no-deps deploy/images/demo.in -o deploy/images/demo.lock

fmt: $(SETUP)   ## rewrite code to the house format
	ruff check --fix --quiet . && ruff format --quiet . && buf format -w

lint: $(SETUP) types layers proto-check ## style of Python and protos, types, layers, generated code
	ruff format --check . && ruff check . && buf lint && buf format -d --exit-code

types: $(SETUP) ## mypy, strict, package, tests and examples
	mypy && mypy tests bench examples tools --explicit-package-bases

layers: $(SETUP) ## who may import whom
	lint-imports

proto: $(SETUP) ## regenerate gen/ and services/etcd_api/ from protos/
	rm -rf gen services/etcd_api/*_pb2* && mkdir gen
	python -m grpc_tools.protoc -I protos --python_out=gen --grpc_python_out=gen \
	  --mypy_out=quiet:gen --mypy_grpc_out=quiet:gen $(PROTOS)
	python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. \
	  --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(ETCD_PROTOS)

proto-check: $(SETUP) ## gen/ and services/etcd_api/ are what protos/ says
	rm -rf .gen-check && mkdir .gen-check
	python -m grpc_tools.protoc -I protos --python_out=.gen-check --grpc_python_out=.gen-check \
	  --mypy_out=quiet:.gen-check --mypy_grpc_out=quiet:.gen-check $(PROTOS)
	diff -r -x __pycache__ gen .gen-check
	python -m grpc_tools.protoc -I protos --python_out=.gen-check --grpc_python_out=.gen-check \
	  --mypy_out=quiet:.gen-check --mypy_grpc_out=quiet:.gen-check $(ETCD_PROTOS)
	diff -r -x __pycache__ -x __init__.py services/etcd_api .gen-check/batonmq_server/etcd_api
	rm -rf .gen-check

breaking: $(SETUP) ## no contract of MAIN (default main) is broken
	buf breaking --against '.git#ref=$(MAIN)'

# Half of the tests wait for something most of their time: four workers keep two cores busy.
test: $(SETUP)  ## every test that CI runs, on two cores
	pytest -q -n 4 --dist loadfile --no-loadscope-reorder $(if $(CI),--required)

# Nothing that waits for another process: under three minutes on two cores.
QUICK := not sim and not e2e and not spark and not etcd
quick: $(SETUP) ## unit and in-process tests only: the inner loop
	pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "$(QUICK)"

pythons: $(SETUP) ## the tests of the client library on every supported Python of this machine
	python -m tools.pythons

sim: $(SETUP)   ## seeded cluster simulations only
	pytest -q -m sim

e2e: $(SETUP)   ## real processes only
	pytest -q -m e2e

spark: $(SETUP) ## sources, sinks and jobs of Spark; needs a JVM, or takes that of a wheel
	pytest -q -n 2 --dist loadscope tests/spark

spark-demo: $(SETUP) ## the demo with the jobs of Spark beside it, and whether what they say is true
	python spark-jobs/demo.py

faults: $(SETUP) ## faults of every kind, drawn from BATON_FAULT_SEED, for BATON_FAULT_MINUTES, into build/faults
	python -m tools.faults

coverage: $(SETUP) ## lines and branches that the fast tests reach, per folder
	coverage erase
	pytest -q -n 3 -m "$(QUICK)" --cov --cov-report= tests
	python -m tools.coverage_by_folder

audit: $(SETUP) ## known vulnerabilities of the locked dependencies
	uvx pip-audit@2.10.1 --require-hashes --disable-pip --requirement requirements.lock

check: lint k8s test ## what CI runs

bench: $(SETUP) ## how fast it is on this machine, into bench/results.json and docs/explanation/performance.md
	python -m bench

demo: $(LOCAL)  ## the main job: a real data set, moving queues, nothing lost, nothing twice
	baton demo

examples: $(SETUP) ## every program in examples/, on a cluster of its own
	python examples

docs: $(SETUP)  ## this documentation as a site with search and the API reference, into build/site
	python -m tools.docs.site && echo build/site/index.html

up: $(LOCAL)    ## a cluster on loopback ports, until Ctrl-C
	baton up --data-dir .data

etcd:           ## a newer etcd than the package index has, built with Go; the other verbs then use it
	mkdir -p build/etcd
	cd tools/etcd && CGO_ENABLED=0 go build -trimpath -o ../../build/etcd/etcd go.etcd.io/etcd/server/v3
	build/etcd/etcd --version

observe: $(SETUP) ## rules and dashboards: promtool's verdict, every query asked of a Prometheus; skipped where it is not
	cd deploy/prometheus && if command -v promtool >/dev/null; \
	then promtool check config prometheus.yml && promtool test rules alerts_test.yaml; \
	else echo "promtool skipped: it is not here (Debian: apt-get install prometheus)"; fi
	pytest -q -rs tests/deploy/test_alerts.py tests/deploy/test_dashboards.py tests/deploy/test_live_metrics.py \
	  tests/local/test_prometheus.py tests/spark/test_app.py

wheels: $(SETUP) ## the three distributions, into dist/
	rm -rf dist
	for project in . services spark-jobs; do \
	  python -m build --wheel --no-isolation --outdir dist $$project >/dev/null; done
	ls -l dist

images: $(SETUP) ## container images, on BASE_IMAGE; WITH_SPARK=1 and WITH_ETCD=1 for those as well
	deploy/images/build.sh

k8s: $(SETUP)   ## every overlay and combination of components, rendered and validated; the scripts, too
	python -m tools.manifests.check $(if $(CI),--required)
	if command -v shellcheck >/dev/null; then shellcheck deploy/*/*.sh deploy/k8s/scripts/*.sh .ci/run; \
	else echo "shellcheck skipped: it is not here"; test -z "$(CI)"; fi

kind-up:        ## a cluster of kind with BatonMQ in it; after `make images`; SECURE=1: TLS and access
	deploy/kind/up.sh

kind-down:      ## without a trace
	deploy/kind/down.sh

kind-test:      ## the demo in it; then every pod is deleted in turn while messages flow
	deploy/k8s/scripts/test.sh kind-baton kind$(if $(SECURE),-secure)

minikube-up:    ## the same with minikube
	deploy/minikube/up.sh

minikube-down:
	deploy/minikube/down.sh

minikube-test:
	deploy/k8s/scripts/test.sh baton minikube$(if $(SECURE),-secure)

e2e-containers: $(SETUP) ## containers killed, paused and cut off under load, with TLS and access; PAGE=1 writes docs/reference/containers.md
	python -m tools.containers $(if $(PAGE),--page)

clean:          ## forget everything that was made here
	rm -rf $(VENV) .data .gen-check build .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
