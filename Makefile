# The door to everything; the work is done by setup.sh, cargo and vcheck's own Makefile.

# setup.sh may have installed the toolchain a moment ago, where this shell does not look yet.
cargo := PATH="$$(./setup.sh --path)" cargo
release := $(or $(CARGO_TARGET_DIR),target)/release

.DEFAULT_GOAL := help
.PHONY: help setup build demo test lint bench clean

help: ## say what there is
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## install what this machine lacks (needs root or sudo)
	@./setup.sh

build: setup ## build verbatim, libverbatim.so and vcheck
	$(cargo) build --release --locked --workspace
	$(MAKE) -C vcheck

demo: build ## move a running RDMA program between two hosts on this machine
	$(release)/verbatim demo

test: build ## all tests, from units to end to end
	$(cargo) test --release --locked --workspace
	$(MAKE) -C vcheck test

lint: setup ## format and clippy, warnings are errors
	$(cargo) fmt --all --check
	$(cargo) clippy --locked --workspace --all-targets -- -D warnings

bench: build ## measure what the papers measured, into out/
	./bench/run

clean: ## remove what was built
	$(cargo) clean
	$(MAKE) -C vcheck clean
	rm -rf out
