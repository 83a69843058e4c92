# Cove. "make start" takes a fresh Debian or Ubuntu with Go to a running
# server; "make help" lists the rest. Long steps say what they are doing.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Where the server of "make start" keeps its state and listens.
DATA   ?= $(or $(COVE_DATA),/var/lib/cove)
# LISTEN=ADDRESS is kept in DATA/cove.toml for the next start; 127.0.0.1:7777 if never given.
LISTEN ?=
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

# The gVisor that everything is built of: the pinned one with the places changed
# that cmd/runsc/edits names. Go builds without it, with go.mod alone, work too;
# only bin/runsc must have it. The same flags everywhere compile it once.
GVISOR := .cache/gvisor.mod
override GOFLAGS := $(GOFLAGS) -trimpath '-modfile=$(CURDIR)/$(GVISOR)'
export GOFLAGS
# CGO off: static binaries, and no C compiler needed.
export CGO_ENABLED := 0
GOBUILD := $(GO) build

export DATA LISTEN ALL KEEP

.PHONY: help start stop down restart status install uninstall image build test test-go test-python test-docs race lint bench soak soak-calls soak-ops compat proto deps test-deps clean FORCE

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

$(GVISOR): go.mod go.sum $(wildcard cmd/runsc/edits/*.go cmd/runsc/edits/add/*) $(if $(wildcard .cache/gvisor/go.mod),,FORCE)
	@mkdir -p .cache
	@GOFLAGS= $(GO) mod download gvisor.dev/gvisor
	@GOFLAGS= $(GO) run ./cmd/runsc/edits "$$(GOFLAGS= $(GO) list -m -f '{{.Dir}}' gvisor.dev/gvisor)" .cache/gvisor
	@cp go.sum .cache/gvisor.sum
	@{ cat go.mod; echo 'replace gvisor.dev/gvisor => ./.cache/gvisor'; } >$@.new && mv $@.new $@

# Its version is go.mod's. Linked anew only when that may have changed.
bin/runsc: $(GVISOR) $(wildcard cmd/runsc/*.go)
	@mkdir -p bin
	@echo 'building runsc from the pinned gVisor: one to two minutes the first time'
	@start=$$SECONDS; $(GOBUILD) -ldflags '-s -w' -o $@ ./cmd/runsc && touch $@ && echo "runsc built in $$((SECONDS-start)) s"

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

test: test-deps build $(TOOLS)/pebble $(VENV)/.test ## everything: unit, integration on real gVisor, Python SDK
	@scripts/test.sh

test-go: test-deps build $(TOOLS)/pebble ## the Go tests alone (PKG=./cli/... for some)
	@scripts/test.sh go

test-python: test-deps build $(VENV)/.test ## the Python tests alone, unit and live
	@scripts/test.sh python

test-docs: test-deps build $(VENV)/.test ## the examples of README and docs alone, against a real server
	@scripts/test.sh docs

# How long, how many at a time, and how often the server is killed.
SOAK_SECONDS ?= 300
SOAK_CLIENTS ?= 8
SOAK_KILL    ?= 25
soak-ops: build $(VENV)/.test ## random operations while the server is killed (SOAK_SECONDS, SOAK_CLIENTS, SOAK_KILL)
	@scripts/with-server.sh $(VENV)/bin/python scripts/soak_ops.py --seconds $(SOAK_SECONDS) --clients $(SOAK_CLIENTS) --kill $(SOAK_KILL)

compat: build ## the same suites beside and inside a sandbox; fails on what docs/compatibility.md does not list (COMPAT='test_os psutil')
	@scripts/deps.sh server
	@scripts/with-server.sh python3 scripts/compat.py $(COMPAT)

race: $(GVISOR) ## the race detector over what needs no gVisor (needs a C compiler)
	CGO_ENABLED=1 $(GO) test -race ./sandbox/... ./cli/... ./wire/... ./server/... ./node/... ./store/... ./runtime/fake/...

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

soak: soak-calls soak-ops ## hours of load: both of these; fails on any hang, loss or leftover

soak-calls: build ## 1,000,000 reads and 200,000 execs; fails on a hang or a call that was lost (SOAK_CALLS='-reads N -execs N')
	@$(GOBUILD) -o $(TOOLS)/callsoak ./bench/callsoak
	@scripts/with-server.sh $(TOOLS)/callsoak $(SOAK_CALLS)

proto: $(GVISOR) $(TOOLS)/buf-$(BUF) $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-connect-go ## regenerate api/ from its protos
	@cd api && PATH="$(TOOLS):$$PATH" $(TOOLS)/buf-$(BUF) generate && $(TOOLS)/buf-$(BUF) lint
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
