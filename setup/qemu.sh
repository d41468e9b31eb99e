# shellcheck shell=bash
# The QEMU of a newer release, beside the machine's own: guests move between both. Part of setup.sh, which sources it.

newer_qemu_home=/opt/verbatim/qemu
newer_qemu=$newer_qemu_home/bin/qemu-system-x86_64

# Releases after those that setup.sh runs on, the next one first.
declare -A newer_qemu_suites=([debian]="trixie forky" [ubuntu]="questing resolute")

# qemu_version PROGRAM: its version, empty if it cannot be run.
qemu_version() { { "$1" --version 2>/dev/null || true; } | sed -nE 's/^QEMU emulator version ([0-9.]+).*/\1/p'; }

# qemu_unpack DIR: makes $newer_qemu_home of what apt_apart DIR downloaded.
qemu_unpack() {
    local root=$1/root home=$1/home loader
    unpack_apart "$1" || return 1
    find "$root" -path '*/bin/qemu-system-x86_64' -type f -exec cp -t "$home/libexec" {} +
    cp -R "$root/usr/share/qemu" "$root/usr/share/seabios" "$home" || return 1
    loader=$(loader_of "$home")
    [[ -n $loader && -x $home/libexec/qemu-system-x86_64 ]] || return 1
    cat >"$home/bin/qemu-system-x86_64" <<WRAPPER
#!/bin/sh
# Made by Verbatim's setup.sh: the QEMU of a newer release, run with the libraries it was built for.
home=$newer_qemu_home
exec "\$home/lib/$loader" --library-path "\$home/lib" --argv0 qemu-system-x86_64 "\$home/libexec/qemu-system-x86_64" \\
    -L "\$home/seabios" -L "\$home/qemu" "\$@"
WRAPPER
    chmod 755 "$home" "$home/bin/qemu-system-x86_64"
    put_in_place "$home" "$newer_qemu_home"
}

setup_newer_qemu() {
    local suite version own dir=$work/qemu
    version=$(qemu_version "$newer_qemu")
    if [[ -n $version ]]; then
        say qemu "$version at $newer_qemu"
        return
    fi
    if [[ $check_only == yes ]]; then
        lacking qemu "$newer_qemu"
        return
    fi
    own=$(qemu_version qemu-system-x86_64)
    for suite in ${newer_qemu_suites[$ID]}; do
        say qemu "unpacking that of $suite"
        if apt_apart_open "$dir" "$suite" && quiet apt_apart "$dir" apt-get --download-only install qemu-system-x86 &&
            qemu_unpack "$dir" && version=$(qemu_version "$newer_qemu") && [[ -n $version && $version != "$own" ]]; then
            say qemu "$version at $newer_qemu"
            return
        fi
    done
    fail "no QEMU newer than $own" "apt sources of this machine with the suites ${newer_qemu_suites[$ID]}; $log" \
        "name one in VERBATIM_NEWER_QEMU, and run the tests with cargo"
}
