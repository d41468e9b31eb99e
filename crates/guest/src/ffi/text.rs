//! Text in C's fixed arrays.

use std::ffi::c_char;

/// Writes `text` with its final zero; what does not fit is cut off.
pub fn fill<const N: usize>(array: &mut [c_char; N], text: &str) {
    array.fill(0);
    for (to, from) in array[..N - 1].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_is_cut_and_stays_terminated() {
        let mut array = [1; 4];
        fill(&mut array, "abcdef");
        assert_eq!(array.map(|byte| byte as u8), *b"abc\0");
        fill(&mut array, "x");
        assert_eq!(array.map(|byte| byte as u8), *b"x\0\0\0");
    }
}
