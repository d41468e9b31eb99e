# shellcheck shell=bash
# CRIU's own tests, for `make zdtm`. Part of setup.sh, which sources it. The source package of the CRIU that is used here is unpacked as it is, and its folder
# test/zdtm/static is built there. Nothing of it is committed.

zdtm_home=/opt/verbatim/zdtm

# Libraries that its tests are linked with; and modules of zdtm.py, which runs them on plain CRIU.
zdtm_packages=(dpkg-dev libaio-dev libcap-dev libbsd-dev libprotobuf-dev python3-protobuf python3-yaml)

# zdtm_python FOLDER: generates the modules that zdtm.py imports.
zdtm_python() {
    local images=$1/lib/pycriu/images module
    quiet /usr/bin/python3 "$1/scripts/magic-gen.py" "$1/criu/include/magic.h" "$images/magic.py" || return 1
    quiet protoc -I"$1/images" --python_out="$1/lib/pycriu" "$1/images/rpc.proto" || return 1
    find "$1/images" -name '*.proto' ! -name rpc.proto -exec protoc -I"$1/images" -I/usr/include --python_out="$images" {} + >>"$log" 2>&1 || return 1
    echo "__version__ = \"$(cat "$1/version")\"" >"$1/lib/pycriu/version.py"
    for module in "$images"/*_pb2.py; do
        module=$(basename "$module" .py)
        [[ $module == opts_pb2 ]] || echo "from .$module import *"
    done >"$images/pb.py"
}

# zdtm_built FOLDER: builds its tests. A test whose headers this distribution lacks is left out by -k, and run.py says so.
zdtm_built() {
    quiet make -C "$1/test/zdtm/lib" -j2 || return 1
    quiet make -C "$1/test/zdtm/static" -j2 -k || say zdtm "some of its tests are not built (see $log)"
    [[ -x $1/test/zdtm/static/busyloop00 ]]
}

setup_zdtm() {
    local version suite dir=$work/source-criu
    version=$(criu_version "$(criu_path)")
    if [[ -x $zdtm_home/test/zdtm/static/busyloop00 && $(cat "$zdtm_home/version" 2>/dev/null) == "$version" ]]; then
        say zdtm "CRIU's own tests ($version) at $zdtm_home"
        return
    elif [[ $check_only == yes ]]; then
        lacking zdtm "CRIU's own tests"
        return
    fi
    for suite in "$VERSION_CODENAME" ${newer_suites[$ID]}; do
        rm -rf "$dir"
        mkdir -p "$dir"/sources "$dir"/lists/partial "$dir"/cache/archives/partial
        : >"$dir/status"
        newer_sources "$suite" "$dir/sources/source.sources"
        sed -i 's/^Types: deb$/Types: deb-src/' "$dir/sources/source.sources"
        quiet apt_apart "$dir" apt-get update || continue
        # The distribution's patches are about its packages only.
        (cd "$dir" && quiet apt_apart "$dir" apt-get source --download-only --tar-only criu) || continue
        mkdir "$dir/tree"
        (cd "$dir" && quiet tar -C tree --strip-components=1 -xf "criu_$version.orig.tar."*) || continue
        echo "$version" >"$dir/tree/version"
        zdtm_python "$dir/tree" && zdtm_built "$dir/tree" && put_in_place "$dir/tree" "$zdtm_home" || break
        say zdtm "CRIU's own tests ($version, $suite) at $zdtm_home"
        return
    done
    fail "the tests of CRIU $version are not to be had" "$log" "unpack its source to $zdtm_home and build test/zdtm/static there"
}
