#!/bin/sh
# The first process of an instance: starts one of CRIU's own tests, and ends it when /tmp/stop is there. Its lines on standard output: `STARTED code`, then the
# end of the test's own output and `END`.
program=$1
shift
cd /tmp || exit 1
"$program" --pidfile=/tmp/t.pid --outfile=/tmp/t.out "$@"
code=$?
[ $code = 0 ] || tail -n 5 /tmp/t.out*
echo "STARTED $code"
while [ ! -e /tmp/stop ]; do sleep 0.1; done
pid=$(cat /tmp/t.pid)
kill -TERM "$pid"
tries=0
while kill -0 "$pid" 2>/dev/null && [ $tries -lt 150 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
for said in /tmp/t.out*; do
    tail -n 5 "$said"
done
echo "END"
while :; do sleep 1; done
