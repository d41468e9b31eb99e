#!/bin/bash
# Runs pairs of vcheck on the test double (fakeverbs.h): clean runs must end with exit status 0 and no defect, and each
# defect that the double injects must be found, under its name, on the side where it can be seen.
#
# usage: run.sh VCHECK DOUBLE UNITS
set -u
vcheck=$(realpath "$1") double=$(realpath "$2") units=$(realpath "$3")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
port=$((10000 + $$ % 20000)) # below the ephemeral ports
passed=0 failed=0

verdict() { # NAME PROBLEM
    if [ -z "$2" ]; then
        passed=$((passed + 1))
        return
    fi
    failed=$((failed + 1))
    printf 'FAILED %s: %s\n' "$1" "$2"
    tail -n 5 "$work"/{client,server}.{json,log} 2>/dev/null
}

# Starts a server with that to inject; returns when it listens. What it says comes on descriptor 3.
start_server() { # INJECT OP
    rm -f "$work"/{client,server}.{json,log}
    port=$((port + 1))
    mkfifo "$work/said"
    FAKEVERBS_INJECT=$1 FAKEVERBS_OP=$2 LD_PRELOAD=$double \
        "$vcheck" --verbose --stall-timeout 1 --port $port >"$work/server.json" 2>"$work/said" &
    server_pid=$!
    exec 3<"$work/said"
    rm "$work/said"
    read -r _ <&3
}

end_server() {
    cat <&3 >"$work/server.log"
    exec 3<&-
    wait $server_pid
    server_rc=$?
}

# Runs a server and a client. SIDE's double injects INJECT, counting OP ("" for any).
run_pair() { # SIDE INJECT OP CLIENT-OPTIONS...
    local side=$1 inject=$2 op=$3
    local -A injected=([client]="" [server]="")
    shift 3
    injected[$side]=$inject
    start_server "${injected[server]}" "$op"
    FAKEVERBS_INJECT=${injected[client]} FAKEVERBS_OP=$op LD_PRELOAD=$double timeout 60 \
        "$vcheck" --verbose --stall-timeout 1 --port $port "$@" 127.0.0.1 >"$work/client.json" 2>"$work/client.log"
    client_rc=$?
    end_server
}

# Runs a pair and sends the client a signal in the middle.
signal_client() { # SIGNAL
    local client
    start_server "" ""
    LD_PRELOAD=$double "$vcheck" --port $port --op mix -D 60 --bidirectional 127.0.0.1 \
        >"$work/client.json" 2>"$work/client.log" &
    client=$!
    # The server speaks again when it has run for a second.
    read -r _ <&3
    kill "-$1" $client
    wait $client 2>/dev/null
    client_rc=$?
    end_server
}

field() { # SIDE NAME
    sed -nE "s/.*\"$2\":\"?([^,\"}]*).*/\1/p" "$work/$1.json"
}

counters() { # SIDE: lost duplicated out_of_order corrupted
    echo "$(field "$1" lost) $(field "$1" duplicated) $(field "$1" out_of_order) $(field "$1" corrupted)"
}

# Whether counters match a pattern like "1 0 0 +": + more than none, * any.
match() { # COUNTERS PATTERN
    local -a got want
    read -ra got <<<"$1"
    read -ra want <<<"$2"
    [ ${#got[@]} = 4 ] || return 1
    for i in 0 1 2 3; do
        case ${want[$i]} in
            '*') ;;
            +) [ "${got[$i]}" -gt 0 ] || return 1 ;;
            *) [ "${got[$i]}" = "${want[$i]}" ] || return 1 ;;
        esac
    done
}

clean() { # NAME OPTIONS...
    local name=$1 problem=""
    shift
    run_pair client "" "" "$@"
    clean_problem
    verdict "$name" "$problem"
}

clean_problem() {
    [ $client_rc$server_rc = 00 ] || problem="exit status $client_rc, $server_rc"
    for side in client server; do
        match "$(counters $side)" "0 0 0 0" || problem="$side counted $(counters $side)"
        [ "$(field $side verdict)" = ok ] || problem="$side verdict $(field $side verdict)"
        [ "$(field $side posted)" = "$(field $side completed)" ] || problem="$side: posted is not completed"
    done
    local posted=$(($(field client posted) + $(field server posted)))
    local received=$(($(field client received) + $(field server received)))
    [ $posted -gt 0 ] && [ $posted = $received ] || problem="posted $posted, received $received"
}

# Both sides must exit with 1, and count: lost duplicated out_of_order corrupted.
defect() { # SIDE INJECT OP CLIENT-COUNTERS SERVER-COUNTERS OPTIONS...
    local name="$2 of ${3:-any} at the $1" client=$4 server=$5 problem=""
    run_pair "$1" "$2" "$3" "${@:6}"
    [ $client_rc$server_rc = 11 ] || problem="exit status $client_rc, $server_rc instead of 1, 1"
    match "$(counters client)" "$client" || problem="client counted $(counters client), expected $client"
    match "$(counters server)" "$server" || problem="server counted $(counters server), expected $server"
    for side in client server; do
        [ "$(field $side verdict)" = defect ] || problem="$side verdict $(field $side verdict)"
    done
    verdict "$name ($*)" "$problem"
}

usage_error() { # EXPECTED-TEXT COMMAND...
    local expected=$1 problem=""
    shift
    "$@" >"$work/client.json" 2>"$work/client.log"
    [ $? = 2 ] || problem="exit status is not 2"
    grep -q -- "$expected" "$work/client.log" || problem="the message lacks: $expected"
    verdict "$*" "$problem"
}

"$units" || failed=$((failed + 1))

for op in send write write-imm read atomic mix all; do
    clean "clean $op" --op $op -n 3000
    clean "clean $op, random sizes, 3 QPs" --op $op -n 1000 -q 3 -s 65536 --random-size --seed 42
    clean "clean $op, both ways" --op $op -n 1000 -q 2 --bidirectional --random-size
    clean "clean $op, depth 1" --op $op -n 300 --depth 1 --bidirectional
    clean "clean $op, depth 7, 100 bytes" --op $op -n 1000 --depth 7 -s 100 --bidirectional
    clean "clean $op, 32 bytes" --op $op -n 3000 --depth 256 -s 32
done
clean "clean mix with naps" --op mix -n 20 -q 2 --depth 4 --nap 5
clean "clean mix for a second" --op mix -D 1 -q 4 --bidirectional --random-size -s 16384

# A pause is no defect, and is measured.
run_pair client pause:1500:400 "" --op mix -n 3000
problem=""
clean_problem
for side in client server; do
    gap=$(field $side longest_gap_ms)
    [ "${gap%.*}" -ge 400 ] || problem="$side measured a gap of $gap ms, it was 400"
done
verdict "pause of 400 ms" "$problem"

#      side   inject            of        client        server
for op in send write write-imm; do
    defect client drop:500      $op       "0 0 0 0"     "1 0 0 0"   --op $op
    defect client corrupt:500   $op       "0 0 0 0"     "0 0 0 1"   --op $op
    defect client corrupt-header:500 $op  "0 0 0 0"     "0 0 0 1"   --op $op
    defect client drop:700      $op       "0 0 0 0"     "1 0 0 0"   --op mix -n 4000
    defect client corrupt:700   $op       "0 0 0 0"     "0 0 0 1"   --op mix -n 4000
done
for op in send write-imm; do
    defect client duplicate:500 $op       "0 0 0 0"     "0 1 0 0"   --op $op
    defect client swap:500      $op       "0 0 0 0"     "0 0 1 0"   --op $op
    defect client truncate:500  $op       "0 0 0 0"     "0 0 0 1"   --op $op
done
defect client drop:500          read      "1 0 0 0"     "0 0 0 0"   --op read
defect client corrupt:500       read      "0 0 0 1"     "0 0 0 0"   --op read
defect client corrupt-header:500 read     "0 0 0 1"     "0 0 0 0"   --op read
defect client drop:700          read      "1 0 0 0"     "0 0 0 0"   --op mix -n 4000
defect client drop:500          atomic    "1 0 0 0"     "1 0 0 0"   --op atomic -n 2000
defect client duplicate:500     atomic    "0 1 0 0"     "0 * 0 0"   --op atomic -n 2000
defect client drop:300          atomic    "1 0 0 0"     "1 0 0 0"   --op all -n 4000
# One that fails to compare after it makes up for it in the count, not in what the client sees.
defect client duplicate:300     atomic    "0 1 0 0"     "0 * 0 0"   --op all -n 4000
defect client wrong-imm:500     write-imm "0 0 0 0"     "1 0 0 1"   --op write-imm
defect client truncate:500      write     "0 0 0 0"     "0 0 0 1"   --op write
defect client overrun:500       write     "0 0 0 0"     "0 0 0 1"   --op write
defect server corrupt:10        send      "0 0 0 1"     "0 0 0 0"   --op write
defect server drop:500          send      "1 0 0 0"     "0 0 0 0"   --op send --bidirectional -n 2000

# Completions of the sender's requests.
for op in send write read mix; do
    defect client drop-completion:100      "" "1 0 0 0" "0 0 0 0"   --op $op
    defect client duplicate-completion:100 "" "0 1 0 0" "0 0 0 0"   --op $op
    defect client swap-completion:100      "" "0 0 1 0" "0 0 0 0"   --op $op
    defect client wrong-wrid:100           "" "1 0 0 1" "0 0 0 0"   --op $op
    defect client wrong-qpn:100            "" "0 0 0 1" "0 0 0 0"   --op $op
    defect client wrong-opcode:100         "" "0 0 0 1" "0 0 0 0"   --op $op
done
# Completions of RECVs.
for op in send write-imm; do
    defect server drop-recv-completion:100      "" "0 0 0 0" "1 0 0 0" --op $op
    defect server duplicate-recv-completion:100 "" "0 0 0 0" "0 1 0 0" --op $op
    defect server swap-recv-completion:100      "" "0 0 0 0" "0 0 1 0" --op $op
    defect server wrong-recv-wrid:100           "" "0 0 0 0" "1 0 0 1" --op $op
    defect server wrong-recv-qpn:100            "" "0 0 0 0" "0 0 0 1" --op $op
    defect server wrong-recv-length:100         "" "0 0 0 0" "0 0 0 1" --op $op
    defect server wrong-recv-opcode:100         "" "0 0 0 0" "* * * +" --op $op
done

# The wire goes dead and everything seems complete: only the stall and the counts tell.
defect client cut:500           ""        "* 0 0 0"     "+ 0 0 0"   --op send -n 2000
defect client cut:500           ""        "* 0 0 0"     "* 0 0 0"   --op write -n 2000
# The very last completion (that of FIN, request 1001) is lost: nothing later shows the gap.
defect client drop:1001         ""        "* 0 0 0"     "* 0 0 0"   --op send -n 1000
# An error completion ends the run.
defect client fail:500          ""        "+ 0 0 0"     "* 0 0 0"   --op send -n 2000
grep -q "transport retry counter exceeded" "$work/client.json"
verdict "an error completion is named" "$([ $? = 0 ] || echo "not in the JSON line")"

# One side dies, or is interrupted, in the middle.
problem=""
signal_client KILL
[ $server_rc = 1 ] || problem="server exit status $server_rc instead of 1"
grep -q "closed the TCP connection" "$work/server.json" || problem="the server does not say what happened"
verdict "the client is killed" "$problem"
# The same on a machine where a nap of 0.1 ms lasts 5 ms, as where the hypervisor is busy.
slack=$(cat /proc/self/timerslack_ns)
problem=""
echo 5000000 >/proc/$$/timerslack_ns
signal_client KILL
echo "$slack" >/proc/$$/timerslack_ns
[ $server_rc = 1 ] || problem="server exit status $server_rc instead of 1"
grep -q "closed the TCP connection" "$work/server.json" || problem="the server does not say what happened"
verdict "the client is killed, and naps are long" "$problem"
problem=""
signal_client INT
clean_problem
verdict "the client is interrupted" "$problem"

usage_error "give one of send, write" "$vcheck" --op copy
usage_error "number from 32" "$vcheck" -s 8
usage_error "give one" "$vcheck" -n 5 -D 5
usage_error "see vcheck --help" "$vcheck" --nonsense
usage_error "no RDMA device nix" env LD_PRELOAD="$double" "$vcheck" -d nix
usage_error "start vcheck without HOST" env LD_PRELOAD="$double" "$vcheck" --port 1 127.0.0.1
"$vcheck" --help | grep -q "example:"
verdict "--help has an example" "$([ $? = 0 ] || echo "it does not")"

echo "$passed passed, $failed failed"
[ $failed = 0 ]
