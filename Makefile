# Cove. "make start" takes a fresh Debian or Ubuntu with Go to a running
# server; "make help" lists the rest. Long steps say what they are doing.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Where the server of "make start" keeps its state and listens.
DATA   ?= $(or $(COVE_DATA),/var/lib/cove)
# Both are kept in DATA/cove.toml for the next start. LISTEN is 127.0.0.1:7777 if never given;
# SERVE_ARGS are flags of "cove serve": SERVE_ARGS='--ssh 127.0.0.1:7722 --queue-wait 5s'.
LISTEN ?=
SERVE_ARGS ?=
# Where "make install" puts it.
PREFIX ?= /usr/local
# make stop ALL=1 removes the sandboxes too. KEEP=1 is what is done anyway.
ALL    ?=
KEEP   ?=

GO      ?= go
TOOLS   := $(CURDIR)/.cache/tools
VENV    := .venv
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)

# Pinned tools: the same everywhere, upgraded on purpose.
STATICCHECK       := v0.8.2
BUF               := v1.60.0
PROTOC_GEN_GO     := v1.36.11
PROTOC_GEN_CONNECT := v1.21.0
PEBBLE            := v2.8.0

# The JavaScript SDK needs node 20, which older distributions do not have.
NODE := $(shell command -v npm >/dev/null && node -e 'process.exit(+process.versions.node.split(".")[0] >= 20 ? 0 : 1)' 2>/dev/null && echo e2e/e2b/node_modules/.package-lock.json)

# The gVisor that everything is built of: the pinned one with the places changed
# that cmd/runsc/edits names. Go builds without it, with go.mod alone, work too;
# only bin/runsc must have it. The same flags everywhere compile it once.
GVISOR := .cache/gvisor.mod
# And two numbers of Go's runtime, 1.4 MiB of each sandbox (cmd/runsc/edits/overlay.go). Its name
# has the Go in it: no other is built with it.
RUNTIME := .cache/runtime-$(subst $() ,,$(subst /,-,$(shell GOFLAGS= $(GO) env GOVERSION GOROOT 2>/dev/null))).json
override GOFLAGS := $(GOFLAGS) -trimpath '-modfile=$(CURDIR)/$(GVISOR)' '-overlay=$(CURDIR)/$(RUNTIME)'
export GOFLAGS
# CGO off: static binaries, and no C compiler needed.
export CGO_ENABLED := 0
GOBUILD := $(GO) build

export DATA LISTEN SERVE_ARGS ALL KEEP

.PHONY: build-compare help start stop down restart status install uninstall image image-test interpreter-image build test test-go test-python test-e2b test-adapters e2b-suite test-docs race lint bench soak soak-calls soak-ops soak-origins soak-tests compat proto deps test-deps clean FORCE

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

start: deps build $(VENV)/.sdk ## install what is missing, build, start the server, show a first sandbox
	@scripts/start.sh

stop: ## end the server; its sandboxes run on (ALL=1 removes them)
	@scripts/stop.sh

down: ## end the server and remove its sandboxes: the machine is as before
	@ALL=1 KEEP= scripts/stop.sh

restart: build ## a new server over the same sandboxes
	@ALL= scripts/stop.sh
	@scripts/start.sh

status: bin/cove ## doctor, and what the server runs
	@bin/cove doctor; bin/cove info

build: bin/cove bin/cove-guest bin/cove-sftp bin/runsc ## bin/cove, bin/cove-guest, bin/cove-sftp and the pinned bin/runsc

# Go knows better than make what has changed; an unchanged build takes a second.
bin/cove: FORCE | $(GVISOR)
	@mkdir -p bin
	@$(GOBUILD) -ldflags '-s -w -X main.version=$(VERSION)' -o $@ ./cmd/cove

# Of its code alone, not of the commit: a checkpoint goes on only with the guest
# that it was made with.
bin/cove-guest: FORCE | $(GVISOR)
	@mkdir -p bin
	@$(GOBUILD) -buildvcs=false -ldflags '-s -w' -o $@ ./cmd/cove-guest

bin/cove-sftp: FORCE | $(GVISOR)
	@mkdir -p bin
	@$(GOBUILD) -ldflags '-s -w' -o $@ ./cmd/cove-sftp

$(GVISOR): go.mod go.sum $(wildcard cmd/runsc/edits/*.go cmd/runsc/edits/add/*) $(if $(wildcard .cache/gvisor/go.mod),,FORCE) | $(RUNTIME)
	@GOFLAGS= $(GO) mod download gvisor.dev/gvisor
	@GOFLAGS= $(GO) run ./cmd/runsc/edits "$$(GOFLAGS= $(GO) list -m -f '{{.Dir}}' gvisor.dev/gvisor)" .cache/gvisor
	@cp go.sum .cache/gvisor.sum
	@{ cat go.mod; echo 'replace gvisor.dev/gvisor => ./.cache/gvisor'; } >$@.new && mv $@.new $@

$(RUNTIME): cmd/runsc/edits/overlay.go
	@mkdir -p .cache
	@GOFLAGS= $(GO) run ./cmd/runsc/edits -runtime "$$(GOFLAGS= $(GO) env GOROOT)" '$(CURDIR)/$@'

# Its version is go.mod's, and not of the commit: one that has not changed is not
# linked anew, nor is it another file for kernels that run.
bin/runsc: FORCE | $(GVISOR)
	@mkdir -p bin
	@[ -e $@ ] || echo 'building runsc from the pinned gVisor: one to two minutes the first time'
	@start=$$SECONDS; $(GOBUILD) -buildvcs=false -ldflags '-s -w' -o $@ ./cmd/runsc && { ((SECONDS-start < 5)) || echo "runsc built in $$((SECONDS-start)) s"; }

deps: ## install the system packages a server needs (apt; only what is missing)
	@scripts/deps.sh server

test-deps: ## install the system packages the tests need
	@scripts/deps.sh server test

# The virtual environment holds the SDK from this tree (editable). The stamps
# are redone when its list of dependencies changes.
$(VENV)/bin/python:
	@echo 'making $(VENV)'
	@python3 -m venv $(VENV)

$(VENV)/.sdk: $(VENV)/bin/python sdk/python/pyproject.toml
	@echo 'installing the Python SDK into $(VENV)'
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e sdk/python
	@touch $@

$(VENV)/.test: $(VENV)/.sdk
	@echo 'installing what the Python tests need'
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e 'sdk/python[test,lint]'
	@touch $@

install: build ## cove on PATH, what it needs beside it, and a systemd unit where there is systemd (PREFIX=/usr/local)
	install -d $(DESTDIR)$(PREFIX)/lib/cove $(DESTDIR)$(PREFIX)/bin
	install -m 0755 bin/cove bin/cove-guest bin/cove-sftp bin/runsc $(DESTDIR)$(PREFIX)/lib/cove/
	ln -sf ../lib/cove/cove $(DESTDIR)$(PREFIX)/bin/cove
	if [ -d $(DESTDIR)/etc/systemd/system ]; then sed 's|@PREFIX@|$(PREFIX)|' deploy/cove.service > $(DESTDIR)/etc/systemd/system/cove.service; fi

uninstall: ## take that away again (not the server's data)
	rm -f $(DESTDIR)$(PREFIX)/bin/cove $(DESTDIR)/etc/systemd/system/cove.service
	rm -rf $(DESTDIR)$(PREFIX)/lib/cove

# The context is built anew, so that nothing of before is in the image.
IMAGE ?= cove:$(VERSION)
image: build ## a container image of the server (IMAGE=cove:VERSION; docker, podman or buildah)
	@rm -rf .cache/image && $(MAKE) --no-print-directory -s install DESTDIR=$(CURDIR)/.cache/image PREFIX=/usr/local
	@scripts/image.sh .cache/image $(IMAGE)

image-test: build ## build the image with buildah and run a sandbox in it (root)
	@scripts/deps.sh server image
	@bin/cove image bootstrap --data .cache/base >/dev/null
	@scripts/image_test.sh

interpreter-image: build ## the template of the code interpreter that the tests start from (.cache/interpreter); "cove code setup" makes it on a server
	@scripts/deps.sh server
	@scripts/interpreter.sh

test: test-deps build $(TOOLS)/pebble $(VENV)/.test $(VENV)/.e2b $(NODE) $(VENV)-adapters/.installed ## everything: unit, integration on real gVisor, Python SDK
	@scripts/test.sh

test-go: test-deps build $(TOOLS)/pebble ## the Go tests alone (PKG=./cli/... for some)
	@scripts/test.sh go

test-python: test-deps build $(VENV)/.test ## the Python tests alone, unit and live
	@scripts/test.sh python

# The published E2B SDKs, pinned.
$(VENV)/.e2b: $(VENV)/.test e2e/e2b/requirements.txt
	@echo 'installing the E2B SDK for Python'
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r e2e/e2b/requirements.txt
	@touch $@

e2e/e2b/node_modules/.package-lock.json: e2e/e2b/package.json e2e/e2b/package-lock.json
	@echo 'installing the E2B SDK for JavaScript'
	@cd e2e/e2b && npm ci --silent --no-audit --no-fund

test-e2b: test-deps build $(VENV)/.e2b $(NODE) ## the published E2B SDKs against a real server
	@scripts/test.sh e2b

# The frameworks that cove.adapters serves, pinned, in an environment of their own.
$(VENV)-adapters/.installed: $(VENV)/.sdk e2e/adapters/requirements.txt e2e/adapters/requirements-alone.txt
	@echo 'installing inspect_ai, verifiers, mini-swe-agent, swe-rex, tinker-cookbook and harbor'
	@python3 -m venv $(VENV)-adapters
	@$(VENV)-adapters/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8,<1' # pip needs minutes for what they depend on
	@$(VENV)-adapters/bin/uv pip install --quiet --python $(VENV)-adapters -r e2e/adapters/requirements.txt -e sdk/python
	@$(VENV)-adapters/bin/uv pip install --quiet --python $(VENV)-adapters --no-deps --python-version 3.12 -r e2e/adapters/requirements-alone.txt
	@touch $@

test-adapters: test-deps build $(VENV)-adapters/.installed ## the adapters for RL and agent frameworks against a real server
	@scripts/test.sh adapters

# E2B_SUITE=DIR is a checkout of github.com/e2b-dev/E2B; without it, it is cloned. SUITE='python -k files' for some.
SUITE ?=
e2b-suite: test-deps build ## the public test suites of E2B's SDKs, unmodified, against a server in domain mode
	@scripts/e2b_suite.sh $(SUITE)

test-docs: test-deps build $(VENV)/.test ## the examples of README and docs alone, against a real server
	@scripts/test.sh docs

# How long, how many at a time, and how often the server is killed.
SOAK_SECONDS ?= 300
SOAK_CLIENTS ?= 8
SOAK_KILL    ?= 25
soak-ops: build $(VENV)/.test ## random operations while the server is killed (SOAK_SECONDS, SOAK_CLIENTS, SOAK_KILL)
	@scripts/with-server.sh $(VENV)/bin/python scripts/soak_ops.py --seconds $(SOAK_SECONDS) --clients $(SOAK_CLIENTS) --kill $(SOAK_KILL)

# What holds for fresh kernels, over children of one checkpoint and over reused kernels. About 20 minutes.
soak-origins: test-deps build $(VENV)/.test ## the hostile, crash, metamorphic and soak suites over shared-memory children and reused kernels
	@scripts/soak_origins.sh

soak-tests: test-deps build $(TOOLS)/pebble ## the Go suites that repeat themselves, with all their repetitions (CI makes some). About 30 minutes
	@COVE_SOAK=1 PKG='./e2e ./node/agent ./batch' scripts/test.sh go

compat: build ## the same suites beside and inside a sandbox; fails on what docs/compatibility.md does not list (COMPAT='test_os psutil')
	@scripts/deps.sh server
	@scripts/with-server.sh python3 scripts/compat.py $(COMPAT)

race: test-deps $(GVISOR) ## the race detector over what needs no gVisor (PKG='./server ./cas/...' for some)
	@scripts/race.sh $(PKG)

lint: $(TOOLS)/staticcheck-$(STATICCHECK) $(GVISOR) ## gofmt, go vet, staticcheck; ruff and mypy where installed
	@STATICCHECK=$< scripts/lint.sh

# What others run: gVisor as it is, with its own main.
$(TOOLS)/runsc-plain: go.mod go.sum
	@mkdir -p $(TOOLS)
	@GOFLAGS=-trimpath $(GOBUILD) -ldflags '-s -w' -o $@ gvisor.dev/gvisor/runsc && touch $@

bench: build $(VENV)/.test $(TOOLS)/runsc-plain ## measure; prints a table, keeps JSON under bench/results/
	@scripts/deps.sh server bench
	@scripts/bench.sh $(BENCH)

# What a soak of calls makes: SOAK_CALLS='-reads 20000 -execs 2000' for a short one.
SOAK_CALLS ?= -reads 1000000 -execs 200000

build-compare: test-deps build ## build the test set of Dockerfiles with buildah too, compare, and write e2e/testdata/dockerfiles.json (root)
	@scripts/deps.sh server image
	@COVE_BUILDAH=1 $(GO) test ./e2e -run TestImageBuilds -count=1 -v

soak: soak-calls soak-ops ## hours of load: both of these; fails on any hang, loss or leftover

soak-calls: build ## 1,000,000 reads and 200,000 execs; fails on a hang or a call that was lost (SOAK_CALLS='-reads N -execs N')
	@$(GOBUILD) -o $(TOOLS)/callsoak ./bench/callsoak
	@scripts/with-server.sh $(TOOLS)/callsoak $(SOAK_CALLS)

proto: $(GVISOR) $(TOOLS)/buf-$(BUF) $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-connect-go ## regenerate api/ and server/e2b/envd/ from their protos
	@cd api && PATH="$(TOOLS):$$PATH" $(TOOLS)/buf-$(BUF) generate && $(TOOLS)/buf-$(BUF) lint
	@cd server/e2b/envd && PATH="$(TOOLS):$$PATH" $(TOOLS)/buf-$(BUF) generate --template ../../../api/buf.gen.yaml && $(TOOLS)/buf-$(BUF) lint
	@$(GO) run ./internal/openapi/generate
	@echo 'api/ regenerated'

clean: ## remove what was built here (not the server's data)
	rm -rf bin .cache $(VENV)

# A tool is installed under its version, so that a new pin is a new file.
define install_tool
	@echo 'installing $(1)@$(2)'
	@mkdir -p $(TOOLS)
	@GOFLAGS= GOBIN=$(TOOLS)/tmp-$(notdir $(1)) $(GO) install $(1)@$(2)
	@mv $(TOOLS)/tmp-$(notdir $(1))/* $@ && rmdir $(TOOLS)/tmp-$(notdir $(1))
endef

$(TOOLS)/staticcheck-$(STATICCHECK):
	$(call install_tool,honnef.co/go/tools/cmd/staticcheck,$(STATICCHECK))

# The ACME server that TLS is tested against.
$(TOOLS)/pebble: Makefile
	$(call install_tool,github.com/letsencrypt/pebble/v2/cmd/pebble,$(PEBBLE))

$(TOOLS)/buf-$(BUF):
	$(call install_tool,github.com/bufbuild/buf/cmd/buf,$(BUF))

# buf finds these by name; a changed pin must not find the old one.
$(TOOLS)/protoc-gen-go: Makefile
	$(call install_tool,google.golang.org/protobuf/cmd/protoc-gen-go,$(PROTOC_GEN_GO))

$(TOOLS)/protoc-gen-connect-go: Makefile
	$(call install_tool,connectrpc.com/connect/cmd/protoc-gen-connect-go,$(PROTOC_GEN_CONNECT))
