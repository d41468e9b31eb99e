//! Programs in Python that tests run.

/// The interpreter that the bindings of libibverbs are made for.
pub const PYTHON: &str = "/usr/bin/python3";
/// Where their servers listen (`tests/programs/ends.py`).
pub const ENDS_PORT: u16 = 18517;

/// A program of `tests/programs` with the module that all of them use, as text: an instance has a `/tmp` of its own, and the
/// sources may lie there.
pub fn text_of(program: &str) -> String {
    let main = match program {
        "messages.py" => include_str!("../programs/messages.py"),
        "windows.py" => include_str!("../programs/windows.py"),
        "halves.py" => include_str!("../programs/halves.py"),
        "connections.py" => include_str!("../programs/connections.py"),
        "churn.py" => include_str!("../programs/churn.py"),
        "newcomers.py" => include_str!("../programs/newcomers.py"),
        other => unreachable!("{other} is not among the programs"),
    };
    let ends = include_str!("../programs/ends.py");
    let quoted = |text: &str| serde_json::to_string(text).expect("text can be quoted");
    format!(
        "import sys, types\nends = types.ModuleType('ends')\nsys.modules['ends'] = ends\n\
         exec(compile({}, 'ends.py', 'exec'), ends.__dict__)\nexec(compile({}, '{program}', 'exec'))\n",
        quoted(ends),
        quoted(main)
    )
}
