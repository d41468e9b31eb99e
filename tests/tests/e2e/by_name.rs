//! Programs that open libibverbs by its name, as bindings of other languages do, in each way in which a program is started.

use std::time::Duration;

use anyhow::{Context, ensure};
use verbatim_e2e::{PYTHON, TestLab, eventually, patience};

use crate::Test;

const HOSTS: &[&str] = &["src", "dst"];
const LIMIT: Duration = Duration::from_secs(60);

/// Opens the library by its name and by a path, asks for functions without and with their versions, and uses them. Its
/// `LD_LIBRARY_PATH` stays its own.
const PROGRAM: &str = r#"
import ctypes, os, sys
for name in "libibverbs.so.1", "/usr/lib/x86_64-linux-gnu/libibverbs.so.1":
    library = ctypes.CDLL(name, use_errno=True)
    library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    library.ibv_get_device_name.restype = ctypes.c_char_p
    library.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    library.ibv_open_device.restype = library.ibv_alloc_pd.restype = ctypes.c_void_p
    library.ibv_open_device.argtypes = library.ibv_alloc_pd.argtypes = [ctypes.c_void_p]
    library.ibv_event_type_str.restype = ctypes.c_char_p
    count = ctypes.c_int(-1)
    devices = library.ibv_get_device_list(ctypes.byref(count))
    names = [library.ibv_get_device_name(devices[i]).decode() for i in range(count.value)]
    context = library.ibv_open_device(devices[0])
    domain = library.ibv_alloc_pd(context)
    print("by name:", name, names, bool(context), bool(domain), library.ibv_event_type_str(9).decode())
own = ctypes.CDLL(None)
own.dlvsym.restype = ctypes.c_void_p
own.dlvsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
versions = ("ibv_reg_mr", "IBVERBS_1.1"), ("ibv_reg_mr_iova2", "IBVERBS_1.8"), ("ibv_query_qp_data_in_order", "IBVERBS_1.14")
print("by version:", [bool(own.dlvsym(library._handle, name.encode(), version.encode())) for name, version in versions],
      bool(own.dlvsym(library._handle, b"ibv_reg_mr", b"IBVERBS_1.14")))
cm = ctypes.CDLL("librdmacm.so.1", use_errno=True)
cm.rdma_create_event_channel.restype = ctypes.c_void_p
print("connections:", bool(cm.rdma_create_event_channel()), "path:", os.environ.get("LD_LIBRARY_PATH"))
try:
    ctypes.CDLL("libnone.so.1")
except OSError as error:
    print("others:", error)
sys.stdout.flush()
"#;

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![Test::new("by_name::finds_devices", HOSTS, finds_devices)]
}

fn looks_well(output: &str, path: &str) -> anyhow::Result<()> {
    let devices = "['verbatim0'] True True port active";
    let lines = [
        format!("by name: libibverbs.so.1 {devices}"),
        format!("by name: /usr/lib/x86_64-linux-gnu/libibverbs.so.1 {devices}"),
        "by version: [True, True, True] False".to_owned(),
        format!("connections: True path: {path}"),
        "others: libnone.so.1: cannot open shared object file: No such file or directory".to_owned(),
    ];
    for line in lines {
        ensure!(
            output.lines().any(|said| said == line),
            "{line:?} is not in\n{output}"
        );
    }
    Ok(())
}

fn finds_devices(lab: &TestLab) -> anyhow::Result<()> {
    let program = ["env", "LD_LIBRARY_PATH=/opt/own", PYTHON, "-c", PROGRAM];
    let in_host = lab.ask(&[&["lab", "exec", "src", "--"], &program[..]].concat())?;
    looks_well(&in_host.stdout, "/opt/own").context("lab exec")?;

    let instance = lab.instance("src", "looks", &program)?;
    let ended = instance.succeed(patience(LIMIT))?;
    looks_well(&ended.stdout, "/opt/own").context("run")?;

    let waits = lab.instance("src", "waits", &["sleep", "1000"])?;
    let add = |said: &str| {
        let before = waits.output()?.len();
        lab.ask(&["exec", "waits", "--", PYTHON, "-c", PROGRAM])?;
        eventually("the output of an added program", patience(LIMIT), || {
            let output = waits.output()?.split_off(before);
            Ok(output.contains("others:").then_some(output))
        })
        .and_then(|output| looks_well(&output, "None"))
        .context(said.to_owned())
    };
    add("exec")?;
    waits.moves("dst")?;
    add("exec after a move")
}
