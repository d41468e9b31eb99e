#!/usr/bin/python3
"""Measures the kernel's rxe and our software RNIC against each other in one machine. Runs inside a virtual machine:

    testbed run --memory 3072 -- /usr/bin/python3 $PWD/tests/vm/bench_rxe.py --built $PWD/target/release

Both send over a pair of veth ends with the same MTU. Ours has each end in a network namespace of its own, as a user
would have it. rxe of Linux 6.12 has its sockets in the first namespace only, so there both ends are in that one, and
routing rules make the two addresses talk over the wire all the same. rxe is measured on one device too, where it passes
packets from sender to receiver without any network: its best case. One TCP stream over the same kind of pair says what
the machine can do.

The kinds take turns, so that a machine that is slow for a while is slow for all. JSON goes to standard output.
"""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

MTU = 9000
PORT = 18600
LIMIT_S = 120
ENDS = {'a': '192.168.7.1', 'b': '192.168.7.2'}


def main():
    arguments = parse_arguments()
    subprocess.run(['modprobe', 'rdma_rxe'], check=True)
    kinds = {'rxe': Rxe(), 'rxe_one_device': RxeOneDevice(), 'verbatim': Verbatim(arguments.built), 'tcp': Tcp()}
    results = {name: {} for name in kinds}
    for number in range(arguments.repeats):
        for name, kind in kinds.items():
            print(f'run {number + 1} of {arguments.repeats}: {name}', file=sys.stderr)
            with kind:
                for measure, value in kind.measure(arguments).items():
                    results[name].setdefault(measure, []).append(value)
    medians = {name: {measure: statistics.median(values) for measure, values in measures.items()}
               for name, measures in results.items()}
    ours, rxe, tcp = medians['verbatim'], medians['rxe'], medians['tcp']
    best = medians['rxe_one_device']
    json.dump({
        'kernel': platform.release(), 'cpus': os.cpu_count(), 'mtu': MTU, 'repeats': arguments.repeats,
        'median': medians, 'all': results,
        'ratio': {
            'write_64k_bandwidth_to_rxe': ours['write_64k_mib_s'] / rxe['write_64k_mib_s'],
            'write_8b_latency_to_rxe': ours['write_8b_us'] / rxe['write_8b_us'],
            'write_64k_bandwidth_to_rxe_one_device': ours['write_64k_mib_s'] / best['write_64k_mib_s'],
            'write_8b_latency_to_rxe_one_device': ours['write_8b_us'] / best['write_8b_us'],
            'write_64k_bandwidth_to_tcp': ours['write_64k_mib_s'] / tcp['stream_mib_s'],
            'rxe_write_64k_bandwidth_to_tcp': rxe['write_64k_mib_s'] / tcp['stream_mib_s'],
        },
    }, sys.stdout, indent=1)
    print()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('--built', type=Path, required=True, help='the folder of verbatim and libverbatim.so')
    parser.add_argument('--repeats', type=int, default=3, help='default: %(default)s')
    parser.add_argument('--writes', type=int, default=1000, help='64 KiB WRITEs per run (default: %(default)s)')
    parser.add_argument('--round-trips', type=int, default=1000, help='8 byte WRITEs each way (default: %(default)s)')
    return parser.parse_args()


def shell(script):
    subprocess.run(['sh', '-ec', script], check=True, stdout=subprocess.DEVNULL)


class Pair:
    """Two ends with an address each; subclasses say how they are joined and what runs on them."""

    def __enter__(self):
        self.background = []
        try:
            self.set_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in reversed(self.background):
            process.terminate()
            process.wait()
        self.tear_down()

    def start(self, end, argv, **options):
        """Starts a program at an end."""
        return subprocess.Popen(self.at(end) + argv, env={**os.environ, **self.environment(end)}, text=True, **options)

    def environment(self, end):
        return {}

    def between(self, argv, device):
        """Runs a program as server at b and as client at a; what the client wrote."""
        global PORT
        # A port that was never used has no connection that waits for its end.
        PORT += 1
        argv = argv + ['-F', '-p', str(PORT)]
        server = self.start('b', argv + device('b'), stdout=subprocess.DEVNULL)
        try:
            wait_for_listener(server.pid, PORT)
            client = self.start('a', argv + device('a') + [self.server_address()], stdout=subprocess.PIPE)
            try:
                output = client.communicate(timeout=LIMIT_S)[0]
            finally:
                client.kill()
            if client.returncode or server.wait(LIMIT_S):
                raise SystemExit(f'{argv[0]} failed:\n{output}')
            return output
        finally:
            server.kill()
            server.wait()

    def server_address(self):
        return ENDS['b']

    def perftest(self, arguments):
        write = ['ib_write_bw', '-s', '65536', '-n', str(arguments.writes)]
        ping = ['ib_write_lat', '-s', '8', '-n', str(arguments.round_trips)]
        # bytes iterations peak average rate; bytes iterations min max typical ...
        return {'write_64k_mib_s': row(self.between(write, self.device))[3],
                'write_8b_us': row(self.between(ping, self.device))[4]}

    def measure(self, arguments):
        return self.perftest(arguments)


class Namespaces(Pair):
    """Each end in a network namespace of its own."""

    def set_up(self):
        shell(f'''
            ip netns add a; ip netns add b
            ip link add va mtu {MTU} netns a type veth peer name vb mtu {MTU} netns b
            for end in a b; do ip -n $end link set lo up; ip -n $end link set v$end up; done
            ip -n a addr add {ENDS['a']}/24 dev va; ip -n b addr add {ENDS['b']}/24 dev vb''')

    def tear_down(self):
        shell('for end in a b; do ip netns del $end 2>/dev/null || true; done')

    def at(self, end):
        return ['ip', 'netns', 'exec', end]


class Verbatim(Namespaces):
    def __init__(self, built):
        self.built = built.resolve()

    def set_up(self):
        super().set_up()
        for end in ENDS:
            folder = Path(f'/run/verbatim-{end}')
            folder.mkdir(exist_ok=True)
            (folder / 'nic.sock').unlink(missing_ok=True)
            self.background.append(self.start(
                end, [str(self.built / 'verbatim'), 'nic', '--runtime-dir', str(folder), '--interface', f'v{end}']))
            wait(f'the RNIC at {end}', (folder / 'nic.sock').exists)

    def start(self, end, argv, **options):
        if argv[0].startswith('ib_'):
            argv = ['env', f"LD_PRELOAD={self.built / 'libverbatim.so'}", *argv]
        return super().start(end, argv, **options)

    def environment(self, end):
        return {'VERBATIM_RUNTIME': f'/run/verbatim-{end}'}

    def device(self, _):
        return ['-d', 'verbatim0', '-x', '0']


class Tcp(Namespaces):
    def measure(self, arguments):
        server = self.start('b', ['iperf3', '-s', '-1'], stdout=subprocess.DEVNULL)
        wait_for_listener(server.pid, 5201)
        client = self.start('a', ['iperf3', '-c', ENDS['b'], '-C', 'cubic', '-t', '4', '-J'], stdout=subprocess.PIPE)
        report = json.loads(client.communicate(timeout=LIMIT_S)[0])
        server.wait(LIMIT_S)
        return {'stream_mib_s': report['end']['sum_received']['bits_per_second'] / 8 / 2**20}


class Rxe(Pair):
    """Both ends in one namespace, with rules that send what is for the other end over the wire."""

    def set_up(self):
        a, b = ENDS['a'], ENDS['b']
        shell(f'''
            ip link add va mtu {MTU} type veth peer name vb mtu {MTU}
            for dev in all va vb; do
                for setting in accept_local=1 rp_filter=0 arp_ignore=1 arp_announce=2; do
                    sysctl -qw net.ipv4.conf.$dev.$setting
                done
            done
            ip addr add {a}/32 dev va; ip addr add {b}/32 dev vb
            ip link set va up; ip link set vb up
            ip route add {b} dev va src {a} table 100; ip route add {a} dev vb src {b} table 100
            ip rule add pref 20 lookup local
            for to in {a} {b}; do ip rule add pref 5 iif lo to $to lookup 100; done
            ip rule del pref 0
            for end in a b; do rdma link add rxe-$end type rxe netdev v$end; done
            ping -q -c 1 -I {a} {b}''')

    def tear_down(self):
        shell('''
            for end in a b; do rdma link del rxe-$end 2>/dev/null || true; done
            ip rule add pref 0 lookup local 2>/dev/null || true
            ip rule del pref 20 2>/dev/null || true
            while ip rule del pref 5 2>/dev/null; do :; done
            ip link del va 2>/dev/null || true''')

    def at(self, _):
        return []

    def device(self, end):
        return ['-d', f'rxe-{end}', '-x', '1']


class RxeOneDevice(Pair):
    def set_up(self):
        shell(f'''
            ip link add va mtu {MTU} type veth peer name vb mtu {MTU}
            ip addr add {ENDS['a']}/24 dev va
            ip link set va up; ip link set vb up
            rdma link add rxe-a type rxe netdev va''')

    def tear_down(self):
        shell('rdma link del rxe-a 2>/dev/null || true; ip link del va 2>/dev/null || true')

    def at(self, _):
        return []

    def device(self, _):
        return ['-d', 'rxe-a', '-x', '1']

    def server_address(self):
        return ENDS['a']


def row(output):
    """The numbers of perftest's one row."""
    for line in output.splitlines():
        if re.match(r'\s*\d+\s+\d+\s+[\d.]+\s', line):
            return [float(number) for number in line.split()]
    raise SystemExit(f'no row in what perftest printed:\n{output}')


def wait(what, condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f'{what} is not ready after {LIMIT_S} s')
        time.sleep(0.02)


def wait_for_listener(pid, port):
    """Until something listens on a TCP port in the network of a process: state 0A, proc_pid_net(5)."""
    pattern = re.compile(f':{port:04X} [0-9A-F]+:[0-9A-F]+ 0A')
    tables = [Path(f'/proc/{pid}/net/{table}') for table in ('tcp', 'tcp6')]
    wait(f'port {port}', lambda: any(pattern.search(table.read_text()) for table in tables))


if __name__ == '__main__':
    # So that what was started and mounted is taken down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
