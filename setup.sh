#!/usr/bin/env bash
# Installs what a fresh Debian (12 or newer) or Ubuntu (24.04 or newer) machine lacks for building, testing and running
# Verbatim. It looks at the machine itself, not at stamps of earlier runs, so it may be run at any time and as often as
# one likes; with nothing to do it takes a fraction of a second. `setup.sh --help` tells the rest.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
log=$here/out/setup.log

# What apt installs. runc and criu are apart: either may come from elsewhere.
packages=(
    gcc libc6-dev make pkg-config protobuf-compiler ca-certificates # the build
    iproute2 util-linux nftables procps                             # the lab: ip, nsenter, nft, sysctl
    libibverbs-dev ibverbs-utils perftest iperf3 iputils-ping       # programs and headers for tests and benches
    rdmacm-utils librdmacm1 libfabric-bin                           # programs that connect by address and port
    ucx-utils libucx-dev                                            # a library over verbs, not ours
    python3 python3-pyverbs tshark                                  # rdma-core's own tests, a look at the wire
    e2fsprogs                                                       # file systems on volumes
    iptables tmux                                                   # rules and terminals that move with containers
    libnbd-bin python3-libnbd                                       # clients of volumes that are not ours
    qemu-system-x86                                                 # virtual machines that move
    fio qemu-utils nbdkit rocksdb-tools bonnie++                    # what volumes and swap disks are measured with, and beside
)

# What `--application` adds: a simulation that speaks verbs through MPI and UCX, for figure 6 of docs/migration-figures.md.
application_packages=(openmpi-bin lammps)

# CRIU 4.1 cannot dump an AF_INET socket on Linux 6.16 or newer, 3.17 does not start there.
criu_minimum=4.2
criu_home=/opt/verbatim/criu
rust_home=/opt/verbatim/rust

# Newer releases to look for CRIU and the toolchain in, in this order, per distribution.
declare -A newer_suites=([debian]="forky sid" [ubuntu]="questing resolute devel")

usage() {
    cat <<'HELP'
Usage: ./setup.sh [--vm] [--newer-qemu] [--libvirt] [--application] [--filesystem] [--volume-suites] [--zdtm] [--check]
       ./setup.sh --path | --help

Installs, where they are missing:
  packages    compiler, runc, iproute2, nftables, perftest and friends, with apt
  suite       rdma-core's own tests, where dpkg left the documentation of that package out
  criu        CRIU >= 4.2 that passes `criu check`: the distribution's if it will do, else the one of a newer
              release, unpacked with its libraries to /opt/verbatim/criu; apt's own configuration stays as it is
  toolchain   cargo and rustc, as new as Cargo.toml asks (rust-version)

  --vm        besides: QEMU and a kernel with the module rdma_rxe in /opt/verbatim/vm/kernel, for `make vm-test`
  --newer-qemu
              besides: the QEMU of a newer release, unpacked with its libraries to /opt/verbatim/qemu, for `make vm-migrate-test`
  --libvirt   besides: libvirt, as the distribution has it, whose daemon then runs here, for `make vm-migrate-test`
  --application
              besides: LAMMPS and Open MPI (32 MB to download), for `bench/run application` and `make application`
  --filesystem
              besides: XFS's programs, stress-ng, dbench, PostgreSQL and fsx, for `make filesystem-test`
  --volume-suites
              besides: the sources of nbd, libnbd, nbdkit and QEMU with their tests (40 MB to download), for `make volume-conformance`
  --zdtm      besides: the source of CRIU with its own tests, which are built (2 MB to download), for `make zdtm`
  --check     change nothing, only say what is missing
  --path      change nothing, print PATH with a usable toolchain in it
  --help      this text

Needs root or sudo. Noise goes to out/setup.log beside this script.
Exit codes: 0 all there, 1 something is missing or failed, 2 wrong usage.
HELP
}

# ---- talking ---------------------------------------------------------------------------------------------------------

say() { printf '%-10s %s\n' "$1" "$2"; }

# fail WHAT WHERE NEXT: ends the script with what happened, where to look, and what to do.
fail() {
    printf 'setup.sh: %s\n  where: %s\n  next:  %s\n' "$1" "$2" "$3" >&2
    exit 1
}

missing_anything=0

# lacking STEP WHAT: for --check.
lacking() {
    say "$1" "MISSING: $2"
    missing_anything=1
}

# quiet COMMAND…: runs it with all its output in the log.
quiet() {
    printf '\n$ %s\n' "$*" >>"$log"
    "$@" >>"$log" 2>&1 </dev/null
}

as_root() {
    if [[ $EUID -eq 0 ]]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo -- "$@"
    else
        fail "not root, and there is no sudo" "$*" "run ./setup.sh as root"
    fi
}

# version_at_least HAVE WANT
version_at_least() { dpkg --compare-versions "$1" ge "$2"; }

# ---- apt -------------------------------------------------------------------------------------------------------------

apt_updated=no

# apt_refresh: apt-get update, once.
apt_refresh() {
    if [[ $apt_updated == no ]]; then
        # A source that has nothing to do with us may be unreachable: what counts is whether an install succeeds.
        quiet as_root apt-get update || say apt "apt-get update complained (see $log), going on"
        apt_updated=yes
    fi
}

# apt_install PACKAGE…
apt_install() {
    apt_refresh
    quiet as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

# candidate PACKAGE: the version that apt would install, empty if it knows none.
candidate() { apt-cache policy "$1" 2>/dev/null | awk '$1 == "Candidate:" && $2 != "(none)" { print $2 }'; }

# newer_sources SUITE FILE: writes to FILE (deb822) the machine's own archive sources with SUITE in place of this
# release's name, so mirror, components and keys are those that the machine's owner chose. Sources of third parties do
# not have a suite of this release's bare name, nor do the security archives: both fall away.
newer_sources() {
    local suite=$1 file=$2 part
    : >"$file"
    for part in /etc/apt/sources.list.d/*.sources; do
        [[ -e $part ]] || continue
        # Paragraph by paragraph (RS=""); a field goes on in lines that start with a blank.
        awk -v RS= -v release="$VERSION_CODENAME" -v suite="$suite" '
            {
                count = split($0, lines, "\n"); out = ""; wanted = 0; enabled = 1; binary = 0; field = ""
                for (i = 1; i <= count; i++) {
                    line = lines[i]
                    if (line ~ /^#/) continue
                    if (line !~ /^[ \t]/) {
                        field = tolower(line); sub(/:.*/, "", field)
                        value = line; sub(/^[^:]*:/, "", value)
                    } else {
                        value = line
                    }
                    if (field == "enabled" && value ~ /no|false/) enabled = 0
                    if (field == "types") {
                        if ((" " value " ") ~ /[ \t]deb[ \t]/) binary = 1
                        continue
                    }
                    if (field == "suites") {
                        words = split(value, word, /[ \t]+/)
                        for (w = 1; w <= words; w++) if (word[w] == release) wanted = 1
                        continue
                    }
                    out = out line "\n"
                }
                if (wanted && enabled && binary) printf "Types: deb\nSuites: %s\n%s\n", suite, out
            }' "$part" >>"$file"
    done
    for part in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [[ -e $part ]] || continue
        # deb [options] uri suite component…
        sed -nE 's/#.*//; s/^[ \t]*deb[ \t]+(\[[^]]*\][ \t]+)?([^ \t]+)[ \t]+([^ \t]+)[ \t]+(.*[^ \t])[ \t]*$/\1|\2|\3|\4/p' "$part" |
            while IFS='|' read -r options uri release components; do
                [[ $release == "$VERSION_CODENAME" ]] || continue
                printf 'Types: deb\nSuites: %s\nURIs: %s\nComponents: %s\n' "$suite" "$uri" "$components"
                options=${options#\[}
                for option in ${options%%\]*}; do
                    case ${option%%=*} in
                        signed-by) printf 'Signed-By: %s\n' "${option#*=}" ;;
                        trusted) printf 'Trusted: %s\n' "${option#*=}" ;;
                        arch) printf 'Architectures: %s\n' "$(tr , ' ' <<<"${option#*=}")" ;;
                    esac
                done
                echo
            done >>"$file"
    done
}

# shellcheck disable=SC2317 # called through quiet
# apt_apart DIR COMMAND…: apt with sources, lists, cache and package status of its own under DIR. The empty status makes
# apt resolve a package down to libc6, as for a machine where nothing is installed.
apt_apart() {
    local dir=$1
    shift
    "$@" -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$dir/sources" -o Dir::State::Lists="$dir/lists" \
        -o Dir::State::status="$dir/status" -o Dir::State::extended_states="$dir/extended" -o Dir::Cache="$dir/cache" \
        -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null -o APT::Install-Recommends=false \
        -o APT::Sandbox::User=root -o APT::Get::Assume-Yes=true -o Acquire::Languages=none \
        -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false -o Acquire::IndexTargets::deb::CNF::DefaultEnabled=false
}

# apt_apart_open DIR SUITE: prepares DIR for apt_apart with the sources of SUITE.
apt_apart_open() {
    rm -rf "${1:?}"
    mkdir -p "$1"/sources "$1"/lists/partial "$1"/cache/archives/partial
    : >"$1/status"
    newer_sources "$2" "$1/sources/newer.sources"
    [[ -s $1/sources/newer.sources ]] || return 1
    quiet apt_apart "$1" apt-get update
}

# put_in_place FROM TO: copies the folder FROM to TO, so that TO is whole at any time but for the blink of two renames.
put_in_place() {
    quiet as_root mkdir -p "$(dirname "$2")"
    quiet as_root rm -rf "$2.new" "$2.old"
    quiet as_root cp -dR --preserve=mode "$1" "$2.new"
    if [[ -e $2 ]]; then
        quiet as_root mv -T "$2" "$2.old"
    fi
    quiet as_root mv -T "$2.new" "$2"
    quiet as_root rm -rf "$2.old"
}

# ---- packages --------------------------------------------------------------------------------------------------------

# missing_packages: prints what is not installed, one a line.
missing_packages() {
    local installed package
    installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' | sed -n 's/^installed //p')
    for package in "${packages[@]}"; do
        grep -qxF "$package" <<<"$installed" || echo "$package"
    done
    # Docker's packages bring a runc of their own, beside which the distribution's cannot be installed.
    find_command runc >/dev/null || echo runc
}

# find_command NAME: its path, also from where a user's PATH does not look.
find_command() { PATH=$PATH:/usr/sbin:/sbin command -v "$1"; }

setup_packages() {
    local missing
    mapfile -t missing < <(missing_packages)
    if [[ ${#missing[@]} -eq 0 ]]; then
        say packages "all ${#packages[@]} and runc are installed"
    elif [[ $check_only == yes ]]; then
        lacking packages "${missing[*]}"
    else
        say packages "installing ${missing[*]}"
        apt_install "${missing[@]}" ||
            fail "apt cannot install ${missing[*]}" "$log" "read the end of the log; is the package mirror reachable?"
    fi
}

# ---- programs of newer releases --------------------------------------------------------------------------------------

# unpack_apart DIR: unpacks what apt_apart DIR downloaded to DIR/root, and gathers in DIR/home/lib every shared library of it down to
# the C library and the dynamic loader, since the machine's own may be older than what the program was built for.
unpack_apart() {
    local root=$1/root home=$1/home deb
    mkdir -p "$root" "$home"/bin "$home"/lib "$home"/libexec
    for deb in "$1"/cache/archives/*.deb; do
        quiet dpkg-deb -x "$deb" "$root" || return 1
    done
    find "$root" -name '*.so*' ! -type d ! -path '*/gconv/*' ! -path '*/lib64/*' ! -path '*/lib/*/qemu/*' -exec cp -P -t "$home/lib" {} +
}

# loader_of HOME: the name of the dynamic loader in HOME/lib.
loader_of() { basename "$(find "$1/lib" -name 'ld-linux*.so.*' | head -n 1)"; }

# ---- criu ------------------------------------------------------------------------------------------------------------

criu_version() { "$1" --version 2>/dev/null | awk '$1 == "Version:" { print $2 }'; }

# criu_usable BINARY: new enough, and content with this kernel?
criu_usable() {
    local version
    version=$(criu_version "$1")
    [[ -n $version ]] && version_at_least "$version" $criu_minimum && as_root "$1" check >/dev/null 2>&1
}

# criu_path: prints the CRIU that will be used (the order in which the agent looks).
criu_path() {
    local binary
    for binary in "$criu_home/bin/criu" "$(find_command criu)"; do
        [[ -n $binary && -x $binary ]] && criu_usable "$binary" && echo "$binary" && return
    done
    return 1
}

criu_describe() { say criu "$(criu_version "$1") at $1, passes criu check"; }

# criu_unpack DIR: makes $criu_home of what apt_apart DIR downloaded.
criu_unpack() {
    local root=$1/root home=$1/home loader
    unpack_apart "$1" || return 1
    find "$root" -path '*/sbin/criu' -type f -exec cp -t "$home/libexec" {} +
    loader=$(loader_of "$home")
    [[ -n $loader && -x $home/libexec/criu ]] || return 1
    cat >"$home/bin/criu" <<WRAPPER
#!/bin/sh
# Made by Verbatim's setup.sh: the CRIU of a newer release, run with the libraries it was built for.
home=$criu_home
exec "\$home/lib/$loader" --library-path "\$home/lib" --argv0 criu "\$home/libexec/criu" "\$@"
WRAPPER
    chmod 755 "$home" "$home/bin/criu"
    put_in_place "$home" "$criu_home"
}

install_criu() {
    local binary version suite dir=$work/criu
    apt_refresh
    version=$(candidate criu)
    if [[ -n $version ]] && version_at_least "$version" $criu_minimum; then
        if apt_install criu && binary=$(criu_path); then
            criu_describe "$binary"
            return
        fi
    fi
    for suite in ${newer_suites[$ID]}; do
        say criu "that of $VERSION_CODENAME will not do, trying that of $suite"
        if apt_apart_open "$dir" "$suite" && quiet apt_apart "$dir" apt-get --download-only install criu &&
            criu_unpack "$dir" && binary=$(criu_path); then
            criu_describe "$binary"
            return
        fi
    done
    fail "no CRIU >= $criu_minimum that passes 'criu check' on Linux $(uname -r)" \
        "apt sources of this machine with the suites ${newer_suites[$ID]}; $log" \
        "build CRIU from its source, put the binary first in PATH, and run ./setup.sh again"
}

setup_criu() {
    local binary
    if binary=$(criu_path); then
        criu_describe "$binary"
    elif [[ $check_only == yes ]]; then
        lacking criu "no CRIU >= $criu_minimum that passes 'criu check'"
    else
        install_criu
    fi
}

# ---- toolchain -------------------------------------------------------------------------------------------------------

rust_minimum=$(sed -nE 's/^rust-version *= *"([0-9.]+)".*/\1/p' "$here/Cargo.toml")

cargo_bin=${CARGO_HOME:-${HOME:-/root}/.cargo}/bin

# rust_version: that of the compiler that would run here, empty if there is none.
rust_version() { (cd "$here" && rustc --version 2>/dev/null | awk '{ print $2 }'); }

# rust_usable: whether there is a toolchain that is new enough. If so it is the first in PATH from then on. It may be one
# that a shell which was started before does not see.
rust_usable() {
    local before=$PATH folder version
    for folder in '' "$cargo_bin:" "$rust_home/bin:"; do
        PATH=$folder$before
        version=$(rust_version)
        if [[ -n $version ]] && version_at_least "$version" "$rust_minimum" && (cd "$here" && cargo --version) >/dev/null 2>&1; then
            return
        fi
    done
    PATH=$before
    return 1
}

rust_describe() { say toolchain "rustc $(rust_version) at $(command -v rustc)"; }

# rust_by_packages: the distribution's compiler, from the package of that name or one with the version in its name.
rust_by_packages() {
    local version suffix
    apt_refresh
    version=$(candidate rustc)
    if [[ -n $version ]] && version_at_least "$version" "$rust_minimum"; then
        apt_install rustc cargo && rust_usable
        return
    fi
    suffix=$(apt-cache pkgnames rustc- | sed -nE 's/^rustc-([0-9]+\.[0-9]+)$/\1/p' | sort -Vr | head -n 1)
    [[ -n $suffix ]] && version_at_least "$suffix" "$rust_minimum" || return 1
    apt_install "rustc-$suffix" "cargo-$suffix" || return 1
    # These packages keep plain names free for the default version, so the links go where cargo's own would be.
    mkdir -p "$cargo_bin"
    ln -sf "/usr/lib/rust-$suffix/bin/"{cargo,rustc,rustdoc} "$cargo_bin"
    rust_usable
}

# rust_by_rustup: rustup, which may be there already or come from its package, installs the toolchain.
rust_by_rustup() {
    if ! command -v rustup >/dev/null; then
        [[ -n $(candidate rustup) ]] && apt_install rustup || return 1
    fi
    quiet rustup toolchain install stable --profile minimal --component rustfmt --component clippy || return 1
    quiet rustup default stable && rust_usable
}

# rust_by_newer_suite: compiler and cargo of a newer release, unpacked with their libraries as CRIU is.
rust_by_newer_suite() {
    local suite
    for suite in ${newer_suites[$ID]}; do
        say toolchain "trying that of $suite"
        if apt_apart_open "$work/rust" "$suite" &&
            quiet apt_apart "$work/rust" apt-get --download-only install rustc cargo && rust_unpack "$work/rust"; then
            rust_usable && return
        fi
    done
    return 1
}

# rust_unpack DIR: makes $rust_home of what apt_apart DIR downloaded.
rust_unpack() {
    local home=$1/home deb tool loader
    mkdir -p "$home"/bin "$home"/root
    for deb in "$1"/cache/archives/*.deb; do
        quiet dpkg-deb -x "$deb" "$home/root" || return 1
    done
    loader=$(find "$home/root" -name 'ld-linux*.so.*' -type f -printf '%P\n' | head -n 1)
    [[ -n $loader ]] || return 1
    for tool in cargo rustc rustdoc; do
        # CARGO: cargo tells build scripts where it is, and would take the dynamic loader for itself.
        cat >"$home/bin/$tool" <<WRAPPER
#!/bin/sh
# Made by Verbatim's setup.sh: $tool of a newer release, run with the libraries it was built for.
root=$rust_home/root
export CARGO=$rust_home/bin/cargo
exec "\$root/$loader" --library-path "\$root/$(dirname "$loader")" --argv0 "\$0" "\$root/usr/bin/$tool" "\$@"
WRAPPER
    done
    chmod 755 "$home" "$home"/bin/*
    put_in_place "$home" "$rust_home"
}

setup_toolchain() {
    if rust_usable; then
        rust_describe
    elif [[ $check_only == yes ]]; then
        lacking toolchain "no cargo and rustc >= $rust_minimum"
    else
        say toolchain "installing cargo and rustc >= $rust_minimum"
        rust_by_packages || rust_by_rustup || rust_by_newer_suite ||
            fail "no cargo and rustc >= $rust_minimum to be had" "PATH, $cargo_bin, apt with newer suites, rustup; $log" \
                "install Rust $rust_minimum or newer (rust-lang.org tells how), then run ./setup.sh again"
        rust_describe
    fi
}

# ---- rdma-core's test suite -------------------------------------------------------------------------------------------

# shellcheck source=setup/suite.sh
. "$here/setup/suite.sh"

# ---- virtual machines -----------------------------------------------------------------------------------------------

# shellcheck source=setup/vm.sh
. "$here/setup/vm.sh"
# shellcheck source=setup/qemu.sh
. "$here/setup/qemu.sh"
# shellcheck source=setup/volume_suites.sh
. "$here/setup/volume_suites.sh"
# shellcheck source=setup/zdtm.sh
. "$here/setup/zdtm.sh"

# ---- main ------------------------------------------------------------------------------------------------------------

check_only=no
with_vm=no
with_newer_qemu=no
with_filesystem=no
with_volume_suites=no
with_zdtm=no
for option; do
    case $option in
        --check) check_only=yes ;;
        --vm) with_vm=yes ;;
        --newer-qemu) with_newer_qemu=yes ;;
        --libvirt) packages+=(libvirt-daemon-system libvirt-daemon-driver-qemu libvirt-clients) ;;
        --application) packages+=("${application_packages[@]}") ;;
        --filesystem) with_filesystem=yes packages+=("${filesystem_packages[@]}") ;;
        --volume-suites) with_volume_suites=yes packages+=("${volume_suite_packages[@]}") ;;
        --zdtm) with_zdtm=yes packages+=("${zdtm_packages[@]}") ;;
        --path)
            rust_usable || fail "no cargo and rustc >= $rust_minimum" "PATH, $cargo_bin, $rust_home/bin" "run ./setup.sh"
            echo "$PATH" && exit 0
            ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && exit 2 ;;
    esac
done

[[ -r /etc/os-release ]] || fail "not a Debian or Ubuntu machine" "/etc/os-release is missing" "use one of them"
# shellcheck source=/dev/null # the machine's own
. /etc/os-release
if [[ -z ${newer_suites[$ID]-} ]]; then
    fail "$PRETTY_NAME is neither Debian nor Ubuntu" "/etc/os-release" \
        "install by hand what ./setup.sh --help lists; the rest works on any Linux >= 6.1"
fi
mkdir -p "$here/out"
: >"$log"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

setup_packages
setup_suite
setup_criu
setup_toolchain
[[ $with_vm == no ]] || setup_vm
[[ $with_newer_qemu == no ]] || setup_newer_qemu
[[ $with_filesystem == no ]] || setup_fsx
[[ $with_volume_suites == no ]] || setup_volume_suites
[[ $with_zdtm == no ]] || setup_zdtm
exit $missing_anything
