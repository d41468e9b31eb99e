# The door to everything; the work is done by setup.sh, cargo and vcheck's own Makefile.

# setup.sh may have installed the toolchain a moment ago, where this shell does not look yet.
cargo := PATH="$$(./setup.sh --path)" cargo
release := $(or $(CARGO_TARGET_DIR),target)/release

.DEFAULT_GOAL := help
.PHONY: help setup build demo test e2e faults nemesis sim mutants soak compat-test application conformance lint fuzz sanitize bench clean vm-test rnic-test rnic-bench vm-bench vm-migrate-test conformance-rxe volume-test filesystem-test volume-conformance zdtm faulty-test swap-test swap-bench

help: ## say what there is
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: ## install what this machine lacks (needs root or sudo)
	@./setup.sh

build: setup ## build verbatim, libverbatim.so and vcheck
	$(cargo) build --release --locked --workspace
	$(MAKE) -C vcheck
	$(MAKE) -C bench/programs

demo: build ## move a running RDMA program between two hosts on this machine
	$(release)/verbatim demo

# A test that hangs must not hide what the others said. There are no tests in the documentation: to look for them takes a minute.
test: build ## all tests, from units to end to end
	PATH="$$(./setup.sh --path)" timeout --verbose --kill-after=60 3000 cargo test --release --locked --workspace \
		--lib --bins --tests
	$(MAKE) -C vcheck test

e2e: build ## every end-to-end test of migration, those that `make test` leaves out among them
	CI=true $(cargo) test --release --locked -p verbatim-e2e --test e2e -- --include-ignored \
		--skip application:: --skip compat:: --skip conformance:: --skip faults::every --skip lossy --skip nemesis::

faults: build ## a failure at every step of a migration, in every way (docs/failures.md)
	CI=true $(cargo) test --release --locked -p verbatim-e2e --test e2e -- --include-ignored faults::
	CI=true $(cargo) test --release --locked -p verbatim-e2e --test e2e -- --include-ignored lost_rnic::
	CI=true $(cargo) test --release --locked -p verbatim-e2e --test e2e -- --include-ignored gids::

nemesis: build ## MINUTES (10) of moves while faults strike by SEED (any): kills, stops, cut links, full disks, several at once
	CI=true VERBATIM_NEMESIS_MINUTES=$(or $(MINUTES),10) VERBATIM_NEMESIS_SEED=$(SEED) $(cargo) test --release --locked \
		-p verbatim-e2e --test e2e -- --include-ignored nemesis::

# Seeds that were walked with the same sources are left out: `crates/simulation/walked.txt` says which.
sim: setup ## the simulated worlds: SEEDS (0..10000000), every fault put back, and all worlds with up to FAULTS (3) faults
	$(cargo) build --release --locked -p verbatim-simulation
	$(release)/verbatim-simulation quirks
	$(release)/verbatim-simulation --world turns quirks
	$(release)/verbatim-simulation --world fill quirks
	$(release)/verbatim-simulation --world post-copy quirks
	$(release)/verbatim-simulation --world history quirks
	$(release)/verbatim-simulation seeds $(or $(SEEDS),0..10000000) --threads 2 --walked crates/simulation/walked.txt
	$(release)/verbatim-simulation --world turns seeds $(or $(SEEDS),0..10000000) --threads 2 \
		--walked crates/simulation/walked.txt
	$(release)/verbatim-simulation --world fill seeds $(or $(SEEDS),0..10000000) --threads 2 \
		--walked crates/simulation/walked.txt
	$(release)/verbatim-simulation --world post-copy seeds $(or $(SEEDS),0..10000000) --threads 2 \
		--walked crates/simulation/walked.txt
	$(release)/verbatim-simulation --world history seeds $(or $(SEEDS),0..10000000) --threads 2 \
		--walked crates/simulation/walked.txt
	$(release)/verbatim-simulation explore $(or $(FAULTS),3)
	$(release)/verbatim-simulation --world turns explore $(or $(FAULTS),3)
	$(release)/verbatim-simulation --world fill explore 12
	$(release)/verbatim-simulation --world post-copy explore 12
	$(release)/verbatim-simulation --world history explore 1

mutants: setup ## change the core's code in every small way, and look whether a test notices (needs `cargo install cargo-mutants --locked`)
	$(cargo) mutants -p verbatim-session

soak: build ## MOVES moves in a row (200) by each method with 1 % of the packets lost; nothing may be lost or grow
	CI=true VERBATIM_SOAK_MOVES=$(or $(MOVES),200) $(cargo) test --release --locked -p verbatim-e2e --test e2e -- \
		--include-ignored soak::lossy
	CI=true VERBATIM_SOAK_MOVES=$(or $(MOVES),200) $(cargo) test --release --locked -p verbatim-e2e --test e2e -- \
		--include-ignored soak::pause_resume_lossy
	CI=true $(cargo) test --release --locked -p verbatim-e2e --test e2e -- --include-ignored many::

compat-test: build ## moves between hosts of the release in tests/previous-release and of this one (docs/versions.md)
	previous=$$(PATH="$$(./setup.sh --path)" ./tests/build-previous) && CI=true VERBATIM_PREVIOUS="$$previous" \
		$(cargo) test --release --locked -p verbatim-e2e --test e2e -- --include-ignored compat::

application: build ## LAMMPS over MPI and UCX, both ranks moved in the middle of their work
	@./setup.sh --application
	CI=true $(cargo) test --release --locked -p verbatim-e2e --test e2e -- --include-ignored application::

conformance: build ## rdma-core's own tests, and perftest in all its ways (docs/conformance.md)
	@./setup.sh --vm
	CI=true $(cargo) test --release --locked -p verbatim-e2e --test e2e -- --include-ignored conformance::

# The kernel's own results are the yardstick: the list is written anew.
conformance-rxe: build ## rdma-core's own tests on the kernel's rxe, in a virtual machine (docs/testbed.md)
	@./setup.sh --vm
	mkdir -p out
	$(release)/testbed run --address 10.0.0.1/24 --rxe -- /usr/bin/python3 $(CURDIR)/tests/conformance/suite.py \
		--dev rxe0 --limit 120 >out/conformance-rxe.txt
	sed '/^#/d' out/conformance-rxe.txt | cut -f 1,2 | LC_ALL=C sort >tests/conformance/rxe.txt

vm-test: build ## our RNIC against the kernel's rxe in a virtual machine (docs/testbed.md)
	@./setup.sh --vm
	$(MAKE) -C tests/vm/probes
	$(cargo) test --release --locked -p verbatim-verbs --lib --no-run --message-format=json >target/vm-probes/verbs.json
	cp "$$(sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' target/vm-probes/verbs.json)" target/vm-probes/verbs
	$(cargo) test --release --locked --workspace --test far --test bulk --no-run --message-format=json >target/vm-probes/far.json
	for test in far bulk; do \
		cp "$$(sed -n "s/.*\"name\":\"$$test\",.*\"executable\":\"\([^\"]*\)\".*/\1/p" target/vm-probes/far.json)" target/vm-probes/$$test; \
	done
	$(cargo) test --release --locked --workspace --test vm -- --ignored

# What has passed on this build is left out, so a run that was cut off after LIMIT seconds (3000) goes on.
rnic-test: build ## instances with the kernel's rxe, on virtual machines that are hosts (docs/rnics.md)
	@./setup.sh --vm
	$(MAKE) -C tests/vm/probes
	PATH="$$(./setup.sh --path)" timeout --verbose --kill-after=60 $(or $(LIMIT),4500) cargo test --release --locked --workspace --test rnic -- --ignored

rnic-bench: build ## the blackout with rxe beside CRIU alone on the same virtual machines, as JSON into out/
	@./setup.sh --vm
	mkdir -p out
	$(cargo) test --release --locked --workspace --test rnic -- --blackout >out/rnic-blackout.json
	cat out/rnic-blackout.json

vm-bench: build ## our RNIC and the kernel's rxe in one virtual machine, as JSON into out/
	@./setup.sh --vm
	mkdir -p out
	$(release)/testbed run --memory 3072 -- /usr/bin/python3 $(CURDIR)/tests/vm/bench_rxe.py \
		--built $(abspath $(release)) >out/vm-bench.json
	cat out/vm-bench.json

vm-migrate-test: build ## virtual machines that move MOVES (50) times in a row: to a newer QEMU, with Linux, by libvirt, and while everything fails
	@./setup.sh --newer-qemu --libvirt
	@./setup.sh --vm
	CI=true VERBATIM_VM_MOVES=$(or $(MOVES),50) VERBATIM_NEWER_QEMU=$(or $(NEWER_QEMU),/opt/verbatim/qemu/bin/qemu-system-x86_64) \
		$(cargo) test --release --locked -p verbatim-vm
	CI=true $(cargo) test --release --locked -p verbatim-e2e --test e2e -- --include-ignored machines::
	CI=true VERBATIM_VM_MOVES=$(or $(MOVES),50) $(cargo) test --release --locked -p verbatim-testbed --test machines -- --ignored

# Seeds that were walked with the same sources are left out: `crates/mirror/walked.txt` says which.
volume-test: build ## volumes that move: MOVES (200) with kills and silence in between by SEED (1), the worlds of the core by SEEDS (0..2000000) and all of up to FAULTS (3) faults, and Linux on one
	@./setup.sh --vm
	VERBATIM_VOLUME_SEEDS=$(or $(SEEDS),0..2000000) VERBATIM_WALKED=walked.txt VERBATIM_VOLUME_FAULTS=$(or $(FAULTS),3) \
		$(cargo) test --release --locked -p verbatim-mirror --test model --test three_hosts -- --nocapture
	VERBATIM_VOLUME_MOVES=$(or $(MOVES),200) VERBATIM_VOLUME_SEED=$(or $(SEED),1) \
		$(cargo) test --release --locked -p verbatim-volume -- --include-ignored --nocapture
	$(cargo) test --release --locked --workspace --test disk -- --ignored

# Rounds of a few minutes by SEED: one that failed is run again by its seed, with MINUTES=10.
filesystem-test: build ## ext4, XFS and PostgreSQL on a volume that moves each 20 s, and power that fails, for MINUTES (120) by SEED (1)
	@./setup.sh --filesystem
	VERBATIM_FSX=/opt/verbatim/fsx/bin/fsx VERBATIM_FILESYSTEM_MINUTES=$(or $(MINUTES),120) VERBATIM_FILESYSTEM_SEED=$(or $(SEED),1) \
		$(cargo) test --release --locked --workspace --test filesystem -- --ignored --nocapture --test-threads 1

zdtm: build ## CRIU's own tests as instances that move: WORDS of names (docs/zdtm.md)
	@./setup.sh --zdtm
	/usr/bin/python3 tests/conformance/zdtm/run.py --program $(release)/verbatim --out out/zdtm $(WORDS)

volume-conformance: build ## the tests of nbd, libnbd, nbdkit and QEMU with a volume as the server (docs/volume-conformance.md)
	@./setup.sh --volume-suites
	/usr/bin/python3 tests/conformance/volumes/run.py --program $(release)/verbatim --out out/volume-conformance

# What has passed on this build is left out, so a run that was cut off after LIMIT seconds (4500) goes on.
faulty-test: build ## volumes on disks that really fail, in virtual machines: device-mapper, thin pools, SCSI, nbdkit, and power that fails at each step of a move
	@./setup.sh --vm
	PATH="$$(./setup.sh --path)" timeout --verbose --kill-after=60 $(or $(LIMIT),4500) cargo test --release --locked --workspace --test faulty -- --ignored --nocapture

swap-test: build ## the worlds of leases by SEEDS (0..200000) and all of up to FAULTS (3) faults, and Linux that swaps to another host's memory, in virtual machines: servers that die, and MINUTES (5) of each of four storms
	@./setup.sh --vm
	VERBATIM_LEASE_SEEDS=$(or $(SEEDS),0..200000) VERBATIM_WALKED=walked.txt VERBATIM_LEASE_FAULTS=$(or $(FAULTS),3) \
		$(cargo) test --release --locked -p verbatim-lease --test model --test exhaustive -- --nocapture
	VERBATIM_SWAP_MINUTES=$(or $(MINUTES),5) $(cargo) test --release --locked --workspace --test swap -- --ignored --nocapture

swap-bench: build ## programs that swap to another host's memory, to a disk and to zram, ROUNDS (3) by turns in a virtual machine, as JSON into out/
	@./setup.sh --vm
	$(cargo) test --release --locked --workspace --test swap -- --programs --rounds $(or $(ROUNDS),3) --out $(CURDIR)/out/swap-programs.json

lint: setup ## format and clippy, warnings are errors
	$(cargo) fmt --all --check
	$(cargo) clippy --locked --workspace --all-targets -- -D warnings

fuzz: build ## all fuzz targets, SECONDS each (60), and a hostile program a million times
	PATH="$$(./setup.sh --path)" ./fuzz/run $(or $(SECONDS),60)
	VERBATIM_HOSTILE_STEPS=1000000 $(cargo) test --release --locked -p verbatim-nic --test random_program -- --nocapture

sanitize: setup ## tests of what shares memory with others, under the address sanitizer
	PATH="$$(./setup.sh --path)" ./fuzz/sanitize

bench: build ## measure what the papers measured, into out/
	./bench/run

clean: ## remove what was built
	$(cargo) clean
	$(MAKE) -C vcheck clean
	$(MAKE) -C bench/programs clean
	$(MAKE) -C tests/vm/probes clean
	rm -rf out
