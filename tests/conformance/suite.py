#!/usr/bin/python3
"""Runs rdma-core's own test suite on one device, and writes down how each test ended.

The suite is the one that the distribution ships in the documentation folder of its package python3-pyverbs; it is
unpacked to a temporary folder, and nothing of it is changed. This program knows nothing about the device: it ran the
same tests on the kernel's rxe, whose results are beside it in rxe.txt.

Each test runs in a child process of its own, forked after the imports and before any device is open. So a test that
hangs or crashes ends alone, it can be given a time limit, and it starts from the same random seed wherever it stands
in the list.

    suite.py --dev verbatim0                  all tests, a line each
    suite.py --dev rxe0 --json results.json   the same, and a report for programs
    suite.py --dev verbatim0 test_qp test_cq.CQTest.test_create_cq    those that have these words in their names

Exit status: 0 if the suite could be run, whatever came of the tests; 2 if not.
"""

import argparse
import gzip
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest
import zlib
from pathlib import Path

# Where the package has it; where setup.sh puts it if dpkg leaves documentation out.
SUITES = [Path('/usr/share/doc/rdma-core/tests'), Path('/opt/verbatim/rdma-core/tests')]
OUTPUT_LIMIT_BYTES = 4000


def main():
    arguments = parse_arguments()
    try:
        with tempfile.TemporaryDirectory(prefix='rdma-core-tests-') as folder:
            unpack(arguments.suite or find_suite(), Path(folder) / 'tests')
            tests = load(Path(folder) / 'tests', arguments)
            results = [announce(run(test, arguments)) for test in tests]
    except SuiteError as error:
        print(f'suite.py: {error}', file=sys.stderr)
        return 2
    summary = {outcome: sum(result['outcome'] == outcome for result in results)
               for outcome in ('pass', 'skip', 'fail', 'error', 'timeout', 'crash')}
    print('# ' + ', '.join(f'{count} {outcome}' for outcome, count in summary.items()))
    if arguments.json:
        report = {'device': arguments.dev, 'seed': arguments.seed, 'summary': summary, 'tests': results}
        arguments.json.write_text(json.dumps(report, indent=1) + '\n')
    return 0


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('words', nargs='*', help='run only the tests that have one of these in their names')
    parser.add_argument('--dev', required=True, help='the device')
    parser.add_argument('--gid', type=int, help='index of the GID, if not the one that the suite chooses')
    parser.add_argument('--net', help='the interface of the device for the tests of rdma_cm, which find one in sysfs only')
    parser.add_argument('--suite', type=Path, help='where the suite is, if not where the distribution has it')
    parser.add_argument('--limit', type=float, default=60, help='seconds that a test may take (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=1, help='of the random choices that tests make')
    parser.add_argument('--json', type=Path, help='write the results there')
    return parser.parse_args()


class SuiteError(Exception):
    """The suite cannot be run at all."""


def find_suite():
    for suite in SUITES:
        if (suite / 'run_tests.py').exists():
            return suite
    raise SuiteError('the test suite of rdma-core is neither at ' + ' nor at '.join(map(str, SUITES)) +
                     '; run `make setup`, or give its place with --suite')


def unpack(suite, folder):
    """Copies the suite; the distribution compresses the larger files of a documentation folder."""
    folder.mkdir()
    for path in suite.glob('*.py'):
        shutil.copy(path, folder)
    for path in suite.glob('*.py.gz'):
        with gzip.open(path) as packed, open(folder / path.stem, 'wb') as plain:
            shutil.copyfileobj(packed, plain)
    if not (folder / 'run_tests.py').exists():
        raise SuiteError(f'{suite} does not hold the test suite of rdma-core')


def load(folder, arguments):
    """The tests that are meant, in the suite's own order."""
    # The modules import each other as `tests.NAME`, and `args_parser` without the package.
    sys.path[:0] = [str(folder.parent), str(folder)]
    sys.dont_write_bytecode = True
    sys.argv = ['run_tests.py', '--dev', arguments.dev]
    if arguments.gid is not None:
        sys.argv += ['--gid', str(arguments.gid)]
    try:
        from args_parser import parser
        parser.parse_args()
        import tests
    except ImportError as error:
        raise SuiteError(f'{error}; run `make setup`, which installs python3-pyverbs') from error

    if arguments.net:
        # Of these tests alone: others are not run where there is no such folder, and are compared with that.
        tests.base.RDMACMBaseTest._get_ip_mac = lambda test, dev, port, gid_index: test.args.append(
            [dev, port, gid_index, *test.get_ip_mac_address(arguments.net)])

    def flatten(suite):
        for item in suite:
            if isinstance(item, unittest.TestSuite):
                yield from flatten(item)
            else:
                yield item

    found = {test.id(): test for test in flatten(unittest.defaultTestLoader.loadTestsFromModule(tests))}
    chosen = [test for name, test in found.items()
              if not arguments.words or any(word in name for word in arguments.words)]
    if not chosen:
        raise SuiteError('no test has such a name')
    return chosen


def announce(result):
    line = f"{result['test']}\t{result['outcome']}"
    if result['reason']:
        line += ': ' + result['reason']
    print(f"{line}\t{result['seconds']:.2f} s", flush=True)
    return result


def run(test, arguments):
    """Runs a test in a child, and tells how it ended."""
    start = time.monotonic()
    report, report_in_child = os.pipe()
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            os.close(report)
            in_child(test, arguments.seed, report_in_child, output)
        os.close(report_in_child)
        ended = wait(pid, arguments.limit)
        # What the test has started goes with it.
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if ended is None:
            os.waitpid(pid, 0)
        with os.fdopen(report, 'rb') as pipe:
            os.set_blocking(pipe.fileno(), False)
            told = pipe.read() or b''
        length = output.seek(0, os.SEEK_END)
        output.seek(max(0, length - OUTPUT_LIMIT_BYTES))
        printed = output.read().decode(errors='replace')
    if ended is None:
        result = {'outcome': 'timeout', 'reason': f'did not end within {arguments.limit:g} s', 'details': ''}
    elif told:
        result = json.loads(told)
    elif os.WIFSIGNALED(ended):
        result = {'outcome': 'crash', 'reason': signal.Signals(os.WTERMSIG(ended)).name, 'details': ''}
    else:
        result = {'outcome': 'crash', 'reason': f'ended with status {os.WEXITSTATUS(ended)}', 'details': ''}
    return {'test': test.id(), **result, 'output': printed, 'seconds': round(time.monotonic() - start, 3)}


def wait(pid, limit):
    """The wait status of a child, or None if it does not end in time."""
    pidfd = os.pidfd_open(pid)
    try:
        readable, _, _ = select.select([pidfd], [], [], limit)
    finally:
        os.close(pidfd)
    return os.waitpid(pid, 0)[1] if readable else None


def in_child(test, seed, report, output):
    """Runs the test and never returns."""
    try:
        os.setpgid(0, 0)
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        # A test chooses sizes and flags at random: the same ones in every run, others in every test.
        random.seed(zlib.crc32(test.id().encode()) + seed)
        outcome = Outcome()
        unittest.TestSuite([test]).run(outcome)
        os.write(report, json.dumps(outcome.told()).encode())
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


class Outcome(unittest.TestResult):
    """The worst of what a test, its fixtures and its subtests report."""

    def __init__(self):
        super().__init__()
        self.outcome, self.reason, self.details = 'pass', '', ''

    def worse(self, outcome, error):
        order = ['pass', 'skip', 'fail', 'error']
        if order.index(outcome) >= order.index(self.outcome):
            self.outcome = outcome
            self.reason = one_line(f'{error[0].__name__}: {error[1]}')
            self.details = ''.join(traceback.format_exception(*error))[-OUTPUT_LIMIT_BYTES:]

    def addSkip(self, test, reason):
        if self.outcome == 'pass':
            self.outcome, self.reason = 'skip', one_line(reason)

    def addFailure(self, test, err):
        self.worse('fail', err)

    def addError(self, test, err):
        self.worse('error', err)

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.worse('fail' if issubclass(err[0], test.failureException) else 'error', err)

    def told(self):
        return {'outcome': self.outcome, 'reason': self.reason, 'details': self.details}


def one_line(text):
    return ' '.join(str(text).split())[:300]


if __name__ == '__main__':
    sys.exit(main())
