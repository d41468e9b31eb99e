#!/bin/sh
# Makes a machine of the test bed a host: an agent, and our RNIC where asked for. Run in the machine, which has its bridge
# (`testbed up NAME --bridge …`).
#
#   host.sh VERBATIM FOLDER NAME [soft]
#
# Run again, it starts an agent that has ended.
#
# VERBATIM is the program, FOLDER what `verbatim hosts` has made, NAME the host's. `soft`: with our software RNIC, which cannot
# be where rxe is, since both want UDP port 4791.
set -eu
verbatim=$1 folder=$2 name=$3 kind=${4:-}

# No hardware breakpoints: the kernel patches its scheduler for them, which emulated processors (TCG) take badly at times.
export CRIU_FAULT=130
mkdir -p /run/verbatim /run/verbatim-state /run/verbatim-config
cp -r "$folder/$name/." /run/verbatim-config

# daemon NAME SOCKET COMMAND…: starts it, and waits until it listens.
daemon() {
    log=/run/$1.log socket=$2
    shift 2
    rm -f "$socket"
    setsid "$@" </dev/null >>"$log" 2>&1 &
    pid=$!
    until [ -S "$socket" ]; do
        kill -0 "$pid" 2>/dev/null || { cat "$log" >&2; exit 1; }
        sleep 0.05
    done
}

[ "$kind" != soft ] || daemon nic /run/verbatim/nic.sock "$verbatim" -v nic
daemon agent /run/verbatim/api.sock "$verbatim" -v agent --name "$name" --config-dir /run/verbatim-config \
    --state-dir /run/verbatim-state --mtu "$(cat /sys/class/net/br0/mtu)"
