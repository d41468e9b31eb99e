//! Which system calls a process keeps (seccomp(2)).
//!
//! The filter is a program of classic BPF: it looks at the architecture, then at the number of the call, then at arguments. The kernel keeps a table of the
//! numbers that are allowed whatever their arguments are (Linux 5.11), so that those cost next to nothing.
//!
//! A call that is not in the list is refused with `EPERM`, and the process goes on. To kill it would be as safe, and would cost all programs of an RNIC
//! their connections when a library begins to use a call that it did not use before. The kernel's log names what was refused (type 1326), if
//! it logs anything of that kind.

use std::io;

use rustix::thread::set_no_new_privs;

/// `AUDIT_ARCH_*` (`linux/audit.h`) of the calls that a process of this program makes.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

/// From this number on the calls are those of x32 (`__X32_SYSCALL_BIT`). Other machines have none there.
const X32: u32 = 0x4000_0000;

/// Instructions that check one half of an argument.
const CHECK: usize = 3;

/// Places in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
const ARGUMENTS: u32 = 16;

/// A condition on one argument: the bits of `mask` in it are `value`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argument {
    /// From 0 on.
    pub index: u8,
    /// The bits that count.
    pub mask: u64,
    /// How they must be.
    pub value: u64,
}

/// Why calls are not restricted.
#[derive(Debug)]
pub struct Refused(io::Error);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.raw_os_error() {
            Some(libc::ENOSYS | libc::EINVAL) => {
                write!(
                    f,
                    "this kernel has no filter for system calls (CONFIG_SECCOMP_FILTER)"
                )
            }
            _ => write!(f, "the kernel refuses the filter for system calls: {}", self.0),
        }
    }
}

impl std::error::Error for Refused {}

/// Which system calls stay.
#[derive(Debug, Clone)]
pub struct Calls {
    /// Those that are not listed.
    others: Answer,
    listed: Vec<(libc::c_long, Vec<Argument>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Allowed,
    Refused,
}

impl Answer {
    fn code(self) -> u32 {
        match self {
            Self::Allowed => libc::SECCOMP_RET_ALLOW,
            Self::Refused => libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        }
    }
}

impl Calls {
    /// None.
    pub fn none() -> Self {
        Self {
            others: Answer::Refused,
            listed: Vec::new(),
        }
    }

    /// All but these: for a process whose libraries make too many to list them.
    pub fn all_but(numbers: &[libc::c_long]) -> Self {
        Self {
            others: Answer::Allowed,
            listed: numbers.iter().map(|number| (*number, Vec::new())).collect(),
        }
    }

    /// And these, by their numbers (`SYS_*`), whatever their arguments are.
    pub fn and(mut self, numbers: &[libc::c_long]) -> Self {
        assert!(self.others == Answer::Refused, "all others stay anyway");
        self.listed
            .extend(numbers.iter().map(|number| (*number, Vec::new())));
        self
    }

    /// And this one, if all these conditions hold.
    pub fn and_if(mut self, number: libc::c_long, conditions: &[Argument]) -> Self {
        assert!(self.others == Answer::Refused, "all others stay anyway");
        self.listed.push((number, conditions.to_vec()));
        self
    }

    /// From here on this thread, and those that it starts, make no other calls.
    pub fn keep(&self) -> Result<(), Refused> {
        // Without it only root may have a filter.
        set_no_new_privs(true).map_err(|errno| Refused(errno.into()))?;
        let program = self.program();
        let program = libc::sock_fprog {
            len: u16::try_from(program.len()).map_err(|_| Refused(io::ErrorKind::InvalidInput.into()))?,
            filter: program.as_ptr().cast_mut(),
        };
        // What the process executes is its own: the kernel need not make its loads slower (before Linux 5.16 a filter did that).
        let flags = libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW | libc::SECCOMP_FILTER_FLAG_LOG;
        // Kernels before 4.17 know neither.
        install(flags, &program)
            .or_else(|_| install(0, &program))
            .map_err(Refused)
    }

    fn program(&self) -> Vec<libc::sock_filter> {
        use instructions::*;

        let mut program = vec![
            load(ARCHITECTURE_AT),
            skip_unless_equal(ARCHITECTURE, 2),
            load(NUMBER),
            skip_if_below(X32, 1),
            answer(Answer::Refused.code()),
        ];
        let listed = match self.others {
            Answer::Allowed => Answer::Refused,
            Answer::Refused => Answer::Allowed,
        };
        for (number, conditions) in &self.listed {
            let checks: Vec<_> = conditions.iter().flat_map(Argument::halves).collect();
            let length = CHECK * checks.len();
            // Over the checks and the answer, and what loads the number anew.
            let behind = length + 1 + usize::from(length > 0);
            program.push(skip_unless_equal(*number as u32, behind));
            for (index, (at, mask, value)) in checks.iter().enumerate() {
                // To where the number is loaded anew.
                let rest = length - CHECK * (index + 1);
                program.extend([load(*at), and(*mask), skip_unless_equal(*value, rest + 1)]);
            }
            program.push(answer(listed.code()));
            if length > 0 {
                program.push(load(NUMBER));
            }
        }
        program.push(answer(self.others.code()));
        program
    }
}

impl Argument {
    /// The place of each half of the argument that counts, with its mask and value. Machines that are supported have the low half first.
    fn halves(&self) -> Vec<(u32, u32, u32)> {
        let at = ARGUMENTS + 8 * u32::from(self.index);
        [(at, 0), (at + 4, 32)]
            .into_iter()
            .map(|(at, shift)| (at, (self.mask >> shift) as u32, (self.value >> shift) as u32))
            .filter(|(_, mask, _)| *mask != 0)
            .collect()
    }
}

fn install(flags: libc::c_ulong, program: &libc::sock_fprog) -> io::Result<()> {
    // SAFETY: `program` points to as many instructions as it says, and the kernel copies them.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            std::ptr::from_ref(program),
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Instructions of classic BPF (`linux/bpf_common.h`).
mod instructions {
    const fn instruction(code: u32, true_skips: usize, false_skips: usize, k: u32) -> libc::sock_filter {
        assert!(true_skips < 256 && false_skips < 256);
        libc::sock_filter {
            code: code as u16,
            jt: true_skips as u8,
            jf: false_skips as u8,
            k,
        }
    }

    pub fn load(at: u32) -> libc::sock_filter {
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, at)
    }

    pub fn and(mask: u32) -> libc::sock_filter {
        instruction(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, mask)
    }

    pub fn skip_unless_equal(value: u32, count: usize) -> libc::sock_filter {
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, count, value)
    }

    pub fn skip_if_below(value: u32, count: usize) -> libc::sock_filter {
        instruction(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, count, value)
    }

    pub fn answer(value: u32) -> libc::sock_filter {
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, value)
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    /// What a thread needs to end, and what a failed assertion may need.
    const REST: &[libc::c_long] = &[
        libc::SYS_write,
        libc::SYS_futex,
        libc::SYS_mmap,
        libc::SYS_munmap,
        libc::SYS_mprotect,
        libc::SYS_madvise,
        libc::SYS_brk,
        libc::SYS_exit,
        libc::SYS_sigaltstack,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rseq,
        libc::SYS_set_robust_list,
    ];

    fn within<T: Send>(calls: Calls, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    calls.and(REST).keep().unwrap();
                    work()
                })
                .join()
                .unwrap()
        })
    }

    #[test]
    fn what_is_not_in_the_list_is_refused() {
        let calls = Calls::none().and(&[libc::SYS_getppid]);
        let [parent, own] = within(calls, || {
            [libc::SYS_getppid, libc::SYS_getpid].map(|number| {
                // SAFETY: neither has arguments.
                match unsafe { libc::syscall(number) } {
                    -1 => Err(io::Error::last_os_error().raw_os_error()),
                    pid => Ok(pid),
                }
            })
        });
        assert!(parent.is_ok(), "{parent:?}");
        assert_eq!(own, Err(Some(libc::EPERM)));
    }

    #[test]
    fn all_but_some() {
        let results = std::thread::spawn(|| {
            Calls::all_but(&[libc::SYS_getppid]).keep().unwrap();
            // SAFETY: neither has arguments.
            [libc::SYS_getppid, libc::SYS_getpid].map(|number| unsafe { libc::syscall(number) } == -1)
        });
        assert_eq!(results.join().unwrap(), [true, false]);
    }

    #[test]
    fn arguments_decide() {
        let if_socket = |family: i32, kind: i32| {
            [
                Argument {
                    index: 0,
                    mask: u64::MAX,
                    value: family as u64,
                },
                Argument {
                    index: 1,
                    mask: 0xf,
                    value: kind as u64,
                },
            ]
        };
        let calls = Calls::none()
            .and_if(libc::SYS_socket, &if_socket(libc::AF_INET, libc::SOCK_DGRAM))
            .and_if(libc::SYS_socket, &if_socket(libc::AF_UNIX, libc::SOCK_STREAM))
            .and(&[libc::SYS_getppid]);
        let (open, ppid) = within(calls, || {
            let open = [
                (libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC),
                (libc::AF_UNIX, libc::SOCK_STREAM),
                (libc::AF_INET, libc::SOCK_STREAM),
                (libc::AF_UNIX, libc::SOCK_DGRAM),
                (libc::AF_INET6, libc::SOCK_DGRAM),
            ]
            // SAFETY: plain numbers.
            .map(|(family, kind)| unsafe { libc::socket(family, kind, 0) } >= 0);
            (open, rustix::process::getppid())
        });
        assert_eq!(open, [true, true, false, false, false]);
        assert!(ppid.is_some(), "a call behind those with conditions");
    }

    #[test]
    fn the_high_half_of_an_argument_counts_where_it_is_asked_for() {
        let calls = Calls::none().and_if(
            libc::SYS_lseek,
            &[Argument {
                index: 1,
                mask: 1 << 40 | 1,
                value: 1 << 40,
            }],
        );
        let results = within(calls, || {
            // Descriptor -1 is nobody's: a call that is made fails with EBADF.
            [1 << 40, 1 << 41, 1 << 40 | 1, 0].map(|offset: i64| {
                // SAFETY: plain numbers.
                unsafe { libc::lseek(-1, offset, 0) };
                Errno::from_io_error(&io::Error::last_os_error())
            })
        });
        let (made, refused) = (Some(Errno::BADF), Some(Errno::PERM));
        assert_eq!(results, [made, refused, refused, refused]);
    }
}
