# shellcheck shell=bash
# The step `vm` of setup.sh, which sources this file: what the virtual-machine test bed needs (docs/testbed.md). The
# kernel is a package of the distribution, unpacked and never installed: this machine does not boot it.

# shellcheck disable=SC2154 # setup.sh sets work, log and check_only
# The machine; depmod, and modprobe, which is run in the machine; what works there while it is moved.
vm_packages=(qemu-system-x86 kmod stress-ng dmsetup)
vm_home=/opt/verbatim/vm/kernel

# Releases whose kernel package to take, in this order: the first one new enough for what is tested (rxe, PAGEMAP_SCAN).
# A release's own name stands for itself; its kernel is what is left if none of them can be had.
declare -A vm_suites=([debian]="trixie forky sid" [ubuntu]="noble questing resolute")
declare -A vm_metapackage=([debian]=linux-image-amd64 [ubuntu]=linux-image-generic)
vm_minimum=6.7

vm_missing_packages() {
    local package
    for package in "${vm_packages[@]}"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || echo "$package"
    done
}

# vm_kernel_usable DIR: whether DIR holds a kernel with its modules, rxe among them.
vm_kernel_usable() {
    local release
    release=$(cat "$1/release" 2>/dev/null) && [[ -r $1/vmlinuz && -r $1/lib/modules/$release/modules.dep ]] &&
        grep -q '/rdma_rxe\.ko' "$1/lib/modules/$release/modules.dep"
}

vm_describe() { say vm "QEMU $(qemu-system-x86_64 --version | awk 'NR == 1 { print $4 }'), Linux $(cat "$vm_home/release") at $vm_home"; }

# vm_kernel_packages DIR: prints the packages that hold the kernel and its modules, as apt_apart DIR knows them.
vm_kernel_packages() {
    local image
    image=$(apt_apart "$1" apt-cache depends --no-recommends --no-suggests "${vm_metapackage[$ID]}" |
        awk '$1 == "Depends:" && $2 ~ /^linux-(image|modules-extra)-[0-9]/ { print $2 }')
    [[ -n $image ]] || return 1
    echo "$image"
    # Ubuntu keeps the modules in packages of their own.
    sed -n 's/^linux-image-\([0-9].*\)/linux-modules-\1/p' <<<"$image" | while read -r modules; do
        [[ -z $(apt_apart "$1" apt-cache policy "$modules") ]] || echo "$modules"
    done
}

# vm_kernel_fetch DIR SUITE: downloads SUITE's kernel under DIR and makes DIR/home of it.
vm_kernel_fetch() {
    local dir=$1 root=$1/root home=$1/home release modules packages deb
    apt_apart_open "$dir" "$2" || return 1
    mapfile -t packages < <(vm_kernel_packages "$dir")
    [[ ${#packages[@]} -gt 0 ]] || return 1
    (cd "$dir/cache" && quiet apt_apart "$dir" apt-get download "${packages[@]}") || return 1
    mkdir -p "$root" "$home/lib"
    for deb in "$dir"/cache/*.deb; do
        quiet dpkg-deb -x "$deb" "$root" || return 1
    done
    release=$(find "$root/boot" -name 'vmlinuz-*' -printf '%f\n' | sed -n '1s/^vmlinuz-//p')
    [[ -n $release ]] && version_at_least "${release%%[-+]*}" "$vm_minimum" || return 1
    cp "$root/boot/vmlinuz-$release" "$home/vmlinuz"
    cp "$root/boot/config-$release" "$home/config"
    chmod 644 "$home/vmlinuz" "$home/config"
    modules=$(find "$root" -path "*/lib/modules/$release" -type d | head -n 1)
    [[ -n $modules ]] && mv "$(dirname "$modules")" "$home/lib/modules" || return 1
    quiet depmod -b "$home" "$release" || return 1
    echo "$release" >"$home/release"
    vm_kernel_usable "$home"
}

install_vm_kernel() {
    local suite
    for suite in ${vm_suites[$ID]}; do
        say vm "fetching the kernel of $suite"
        if vm_kernel_fetch "$work/vm" "$suite"; then
            put_in_place "$work/vm/home" "$vm_home"
            return
        fi
    done
    fail "no kernel package >= $vm_minimum with rdma_rxe to be had" \
        "apt sources of this machine with the suites ${vm_suites[$ID]}; $log" \
        "put vmlinuz, release (the output of uname -r) and lib/modules into $vm_home by hand"
}

setup_vm() {
    local missing
    mapfile -t missing < <(vm_missing_packages)
    if [[ $check_only == yes ]]; then
        [[ ${#missing[@]} -eq 0 ]] || lacking vm "${missing[*]}"
        vm_kernel_usable "$vm_home" || lacking vm "a kernel at $vm_home"
        return
    fi
    if [[ ${#missing[@]} -gt 0 ]]; then
        say vm "installing ${missing[*]}"
        apt_install "${missing[@]}" || fail "apt cannot install ${missing[*]}" "$log" "read the end of the log"
    fi
    vm_kernel_usable "$vm_home" || install_vm_kernel
    vm_describe
}
