# `make` lists the targets. Each target makes its own set-up.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(CURDIR)/build/etcd:$(CURDIR)/build/helm:$(PATH)
# Tests start hundreds of processes, which must not all compile the bytecode again.
unexport PYTHONDONTWRITEBYTECODE
PROTOS := $(shell find protos/baton protos/apache protos/keda -name '*.proto')
ETCD_PROTOS := $(shell find protos/batonmq_server -name '*.proto')
SETUP := $(VENV)/.installed
# What the demo and a local cluster need; all of it is part of the whole set-up.
LOCAL := $(or $(wildcard $(SETUP)),$(VENV)/.local)
MAIN ?= main

.NOTPARALLEL:
.PHONY: help setup local lock fmt lint types layers proto proto-check breaking test quick pythons coverage audit quick-e2e sim e2e long spark spark-demo faults fuzz clients kombu check bench bench-quick bench-peers demo examples docs up clean \
  etcd helm observe wheels images k8s kind-up kind-down kind-test minikube-up minikube-down minikube-test e2e-containers

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

lock: $(SETUP)  ## lock the newest allowed versions in requirements.lock and deploy/images
	$(LOCK) --extra prometheus --extra redis --extra sql --extra avro --extra pydantic --extra celery --extra backup --extra local --group dev $(PROJECTS) -o requirements.lock
	$(LOCK_IMAGE) --extra local --group build $(foreach name,$(UNUSED),--no-emit-package $(name)) \
	  pyproject.toml services/pyproject.toml -o local.lock
	$(LOCK_IMAGE) services/pyproject.toml -o deploy/images/services.lock
	$(LOCK_IMAGE) spark-jobs/pyproject.toml -o deploy/images/spark.lock
	$(LOCK_IMAGE) --no-deps deploy/images/demo.in -o deploy/images/demo.lock
	$(LOCK_IMAGE) --group pyproject.toml:peers -o bench/peers/requirements.lock
	$(LOCK_IMAGE) --group pyproject.toml:clients -o tests/gateway/clients/python/requirements.lock

fmt: $(SETUP)   ## rewrite code to the house format
	ruff check --fix --quiet . && ruff format --quiet . && buf format -w

lint: $(SETUP) types layers proto-check ## style of Python and protos, types, layers, generated code
	ruff format --check . && ruff check . && buf lint && buf format -d --exit-code

types: $(SETUP) ## mypy, strict, package, tests and examples
	mypy && mypy tests bench examples tools --explicit-package-bases

layers: $(SETUP) ## check which package may import which
	lint-imports

proto: $(SETUP) ## regenerate gen/ and services/etcd_api/ from protos/
	rm -rf gen services/etcd_api/*_pb2* && mkdir gen
	python -m grpc_tools.protoc -I protos --python_out=gen --grpc_python_out=gen \
	  --mypy_out=quiet:gen --mypy_grpc_out=quiet:gen $(PROTOS)
	python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. \
	  --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(ETCD_PROTOS)

proto-check: $(SETUP) ## check that gen/ and services/etcd_api/ match protos/
	rm -rf .gen-check && mkdir .gen-check
	python -m grpc_tools.protoc -I protos --python_out=.gen-check --grpc_python_out=.gen-check \
	  --mypy_out=quiet:.gen-check --mypy_grpc_out=quiet:.gen-check $(PROTOS)
	diff -r -x __pycache__ gen .gen-check
	python -m grpc_tools.protoc -I protos --python_out=.gen-check --grpc_python_out=.gen-check \
	  --mypy_out=quiet:.gen-check --mypy_grpc_out=quiet:.gen-check $(ETCD_PROTOS)
	diff -r -x __pycache__ -x __init__.py services/etcd_api .gen-check/batonmq_server/etcd_api
	rm -rf .gen-check

breaking: $(SETUP) ## check that protos/ is compatible with MAIN (default main)
	buf breaking --against '.git#ref=$(MAIN)'

# Tests in memory run beside those that wait for processes; a session for each would collect all tests twice. What only
# computes comes after them, with a worker per core. More workers only make every process late. `make -k test` goes on
# after a session that fails.
PYTEST = pytest -q --dist loadfile --no-loadscope-reorder --durations=20 $(if $(CI),--required)
test: quick-e2e sim spark ## what CI runs: every kind of test, in 18 minutes on two cores

# No test that waits for another process: six minutes on two cores.
QUICK := not sim and not e2e and not spark and not etcd
quick: $(SETUP) ## unit and in-process tests only: the inner loop
	$(PYTEST) -n 3 -m "$(QUICK)"

pythons: $(SETUP) ## tests of the client library on every supported Python of this machine; PYTHONS=3.13 for one
	python -m tools.pythons $(PYTHONS)

E2E := (e2e or etcd) and not spark
e2e: $(SETUP)   ## real processes only, also those that need only an etcd
	$(PYTEST) -n 3 -m "$(E2E) and not long"

quick-e2e: $(SETUP) ## what `make quick` and `make e2e` run, in one session
	$(PYTEST) -n 4 -m "$(QUICK) or ($(E2E) and not long)"

sim: $(SETUP)   ## seeded cluster simulations only
	$(PYTEST) -n 2 -m "sim and not long" tests/simulation

spark: $(SETUP) ## tests of the sources, sinks and jobs of Spark; uses JAVA_HOME or the JVM of a wheel
	$(PYTEST) -n 2 -m "spark and not long" tests/spark

long: $(SETUP)  ## what `make test` leaves out: long tests, and simulations of 200 seeds
	$(PYTEST) -n 3 -m "$(E2E) and long"
	$(PYTEST) -n 2 -m "spark and long" tests/spark
	BATON_SIM_SEEDS=200 $(PYTEST) -n 2 -m sim tests/simulation

spark-demo: $(SETUP) ## run the demo with the Spark jobs and check their results
	python spark-jobs/demo.py

faults: $(SETUP) ## inject faults for BATON_FAULT_MINUTES, drawn from BATON_FAULT_SEED; SCHEDULE=power-cuts for one class; report in build/faults
	python -m tools.faults $(SCHEDULE)

fuzz: $(SETUP)  ## 20,000 arbitrary calls to each service and 50,000 to the gateway; every failure has a reason, sends go on
	python -m tools.fuzz
	BATON_FUZZ_CALLS=50000 pytest -q -s tests/gateway/test_hostile_calls.py

# CLIENTS=java leaves out the others. The compilers must be on PATH: mvn and javac, cargo, go.
CLIENTS := java rust go
OFFICIAL := contract official_clients official_restarts stub_example access
clients: $(SETUP) ## official clients of more languages, pinned: with every other one, all they can do, TLS, restarts
	BATON_CLIENTS="$(CLIENTS)" pytest -q -rs --durations=0 --durations-min=1 $(OFFICIAL:%=tests/gateway/test_%.py) \
	  -k "every_producer or contract or stub or crate or use_tls $(CLIENTS:%=or [%])"

kombu: $(SETUP) ## Kombu's own tests of transports, of its source distribution, with a local cluster
	mkdir -p build/kombu
	test -d build/kombu/t || (python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary kombu \
	  --no-build-isolation --require-hashes -r tools/kombu_suite/requirements.txt -d build/kombu \
	  && tar xzf build/kombu/kombu-*.tar.gz -C build/kombu --strip-components=1)
	python -m tools.kombu_suite build/kombu

coverage: $(SETUP) ## lines and branches covered by the quick tests, per folder
	coverage erase
	$(PYTEST) -n 3 -m "$(QUICK)" --cov --cov-report=
	python -m tools.coverage_by_folder

audit: $(SETUP) ## known vulnerabilities of the locked dependencies
	uvx pip-audit@2.10.1 --require-hashes --disable-pip --requirement requirements.lock

check: lint k8s test ## what CI runs

bench: $(SETUP) ## benchmarks; results in bench/results.json and docs/explanation/performance.md
	python -m bench

bench-quick: $(SETUP) ## CPU time of a message in under two minutes; ARGS='--json FILE', then python -m bench.compare
	python -m bench.quick $(ARGS)

bench-peers: $(SETUP) ## the same work with Kafka, RocketMQ and NATS, which are downloaded; ARGS='--json FILE'
	python -m bench.peers $(ARGS)

demo: $(LOCAL)  ## a real data set, moving queues, nothing lost, nothing twice
	baton demo

examples: $(SETUP) ## run every program in examples/ on a local cluster
	python examples

docs: $(SETUP)  ## build the documentation as a site with search and the API reference, in build/site
	python -m tools.docs.site && echo build/site/index.html

up: $(LOCAL)    ## a cluster on loopback ports, until Ctrl-C
	baton up --data-dir .data

etcd:           ## a newer etcd than the package index has, built with Go; the other targets then use it
	mkdir -p build/etcd
	cd tools/etcd && CGO_ENABLED=0 go build -trimpath -o ../../build/etcd/etcd go.etcd.io/etcd/server/v3
	build/etcd/etcd --version

# As its releases are built: without these flags it takes a cluster for Kubernetes 1.20.
HELM := helm.sh/helm/v3
HELM_FLAGS = -s -w -X $(HELM)/internal/version.version=$$(go list -f '{{.Version}}' -m $(HELM)) \
  $(foreach package,chartutil lint/rules,-X $(HELM)/pkg/$(package).k8sVersionMajor=1 -X $(HELM)/pkg/$(package).k8sVersionMinor=37)
helm:           ## the program of Helm, built with Go, for `make k8s` and the tests of the chart
	mkdir -p build/helm
	cd tools/helm && CGO_ENABLED=0 go build -trimpath -ldflags "$(HELM_FLAGS)" -o ../../build/helm/helm $(HELM)/cmd/helm
	build/helm/helm version --short

observe: $(SETUP) ## check rules with promtool, and every dashboard query with a Prometheus, if they are installed
	cd deploy/prometheus && if command -v promtool >/dev/null; \
	then promtool check config prometheus.yml && promtool test rules alerts_test.yaml; \
	else echo "promtool skipped: not found (Debian: apt-get install prometheus)"; fi
	pytest -q -rs tests/deploy/test_alerts.py tests/deploy/test_dashboards.py tests/deploy/test_live_metrics.py \
	  tests/local/test_prometheus.py tests/spark/test_app.py

wheels: $(SETUP) ## the three distributions, into dist/
	rm -rf dist
	for project in . services spark-jobs; do \
	  python -m build --wheel --no-isolation --outdir dist $$project >/dev/null; done
	ls -l dist

images: $(SETUP) ## container images, on BASE_IMAGE; WITH_SPARK=1 and WITH_ETCD=1 add images of Spark and etcd
	deploy/images/build.sh

k8s: $(SETUP)   ## render and validate every overlay, combination of components and case of the chart; check the scripts
	if ! command -v helm >/dev/null && command -v go >/dev/null; then $(MAKE) helm || true; fi
	python -m tools.manifests.check $(if $(CI),--required)
	if command -v shellcheck >/dev/null; then shellcheck deploy/*/*.sh deploy/k8s/scripts/*.sh .ci/run; \
	else echo "shellcheck skipped: not found"; test -z "$(CI)"; fi

kind-up:        ## make a kind cluster with BatonMQ, after `make images`; SECURE=1: TLS and access control
	deploy/kind/up.sh

kind-down:      ## delete the kind cluster
	deploy/kind/down.sh

kind-test:      ## run the demo in it, then delete every pod in turn under traffic
	deploy/k8s/scripts/test.sh kind-baton kind$(if $(SECURE),-secure)

minikube-up:    ## the same with minikube
	deploy/minikube/up.sh

minikube-down:
	deploy/minikube/down.sh

minikube-test:
	deploy/k8s/scripts/test.sh baton minikube$(if $(SECURE),-secure)

e2e-containers: $(SETUP) ## kill, pause and cut off containers under load; PAGE=1 writes docs/reference/containers.md
	python -m tools.containers $(if $(PAGE),--page)

clean:          ## delete everything that the other targets have made
	rm -rf $(VENV) .data .gen-check build .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
