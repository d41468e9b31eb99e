# shellcheck shell=bash
# The step `suite` of setup.sh, which sources this file: rdma-core's own test suite, for `make conformance`. It is part of
# the documentation of the package python3-pyverbs, which dpkg may be told to leave out, as in most container images; then
# it is taken out of the package and put to the place where tests/conformance/suite.py looks next.

suite_installed=/usr/share/doc/rdma-core/tests
suite_home=/opt/verbatim/rdma-core/tests

suite_path() {
    local folder
    for folder in "$suite_installed" "$suite_home"; do
        [[ -e $folder/run_tests.py ]] && echo "$folder" && return
    done
    return 1
}

suite_fetch() {
    local version dir=$work/suite
    mkdir -p "$dir"
    version=$(dpkg-query -W -f '${Version}' python3-pyverbs) || return 1
    apt_refresh
    (cd "$dir" && quiet apt-get download "python3-pyverbs=$version") || return 1
    quiet dpkg-deb -x "$dir"/python3-pyverbs_*.deb "$dir/root" || return 1
    [[ -e $dir/root$suite_installed/run_tests.py ]] || return 1
    put_in_place "$dir/root$suite_installed" "$suite_home"
}

setup_suite() {
    local folder
    if folder=$(suite_path); then
        say suite "rdma-core's own tests at $folder"
    elif [[ $check_only == yes ]]; then
        lacking suite "rdma-core's own tests"
    else
        say suite "taking rdma-core's own tests out of its package"
        if ! suite_fetch || ! folder=$(suite_path); then
            fail "rdma-core's own tests are not to be had" "$log" \
                "unpack the package python3-pyverbs by hand and put its $suite_installed to $suite_home"
        fi
        say suite "rdma-core's own tests at $folder"
    fi
}
