# shellcheck shell=bash
# What others have written to try NBD servers and file systems with, for `make volume-conformance` and `make filesystem-test`. Part of setup.sh, which
# sources it. Nothing of it is committed: source packages are unpacked as they are, and only nbd's test client and fsx are built.

volume_suites_home=/opt/verbatim/volume-suites
fsx_home=/opt/verbatim/fsx
fsx_version=0.3.2

# Programs of the distribution, and what nbd's test client is built with.
volume_suite_packages=(dpkg-dev libglib2.0-dev libgnutls28-dev libnbd-dev nbd-client fuse3 xz-utils)
filesystem_packages=(xfsprogs stress-ng dbench postgresql)

# A package may be in this release, and its source not on the mirror.
declare -A source_suites=([debian]="trixie sid" [ubuntu]="questing resolute devel")

# source_fetch PACKAGE: unpacks its source to $volume_suites_home, of this release or of the next one that has it.
source_fetch() {
    local package=$1 suite dir=$work/source-$1
    for suite in "$VERSION_CODENAME" ${source_suites[$ID]}; do
        rm -rf "$dir"
        mkdir -p "$dir"/sources "$dir"/lists/partial "$dir"/cache/archives/partial
        : >"$dir/status"
        newer_sources "$suite" "$dir/sources/source.sources"
        sed -i 's/^Types: deb$/Types: deb-src/' "$dir/sources/source.sources"
        [[ -s $dir/sources/source.sources ]] || return 1
        quiet apt_apart "$dir" apt-get update || continue
        if (cd "$dir" && quiet apt_apart "$dir" apt-get source --download-only "$package" && quiet dpkg-source --no-check -x ./*.dsc tree); then
            put_in_place "$dir/tree" "$volume_suites_home/$package"
            say suites "the source of $package ($suite) at $volume_suites_home/$package"
            return
        fi
    done
    return 1
}

# nbd_build: nbd's test client, without the rest of nbd.
nbd_build() {
    local home=$volume_suites_home/nbd
    [[ -x $home/nbd-tester-client ]] && return
    cat >"$work/config.h" <<'CONFIG'
#define HAVE_GNUTLS 1
#define VERSION "1"
#define SYSCONFDIR "/etc"
#define SIZEOF_UNSIGNED_INT 4
#define SIZEOF_UNSIGNED_LONG_INT 8
CONFIG
    # shellcheck disable=SC2046 # words
    quiet as_root gcc -O1 -w -D_GNU_SOURCE -DHAVE_CONFIG_H -I"$work" -I"$home" -o "$home/nbd-tester-client" "$home/tests/run/nbd-tester-client.c" \
        "$home/cliserv.c" "$home/buffer.c" "$home/crypto-gnutls.c" $(pkg-config --cflags --libs glib-2.0 gnutls)
}

setup_volume_suites() {
    local package
    for package in nbd libnbd nbdkit qemu; do
        if [[ -d $volume_suites_home/$package ]]; then
            continue
        elif [[ $check_only == yes ]]; then
            lacking suites "the source of $package"
        else
            source_fetch "$package" || fail "the source of $package is not to be had" "$log" \
                "unpack it by hand to $volume_suites_home/$package"
        fi
    done
    [[ $check_only == yes ]] || nbd_build || fail "nbd's test client is not built" "$log" "read the end of the log"
    say suites "those of nbd, libnbd, nbdkit and QEMU in $volume_suites_home"
}

setup_fsx() {
    if [[ -x $fsx_home/bin/fsx ]]; then
        say fsx "at $fsx_home/bin/fsx"
    elif [[ $check_only == yes ]]; then
        lacking fsx "$fsx_home/bin/fsx"
    else
        say fsx "building it"
        quiet cargo install fsx --version "$fsx_version" --locked --root "$work/fsx" && put_in_place "$work/fsx" "$fsx_home" ||
            fail "fsx $fsx_version is not built" "$log" "read the end of the log"
    fi
}
