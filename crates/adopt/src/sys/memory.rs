//! Looking at the program's memory.

/// The word at an aligned address in a mapping of the program that is readable. The program may write to it meanwhile.
pub fn word(address: usize) -> usize {
    // SAFETY: the caller has it from the list of mappings, and it lies in a region that the program is just registering
    // and must not unmap meanwhile.
    unsafe { std::ptr::with_exposed_provenance::<usize>(address).read_volatile() }
}
