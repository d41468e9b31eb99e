#!/bin/sh
# Dumps by CRIU of programs with an open context of rxe, and of nested epoll descriptors. Run where `make` has put it.
set -u
built=$PWD
criu=/opt/verbatim/criu/bin/criu
[ -x "$criu" ] || criu=criu
# No hardware breakpoints: the kernel patches its scheduler for them, which emulated processors (TCG) take badly at times.
export CRIU_FAULT=130
work=$(mktemp -d -p /run)
worst=0
# What was started and may still run. A restored program has the number that it had.
started=

trap 'for pid in $started; do kill -9 "$pid" 2>/dev/null; done; rm -rf "$work"' EXIT

# claim NAME SEEN COMMAND…: the claim holds if the command succeeds; otherwise the command SEEN says what was seen.
claim() {
    name=$1 seen=$2
    shift 2
    if "$@"; then
        echo "$name: holds"
    else
        worst=1
        echo "$name: does not hold: $($seen)"
    fi
}

trouble() {
    echo "$1" >&2
    exit 2
}

# until_true LIMIT_S COMMAND…
until_true() {
    tries=$(($1 * 20))
    shift
    until "$@"; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || return 1
        sleep 0.05
    done
}

told() { cat "$told"; }

says() { grep -q "^$2" "$1" 2>/dev/null; }

# start PROGRAM: starts it away from our session, and waits until it is ready. Sets pid, and told: the file in which it speaks.
start() {
    told=$work/$1.told
    setsid "$built/$1" "$told" </dev/null >"$work/$1.out" 2>&1 &
    pid=$!
    started="$started $pid"
    until_true 60 says "$told" ready || trouble "$1 is not ready: $(cat "$work/$1.out")"
}

# freeze NAME OPTION…: a dump into a folder of that name.
freeze() {
    images=$work/$1
    mkdir -p "$images"
    shift
    "$criu" dump --tree "$pid" --images-dir "$images" --log-file dump.log -v4 --manage-cgroups=ignore "$@" >/dev/null 2>&1
}

thaw() { "$criu" restore --images-dir "$images" --log-file restore.log -v4 --manage-cgroups=ignore --restore-detached >/dev/null 2>&1; }

# gone: the program was killed by the dump; its number is free when its parent, who we are, has taken note.
gone() { wait "$pid" 2>/dev/null; }

why() { grep -h -m 3 Error "$images"/*.log | tr '\n' ';'; }

# ask: what the program says now.
ask() {
    rm -f "$told"
    kill -USR1 "$pid" 2>/dev/null && until_true 20 test -s "$told" && told
}

# goes_on: its traffic does.
goes_on() {
    before=$(ask) || return 1
    sleep 0.5
    after=$(ask) || return 1
    case "$before/$after" in
        "rounds "*/"rounds "*) [ "${after#rounds }" -gt "${before#rounds }" ] ;;
        *) return 1 ;;
    esac
}

# ---- a program with an open context ------------------------------------------------------------------------------------

start traffic
goes_on || trouble "no traffic: $(told)"
refused() { ! freeze plain --leave-running; }
claim without-a-plugin-the-dump-is-refused "echo CRIU succeeded" refused
claim traffic-goes-on-after-a-refused-dump told goes_on

CRIU_LIBS_DIR=$built/plugin
export CRIU_LIBS_DIR
claim with-the-plugin-the-dump-succeeds why freeze first --leave-running
claim traffic-goes-on-after-a-dump told goes_on

printf '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ]\n' >"$work/refuse"
chmod 755 "$work/refuse"
given_up() { ! freeze second --action-script "$work/refuse"; }
claim a-dump-can-be-given-up-at-its-end "echo CRIU succeeded" given_up
claim traffic-goes-on-after-a-dump-that-was-given-up told goes_on

# ---- the same, restored with placeholders ------------------------------------------------------------------------------

freeze third || trouble "the last dump failed: $(why)"
gone
claim it-is-restored-with-placeholders why thaw
with_placeholders() { says_now=$(ask) && [ "${says_now%% *}" = placeholders ]; }
claim it-runs-with-placeholders told with_placeholders
# A placeholder for each mapping of the device.
maps() { cut -c 74- "/proc/$pid/maps" | sort | uniq -c; }
replaced() { ! grep -q infiniband "/proc/$pid/maps" && grep -q memfd:rnic "/proc/$pid/maps"; }
claim a-placeholder-stands-where-a-ring-was maps replaced
kill -9 "$pid"

# ---- nested epoll descriptors ------------------------------------------------------------------------------------------

unset CRIU_LIBS_DIR
start epolls
freeze epolls || trouble "epolls: $(why)"
gone
claim nested-epoll-descriptors-are-restored why thaw
kill -USR1 "$pid"
until_true 30 says "$told" done || trouble "epolls: $(told)"
grep -E 'holds|does not hold' "$told"
! grep -q 'does not hold' "$told" || worst=1
exit $worst
