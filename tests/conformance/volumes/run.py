#!/usr/bin/python3
"""Runs tests that others have written for NBD servers and clients, with a daemon of ours as the server, and writes down how each ended.

The suites are source packages of the distribution, which `./setup.sh --volume-suites` unpacks; nothing of them is changed. nbd's
nbd-tester-client is pointed at a volume. The tests of libnbd, nbdkit and QEMU start servers of their own: they find `bin/nbdkit` and `bin/qemu-nbd` first,
which serve volumes in their place (standin.py). A test whose server was the other one after all, since only that has what it needs, says nothing about us, and is
listed as not applicable with what it needed.

    run.py --program target/release/verbatim --out out/volume-conformance
    run.py --program target/release/verbatim nbd: libnbd:info        those that begin like one of these

Exit status: 0 if all is as expected.txt says or better, 1 if not, 2 if nothing could be run.
"""

import argparse
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUITES = Path('/opt/verbatim/volume-suites')
# Seconds: qemu-iotests:215 took 176 on a machine with a load of 12 on two cores.
LIMIT = 400


class Daemon:
    """A daemon of its own, in a folder of its own."""

    def __init__(self, program, folder):
        self.program, self.runtime, self.log = program, folder / 'run', folder / 'log'
        config = folder / 'config'
        subprocess.run([program, 'hosts', folder / 'hosts', 'a=127.0.0.1'], check=True, stdout=subprocess.DEVNULL)
        config = folder / 'hosts' / 'a'
        with self.log.open('w') as log:
            self.child = subprocess.Popen([program, 'volume', 'daemon', '--name', 'a', '--config-dir', config, '--state-dir', folder / 'state',
                                           '--runtime-dir', self.runtime, '--port', '0'], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + 30
        while subprocess.run([program, 'volume', 'list', '--runtime-dir', self.runtime], capture_output=True, check=False).returncode:
            if self.child.poll() is not None or time.monotonic() > end:
                raise SystemExit(f'run.py: the daemon does not start: {self.log.read_text()}')
            time.sleep(0.05)

    def order(self, *arguments):
        return subprocess.run([self.program, 'volume', *map(str, arguments), '--runtime-dir', self.runtime],
                              check=True, capture_output=True, text=True).stdout.strip()

    def close(self):
        self.child.terminate()
        self.child.wait()


class Runner:
    def __init__(self, arguments, folder):
        self.folder, self.program = folder, arguments.program.resolve()
        self.daemon = Daemon(self.program, folder)
        self.notes = folder / 'notes'
        self.words = arguments.tests
        self.out = arguments.out
        self.results = {}
        self.number = 0

    def wants(self, name):
        return not self.words or any(name.startswith(word) for word in self.words)

    def environment(self, **more):
        # nbdsh takes the first Python, which has to be the one that the distribution has made libnbd's module for.
        path = f'{HERE / "bin"}:/usr/sbin:/usr/bin:/sbin:/bin'
        return {**os.environ, 'PATH': path, 'VERBATIM_STANDIN_PROGRAM': str(self.program), 'VERBATIM_STANDIN_RUNTIME': str(self.daemon.runtime),
                'VERBATIM_STANDIN_NOTES': str(self.notes), 'srcdir': '.', 'LC_ALL': 'C.UTF-8', **more}

    def test(self, name, command, cwd, is_served=False, **more):
        """Runs one. `is_served`: it was given a volume, and starts no server."""
        if not self.wants(name):
            return
        self.notes.write_text('')
        began = time.monotonic()
        with (self.folder / 'output').open('wb') as output:
            child = subprocess.Popen(command, cwd=cwd, env=self.environment(**more), stdin=subprocess.DEVNULL, stdout=output,
                                     stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = child.wait(LIMIT)
            except subprocess.TimeoutExpired:
                code = 'timeout'
            try:
                os.killpg(child.pid, signal.SIGTERM if code == 'timeout' else signal.SIGHUP)
            except ProcessLookupError:
                pass
            child.wait()
        said = (self.folder / 'output').read_bytes().decode(errors='replace')
        self.end_servers()
        self.end(name, self.outcome(code, said, is_served), said, time.monotonic() - began)

    def end_servers(self):
        """Ends those in the place of servers that the test has left."""
        for line in self.notes.read_text().splitlines():
            pid = line.removeprefix('pid: ')
            try:
                if pid != line and str(HERE / 'bin').encode() in Path(f'/proc/{pid}/cmdline').read_bytes():
                    os.kill(int(pid), signal.SIGTERM)
            except (FileNotFoundError, ProcessLookupError):
                pass

    def outcome(self, code, said, is_served):
        notes = self.notes.read_text().splitlines()
        handed_on = [line.removeprefix('handed on: ') for line in notes if line.startswith('handed on')]
        served = is_served or any(line.startswith('served') for line in notes)
        if handed_on and not (served and code == 0):
            return 'not applicable: needs ' + handed_on[0]
        not_run = re.search(r'^\S+ +not run\b.*?(?:\s{2,}|\] )(\S.*)$', said, re.M)
        if not_run:
            return 'not applicable: ' + not_run[1].strip()[-120:]
        # QEMU says it on its standard error, which not every test shows: some only miss its greeting.
        if 'invalid accelerator qtest' in said or 'Timeout waiting for capabilities' in said and not has_qtest():
            return "not applicable: needs QEMU's accelerator qtest, which the distribution's does not have"
        if code == 77:
            reason = re.findall(r'(?:SKIP|skip|requires|test prerequisite|failed with error).*', said) or said.splitlines()[-1:] or ['']
            return 'not applicable: ' + reason[0].strip()[:120]
        if not served:
            return 'not applicable: starts no server' if code == 0 else f'not applicable: ends ({code}) before it has a server'
        return 'pass' if code == 0 else f'fail: {code}'

    def end(self, name, outcome, said, seconds):
        self.results[name] = outcome
        print(f'{name}\t{outcome}\t{seconds:.1f} s', flush=True)
        if self.out:
            place = self.out / (re.sub(r'[^\w.-]', '_', name) + '.txt')
            place.write_text(said)

    def volume(self, size):
        self.number += 1
        name = f'direct-{self.number}'
        self.daemon.order('create', name, '--size', size)
        self.daemon.order('attach', name)
        return name, self.daemon.runtime / 'volumes' / f'{name}.sock'

    def away(self, name):
        self.daemon.order('detach', name)
        self.daemon.order('delete', name)

    # ---- nbd -------------------------------------------------------------------------------------------------------------

    def nbd(self, suite):
        """nbd-tester-client, as `tests/run/simple_test` calls it, on a Unix socket."""
        if not self.wants('nbd:'[:len(min(self.words or [''], key=len))]) and not any(word.startswith('nbd:') for word in self.words):
            return
        client = suite / 'nbd-tester-client'
        runs = suite / 'tests/run'
        cases = [('cfg1', 4 << 20, []), ('write', 4 << 20, ['-w']), ('flush', 4 << 20, ['-w', '-f']), ('cfgsize', 4 << 20, ['-o']),
                 ('handshake', 4 << 20, ['-h']), ('integrity', 50 << 20, ['-i', '-t', runs / 'integrity-test.tr']),
                 ('integrityhuge', 50 << 20, ['-i', '-t', runs / 'integrityhuge-test.tr'])]
        for name, size, options in cases:
            if not self.wants(f'nbd:{name}'):
                continue
            volume, socket = self.volume(size)
            self.test(f'nbd:{name}', [client, '-N', volume, *options, '-u', socket], runs, is_served=True)
            self.away(volume)
        for name, reason in {'rowrite': 'a read-only export is for instances alone', 'cfgmulti': 'the same', 'rotree': 'its treefiles',
                             'tree': 'its treefiles', 'dirconfig': 'its configuration', 'inetd': 'to be started by inetd', 'list': 'nbd-client over plain TCP',
                             'tls': 'certificates of its own authority', 'tlshuge': 'the same', 'tlswrongcert': 'the same', 'unix': 'what the others use here'}.items():
            if self.wants(f'nbd:{name}'):
                self.end(f'nbd:{name}', f'not applicable: {reason}', '', 0)

    # ---- libnbd ----------------------------------------------------------------------------------------------------------

    def libnbd(self, suite):
        tree = self.folder / 'libnbd'
        shutil.copytree(suite, tree, symlinks=True)
        functions = (tree / 'tests/functions.sh.in').read_text().replace('@abs_top_srcdir@', str(tree)).replace('@configure_input@', '')
        (tree / 'tests/functions.sh').write_text(functions)
        (tree / 'config.h').write_text('#define HAVE_STDATOMIC_H 1\n#define PACKAGE_VERSION "1"\n#define NBDKIT "nbdkit"\n')
        tests = tree / 'tests'
        programs = {}
        for source in sorted(tests.glob('*.c')):
            text = source.read_text()
            name = source.stem
            if 'main' not in text or name in ('requires', 'pick-a-port', 'eflags'):
                continue
            others = [tests / 'requires.c'] if 'requires.h' in text else []
            others += [tests / 'pick-a-port.c'] if 'pick-a-port.h' in text else []
            programs[name] = (source, others)
        for name, (source, others) in programs.items():
            if not self.wants(f'libnbd:tests/{name}'):
                continue
            built = subprocess.run(['gcc', '-w', '-pthread', '-I', tree, '-I', tree / 'common/include', '-I', tree / 'tests', '-D_GNU_SOURCE', '-o', tests / name,
                                    source, *others, '-lnbd', '-lgnutls'], capture_output=True, text=True, check=False)
            if built.returncode:
                self.end(f'libnbd:tests/{name}', 'not applicable: is not built without the library\'s own build', built.stderr, 0)
            elif not (tests / f'{name}.sh').exists():
                self.test(f'libnbd:tests/{name}', [tests / name], tests, LIBNBD_DEBUG='1')
        for folder in ('tests', 'info', 'copy', 'sh', 'dump', 'fuse', 'interop'):
            for script in sorted((tree / folder).glob('*.sh')):
                name = f'libnbd:{folder}/{script.stem}'
                if script.stem not in ('make-pki', 'eflags-plugin') and not re.search(r'test-(long|short)-options|test-version|test-help', name):
                    self.test(name, ['bash', f'./{script.name}'], tree / folder, LIBNBD_DEBUG='0')
        for script in sorted((tree / 'python/t').glob('*.py')):
            self.test(f'libnbd:python/{script.stem}', ['/usr/bin/python3', script], tree / 'python', PYTHON='/usr/bin/python3')

    # ---- nbdkit ----------------------------------------------------------------------------------------------------------

    def nbdkit(self, suite):
        tree = self.folder / 'nbdkit'
        shutil.copytree(suite, tree, symlinks=True)
        values = {'abs_top_srcdir': tree, 'configure_input': '', 'PYTHON': '/usr/bin/python3', 'SOEXT': 'so', 'EXEEXT': '', 'CUT': 'cut', 'SED': 'sed',
                  'STAT': 'stat', 'TRUNCATE': 'truncate', 'top_builddir': tree}
        functions = re.sub(r'@(\w+)@', lambda match: str(values.get(match[1], '')), (tree / 'tests/functions.sh.in').read_text())
        (tree / 'tests/functions.sh').write_text(functions)
        for script in sorted((tree / 'tests').glob('test-*.sh')):
            text = script.read_text()
            # The others are of a plugin, a filter or an option of nbdkit's own.
            if re.search(r'\bnbdkit\b[^\n]*\b(memory|pattern|null|data|file)\b', text) and '--filter' not in text:
                self.test(f'nbdkit:{script.stem}', ['bash', f'./{script.name}'], tree / 'tests')

    # ---- QEMU ------------------------------------------------------------------------------------------------------------

    def qemu(self, suite):
        """qemu-iotests for raw images by NBD: those for any protocol, and those for this one."""
        tree = self.folder / 'qemu-iotests'
        shutil.copytree(suite / 'tests/qemu-iotests', tree / 'tests/qemu-iotests', symlinks=True)
        for name in ('python', 'scripts'):
            if (suite / name).exists():
                shutil.copytree(suite / name, tree / name, symlinks=True)
        iotests = tree / 'tests/qemu-iotests'
        for script in sorted([*iotests.glob('[0-9][0-9][0-9]'), *(iotests / 'tests').glob('*')]):
            text = script.read_text(errors='replace')
            protocols, formats = (' '.join(re.findall(rf'^_supported_{what} (.*)', text, re.M)) for what in ('proto', 'fmt'))
            if re.search(r'\b(nbd|generic)\b', protocols) and re.search(r'\b(raw|generic)\b', formats) and 'nbd' not in ' '.join(
                    re.findall(r'^_unsupported_proto (.*)', text, re.M)):
                self.iotest(script.name, iotests)

    def iotest(self, name, iotests):
        def original(program):
            return shutil.which(program) or program
        # It has no time limit for each, and says 'not run' with a success.
        command = ['/usr/bin/python3', './check', '-raw', '-nbd', name]
        self.test(f'qemu-iotests:{name}', command, iotests, is_served=False, QEMU_PROG=original('qemu-system-x86_64'), QEMU_IMG_PROG=original('qemu-img'),
                  QEMU_IO_PROG=original('qemu-io'), QEMU_NBD_PROG=str(HERE / 'bin/qemu-nbd'), QSD_PROG=original('qemu-storage-daemon'),
                  TEST_DIR=str(self.folder / 'scratch'), PYTHON='/usr/bin/python3')

    # ---- programs of the distribution -----------------------------------------------------------------------------------

    def programs(self):
        jobs = [('randwrite-4k', ['--rw=randwrite', '--bs=4k', '--iodepth=16']), ('randwrite-mixed', ['--rw=randwrite', '--bsrange=512-256k', '--blockalign=512', '--iodepth=8']),
                ('trimwrite', ['--rw=trimwrite', '--bs=64k', '--iodepth=4']), ('write-1m', ['--rw=write', '--bs=1m', '--iodepth=4'])]
        for name, options in jobs:
            if not self.wants(f'programs:fio-{name}'):
                continue
            volume, socket = self.volume(48 << 20)
            command = ['fio', '--name=nbd', '--ioengine=nbd', f'--uri=nbd+unix:///{volume}?socket={socket}', '--size=48m', '--verify=crc32c', '--verify_fatal=1',
                       '--do_verify=1', *options]
            self.test(f'programs:fio-{name}', command, self.folder, is_served=True)
            self.away(volume)
        if self.wants('programs:nbdcopy'):
            volume, socket = self.volume(64 << 20)
            uri = f'nbd+unix:///{volume}?socket={socket}'
            script = ('dd if=/dev/urandom of=image bs=1M count=64 status=none && nbdcopy --flush image "$0" && nbdcopy "$0" back && cmp image back && '
                      'qemu-img convert -f raw -O qcow2 "$0" image.qcow2 && qemu-img compare -f raw -F qcow2 "$0" image.qcow2 && '
                      'nbdcopy --connections=8 --requests=64 "$0" back && cmp image back && qemu-img bench -f raw -w -c 2000 "$0" && '
                      'nbdinfo --can connect "$0" && test "$(nbdinfo --size "$0")" = 67108864')
            self.test('programs:nbdcopy', ['sh', '-e', '-c', script, uri], self.folder, is_served=True)
            self.away(volume)


@functools.cache
def has_qtest():
    shown = subprocess.run(['qemu-system-x86_64', '-accel', 'help'], capture_output=True, text=True, check=False)
    return 'qtest' in shown.stdout.split()


def compare(results, expected_path, is_whole):
    """What is worse than it should be."""
    expected = dict(line.split('\t', 1) for line in expected_path.read_text().splitlines() if line and not line.startswith('#'))
    worse = []
    for name, outcome in results.items():
        wanted = expected.get(name, 'pass')
        if outcome != 'pass' and outcome.split(':')[0] != wanted.split(':')[0]:
            worse.append(f'{name}: {outcome}, and not {wanted}')
        elif outcome == 'pass' and wanted != 'pass':
            print(f'# {name} passes, and expected.txt has: {wanted}')
    if is_whole:
        worse += [f'{name}: was not run' for name in expected if name not in results]
    return worse


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('--program', type=Path, default=Path('target/release/verbatim'))
    parser.add_argument('--suites', type=Path, default=SUITES)
    parser.add_argument('--out', type=Path)
    parser.add_argument('--write', type=Path, help='write what came out as a new expected.txt')
    parser.add_argument('tests', nargs='*')
    arguments = parser.parse_args()
    if arguments.out:
        arguments.out = arguments.out.resolve()
        arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='volume-suites-') as folder:
        runner = Runner(arguments, Path(folder))
        try:
            for name in ('nbd', 'libnbd', 'nbdkit', 'qemu'):
                suite = arguments.suites / name
                prefix = {'qemu': 'qemu-iotests'}.get(name, name)
                if not runner.words or any(word.startswith(prefix) or prefix.startswith(word) for word in runner.words):
                    if suite.is_dir():
                        getattr(runner, name)(suite)
                    else:
                        print(f'run.py: {suite} is not there: ./setup.sh --volume-suites', file=sys.stderr)
                        return 2
            runner.programs()
        finally:
            runner.daemon.close()
            if arguments.out:
                shutil.copy(runner.daemon.log, arguments.out / 'daemon.log')
    results = runner.results
    kinds = [outcome.split(':')[0] for outcome in results.values()]
    summary = ', '.join(f'{kinds.count(kind)} {kind}' for kind in ('pass', 'fail', 'not applicable'))
    print(f'# {summary}')
    if arguments.out:
        (arguments.out / 'results.txt').write_text(''.join(f'{name}\t{outcome}\n' for name, outcome in results.items()))
    if arguments.write:
        arguments.write.write_text(''.join(f'{name}\t{outcome}\n' for name, outcome in results.items()))
        return 0
    worse = compare(results, HERE / 'expected.txt', not arguments.tests)
    for line in worse:
        print(f'WORSE {line}')
    return 1 if worse or not results else 0


if __name__ == '__main__':
    sys.exit(main())
