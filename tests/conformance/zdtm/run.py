#!/usr/bin/python3
"""Runs CRIU's own tests (test/zdtm/static) as instances that move, and writes down how each ended.

`./setup.sh --zdtm` unpacks the source of the CRIU that is used here, and builds them; nothing of them is changed. Each test is a process that makes some object of
the kernel's, waits for SIGTERM, and then looks whether the object is as it was. Here it is the only program of an instance (first.sh) that moves from one host of a
lab to another one in between.

What does not pass is tried twice more: without a move, and on plain CRIU, as `runc checkpoint` and `runc restore` of the same program. So each test has one of these
outcomes:

    pass                it moved, and found all as it was
    refused: REASON     `verbatim check` names what cannot move
    criu: REASON        it does not move, or fails after the move, and so it does on plain CRIU
    unmoved: REASON     it fails without a move, too
    start: REASON       it cannot start here
    fault: REASON       none of these: ours to mend

outcomes.txt says what each should do. A run is good if each does that, or passes.

    run.py --program target/release/verbatim --out out/zdtm
    run.py --program target/release/verbatim socket-tcp file_lock       those with one of these words in their names

Outcomes are kept in the folder of --out. A run that was cut off goes on with the rest, if the program is the same.

Exit status: 0 if all is as outcomes.txt says or better, 1 if not, 2 if nothing could be run.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOME = Path('/opt/verbatim/zdtm')
TESTS = HOME / 'test/zdtm/static'
CRIU = Path('/opt/verbatim/criu/bin/criu')
LAB = 'zdtm'
# Seconds.
COMMAND, START, END = 120, 30, 40
REASON_LENGTH = 140

# Programs of the folder that are no tests of their own: parts of others.
PARTS = {'get_smaps_bits', 'ofd_file_locks'}
# What the Makefile of the tests gives these.
ARGUMENTS = {
    'env00': ['--envname=ENV_00_TEST'],
    'umask00': ['--mask=0345'],
    'cmdlinenv00': ['--arg1=arg1', '--arg2=arg2', '--arg3=arg3'],
    'shm-unaligned': ['--shmem_size=5000'],
    'shm-hugetlb': ['--shmem_size=4194304'],
    'fifo-rowo-pair': ['--name_master=/tmp/t.master.test', '--name_slave=/tmp/t.slave.test'],
}


def lists(text):
    """Which tests of the Makefile have a file, a folder, or both; and those that are built for another processor."""
    found = {}
    for name, words in re.findall(r'^\s*(TST_\w+)\s*:?\+?=((?:.*\\\n)*.*)$', text, re.M):
        found.setdefault(name, []).extend(re.sub(r'#.*', '', words).replace('\\', ' ').split())
    return found


class Tests:
    def __init__(self):
        self.lists = lists((TESTS / 'Makefile').read_text())
        names = {name for key in ('TST_NOFILE', 'TST_FILE', 'TST_DIR', 'TST_DIR_FILE', 'TST_STATE') for name in self.lists[key]}
        self.names = sorted((names | set(ARGUMENTS)) - PARTS)

    def arguments(self, name):
        of = lambda key: name in self.lists[key]
        file, folder = ['--filename=/tmp/t.test'], ['--dirname=/tmp/t.test']
        if of('TST_FILE'):
            return file
        if of('TST_DIR'):
            return folder
        if of('TST_DIR_FILE'):
            return ['--dirname=/tmp/t.dir.test', *file]
        return ARGUMENTS.get(name, [])


class Ended(Exception):
    """The outcome of a test that did not come to its end."""


def run(command, limit=COMMAND):
    """The exit status and all output; status 124 if it took too long."""
    try:
        ended = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               timeout=limit, text=True, errors='replace', check=False)
    except subprocess.TimeoutExpired as error:
        # On a timeout it is bytes, whatever was asked for.
        said = error.stdout or b''
        return 124, said if isinstance(said, str) else said.decode(errors='replace')
    return ended.returncode, ended.stdout


def until(what, limit):
    """The first value of `what` that is not None, or None. A test has no event that a program of another process could wait for."""
    end = time.monotonic() + limit
    while (value := what()) is None and time.monotonic() < end:
        time.sleep(0.1)
    return value


def first_line(text):
    """The line of an error that says most, without what differs from run to run."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(('note', 'warning'))]
    said = [part for line in lines for part in line.split(' / ') if 'Error (' in part and 'RLIMIT_NOFILE' not in part]
    because = [line for line in lines if line.startswith('because')]
    line = (said or because or lines or [''])[0]
    line = re.sub(r'.*Error \((\w+/[\w./-]+):\d+\)', r'CRIU \1', line)
    line = re.sub(r'z-[\w-]+', 'it', line)
    line = re.sub(r'\b0x[0-9a-f]+\b|\b\d{3,}\b', 'N', line)
    return line.replace('\t', ' ')[:REASON_LENGTH]


def verdict(said):
    """The end of a test's own output: whether it passed, and its last word."""
    if re.search(r'\bPASS\b', said):
        return True, ''
    said = [line for line in said.splitlines() if not line.startswith(('STARTED', 'END', '==>'))]
    told = [line for line in said if re.search(r'FAIL|ERR|[Ss]kip', line) and 'exited unexpectedly' not in line]
    lines = told or [line for line in said if line.strip()] or ['it said nothing']
    return False, re.sub(r'^[\d:.]+:\s*\d+:\s*', '', lines[0])


class Instance:
    """A test as an instance."""

    def __init__(self, program, test, arguments, suffix=''):
        self.program, self.name = program, 'z-' + re.sub(r'[^a-z0-9]+', '-', test.lower()) + suffix
        code, said = self.ask('run', '--host', 'src', '--name', self.name, '--', HERE / 'first.sh', TESTS / test, *arguments)
        if code:
            raise Ended('start: ' + first_line(said))

    def ask(self, *words):
        return run([self.program, words[0], '--lab', LAB, *words[1:]])

    def logs(self):
        return self.ask('logs', self.name)[1]

    def started(self):
        match = until(lambda: re.search(r'^STARTED (\d+)$', self.logs(), re.M), START)
        if match is None or match[1] != '0':
            raise Ended('start: ' + (first_line(verdict(self.logs())[1]) if match else 'it does not come up'))

    def moves(self):
        code, said = self.ask('check', self.name, '--to', 'dst')
        if code:
            raise Ended('refused: ' + first_line(said))
        code, said = self.ask('migrate', self.name, '--to', 'dst')
        if code:
            raise Ended('no move: ' + first_line(said))

    def ends(self):
        code, said = self.ask('exec', self.name, '--', '/bin/touch', '/tmp/stop')
        if code:
            raise Ended('fails: it cannot be told to end: ' + first_line(said))
        return verdict(self.end())

    def end(self):
        def ended():
            said = self.logs()
            return said if re.search(r'^END$', said, re.M) else None
        return until(ended, END) or ''

    def close(self):
        self.ask('stop', self.name)


class Plain:
    """A test as a container of runc's, which CRIU dumps and restores without Verbatim."""

    def __init__(self, folder, test, arguments):
        self.folder, self.name = Path(tempfile.mkdtemp(dir=folder)), 'z-plain-' + re.sub(r'[^a-z0-9]+', '-', test.lower())
        self.root = self.folder / 'root'
        self.root.mkdir()
        subprocess.run(['mount', '--bind', '/', self.root], check=True)
        subprocess.run(['mount', '--make-private', self.root], check=True)
        subprocess.run(['runc', 'spec'], cwd=self.folder, check=True)
        path = self.folder / 'config.json'
        config = json.loads(path.read_text())
        config['root'] = {'path': str(self.root), 'readonly': True}
        config['process'].update(terminal=False, args=[str(HERE / 'first.sh'), str(TESTS / test), *arguments], cwd='/')
        for kind in ('bounding', 'effective', 'permitted'):
            config['process']['capabilities'][kind] = [
                'CAP_' + word for word in 'CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP NET_BIND_SERVICE SYS_CHROOT KILL AUDIT_WRITE'.split()]
        config['process'].pop('rlimits', None)
        config['mounts'].append({'destination': '/tmp', 'type': 'tmpfs', 'source': 'tmpfs', 'options': ['mode=1777']})
        path.write_text(json.dumps(config))
        # runc gives a restored container its own pipes in the place of pipes, which it does for nothing else.
        self.pipes = [os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) for _ in range(3)]
        self.said = ''

    def runc(self, *words):
        environment = {**os.environ, 'PATH': f'{CRIU.parent}:/usr/sbin:/usr/bin:/sbin:/bin'}
        (stdin, _), (_, stdout), (_, stderr) = self.pipes
        return subprocess.run(['runc', '--root', self.folder / 'state', '--log', self.folder / 'log', *words], cwd=self.folder, env=environment,
                              stdin=stdin, stdout=stdout, stderr=stderr, timeout=COMMAND, check=False).returncode

    def logs(self):
        try:
            self.said += os.read(self.pipes[1][0], 65536).decode(errors='replace')
        except BlockingIOError:
            pass
        return self.said

    def fails(self):
        """Whether it fails there, too. One that does not start there excuses nothing."""
        if self.runc('run', '--detach', self.name):
            return False
        if until(lambda: re.search(r'^STARTED 0$', self.logs(), re.M), START) is None:
            return False
        images = ['--image-path', self.folder / 'images', '--work-path', self.folder, '--tcp-established', '--file-locks']
        if self.runc('checkpoint', *images, self.name) or self.runc('restore', '--detach', *images, self.name):
            return True
        self.runc('exec', self.name, '/bin/touch', '/tmp/stop')
        until(lambda: True if re.search(r'^END$', self.logs(), re.M) else None, END)
        return not verdict(self.logs())[0]

    def close(self):
        self.runc('delete', '--force', self.name)
        for end in (end for pipe in self.pipes for end in pipe):
            os.close(end)
        subprocess.run(['umount', '--lazy', self.root], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


class Runner:
    def __init__(self, arguments, folder):
        self.program, self.folder, self.tests = arguments.program.resolve(), folder, Tests()

    def unmoved_passes(self, test):
        instance = None
        try:
            instance = Instance(self.program, test, self.tests.arguments(test), '-u')
            instance.started()
            return instance.ends()
        except Ended as ended:
            return False, str(ended)
        finally:
            if instance:
                instance.close()

    def plain_fails(self, test):
        plain = Plain(self.folder, test, self.tests.arguments(test))
        try:
            return plain.fails()
        except subprocess.TimeoutExpired:
            return False
        finally:
            plain.close()

    def outcome(self, test):
        if not os.access(TESTS / test, os.X_OK):
            return 'start: it is not built: this distribution lacks a header or library'
        instance = None
        try:
            instance = Instance(self.program, test, self.tests.arguments(test))
            instance.started()
            instance.moves()
            passed, why = instance.ends()
            if passed:
                return 'pass'
            bad = 'fails after the move: ' + why
        except Ended as ended:
            bad = str(ended)
            if bad.startswith(('start:', 'refused:')):
                return bad
        finally:
            if instance:
                instance.close()
        passed, why = self.unmoved_passes(test)
        bad = first_line(bad)
        if not passed:
            return 'unmoved: ' + first_line(why)
        return ('criu: ' if self.plain_fails(test) else 'fault: ') + bad


def expected():
    lines = (line for line in (HERE / 'outcomes.txt').read_text().splitlines() if line and not line.startswith('#'))
    return dict(line.split('\t', 1) for line in lines)


def kind(outcome):
    return outcome.split(':')[0]


def digest(program):
    """Of all that the outcomes depend on."""
    total = hashlib.sha256()
    for path in (program, program.with_name('libverbatim.so'), HERE / 'run.py', HERE / 'first.sh'):
        total.update(path.read_bytes())
    return total.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--program', type=Path, required=True, help='the program `verbatim`')
    parser.add_argument('--out', type=Path, default=Path('out/zdtm'), help='a folder for outcomes (out/zdtm)')
    parser.add_argument('--at-once', type=int, default=3, help='tests at a time (3)')
    parser.add_argument('words', nargs='*', help='words of names')
    arguments = parser.parse_args()
    if not (TESTS / 'busyloop00').exists():
        print(f'run.py: there are no tests at {TESTS}: run ./setup.sh --zdtm', file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    kept, mark = arguments.out / 'outcomes.txt', arguments.out / 'digest'
    now = digest(arguments.program)
    if not mark.exists() or mark.read_text() != now:
        kept.unlink(missing_ok=True)
        mark.write_text(now)
    known = dict(line.split('\t', 1) for line in kept.read_text().splitlines()) if kept.exists() else {}
    with tempfile.TemporaryDirectory(prefix='zdtm-') as folder:
        runner = Runner(arguments, Path(folder))
        wanted = [name for name in runner.tests.names if not arguments.words or any(word in name for word in arguments.words)]
        left = [name for name in wanted if name not in known]
        if left:
            code, said = run([arguments.program, 'lab', 'up', '--lab', LAB, '--hosts', 'src,dst'])
            if code:
                print(f'run.py: the lab does not come up: {said}', file=sys.stderr)
                return 2
        try:
            with concurrent.futures.ThreadPoolExecutor(arguments.at_once) as pool, kept.open('a') as out:
                jobs = {pool.submit(runner.outcome, name): name for name in left}
                for number, job in enumerate(concurrent.futures.as_completed(jobs), 1):
                    name, known[jobs[job]] = jobs[job], job.result()
                    print(f'{number}/{len(left)}\t{name}\t{known[name]}', flush=True)
                    out.write(f'{name}\t{known[name]}\n')
                    out.flush()
        finally:
            if left:
                run([arguments.program, 'lab', 'down', '--lab', LAB])
    return report({name: known[name] for name in wanted}, expected())


def report(outcomes, wanted):
    counts, bad = {}, False
    for name, outcome in sorted(outcomes.items()):
        counts[kind(outcome)] = counts.get(kind(outcome), 0) + 1
        should = wanted.get(name, 'pass')
        if kind(outcome) == kind(should):
            continue
        if outcome == 'pass':
            print(f'better: {name} passes; outcomes.txt says {should}')
            continue
        bad = True
        print(f'WORSE: {name}: {outcome}; outcomes.txt says {should}')
    print(', '.join(f'{count} {what}' for what, count in sorted(counts.items())))
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main())
