//! Protocol buffers, as far as the proxy needs them: reading and replacing single fields of a message.
//!
//! A message is not decoded and encoded again as a whole, because that would drop the fields that a newer runc or CRIU
//! adds. The format is described at <https://protobuf.dev/programming-guides/encoding/>.

/// A field's number.
pub(crate) type Number = u64;

/// One field's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Value<'a> {
    /// An integer, a flag or an enumeration.
    Varint(u64),
    /// A string, bytes or an embedded message.
    Bytes(&'a [u8]),
    /// Eight or four bytes of another kind.
    Fixed(&'a [u8]),
}

/// One field: its number, its value, and all of its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Field<'a> {
    pub number: Number,
    pub value: Value<'a>,
    pub raw: &'a [u8],
}

/// The bytes are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a malformed message in CRIU's protocol")]
pub(crate) struct Malformed;

/// The fields of a message, in order; ends after the first error.
pub(crate) fn fields(message: &[u8]) -> impl Iterator<Item = Result<Field<'_>, Malformed>> {
    let mut rest = message;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let field = take_field(rest);
        rest = field.map_or(&[], |field| &rest[field.raw.len()..]);
        Some(field)
    })
}

/// The last value of field `number`, which is the one that counts.
pub(crate) fn find(message: &[u8], number: Number) -> Result<Option<Value<'_>>, Malformed> {
    let mut found = None;
    for field in fields(message) {
        let field = field?;
        if field.number == number {
            found = Some(field.value);
        }
    }
    Ok(found)
}

/// Field `number` as an integer.
pub(crate) fn find_varint(message: &[u8], number: Number) -> Result<Option<u64>, Malformed> {
    match find(message, number)? {
        Some(Value::Varint(value)) => Ok(Some(value)),
        Some(_) => Err(Malformed),
        None => Ok(None),
    }
}

/// Field `number` as bytes.
pub(crate) fn find_bytes(message: &[u8], number: Number) -> Result<Option<&[u8]>, Malformed> {
    match find(message, number)? {
        Some(Value::Bytes(value)) => Ok(Some(value)),
        Some(_) => Err(Malformed),
        None => Ok(None),
    }
}

/// The message without the fields that `drop` names.
pub(crate) fn without(message: &[u8], drop: impl Fn(Number) -> bool) -> Result<Vec<u8>, Malformed> {
    let mut kept = Vec::with_capacity(message.len() + 64);
    for field in fields(message) {
        let field = field?;
        if !drop(field.number) {
            kept.extend_from_slice(field.raw);
        }
    }
    Ok(kept)
}

/// Appends an integer field.
pub(crate) fn put_varint(message: &mut Vec<u8>, number: Number, value: u64) {
    push_varint(message, number << 3);
    push_varint(message, value);
}

/// Appends a field of bytes.
pub(crate) fn put_bytes(message: &mut Vec<u8>, number: Number, value: &[u8]) {
    push_varint(message, number << 3 | 2);
    push_varint(message, value.len() as u64);
    message.extend_from_slice(value);
}

fn take_field(bytes: &[u8]) -> Result<Field<'_>, Malformed> {
    let (key, after_key) = take_varint(bytes)?;
    let (value, used) = match key & 7 {
        0 => {
            let (value, length) = take_varint(&bytes[after_key..])?;
            (Value::Varint(value), after_key + length)
        }
        2 => {
            let (length, prefix) = take_varint(&bytes[after_key..])?;
            let start = after_key + prefix;
            let end = usize::try_from(length)
                .ok()
                .and_then(|length| start.checked_add(length));
            let end = end.ok_or(Malformed)?;
            (Value::Bytes(bytes.get(start..end).ok_or(Malformed)?), end)
        }
        kind @ (1 | 5) => {
            let end = after_key + if kind == 1 { 8 } else { 4 };
            (Value::Fixed(bytes.get(after_key..end).ok_or(Malformed)?), end)
        }
        _ => return Err(Malformed),
    };
    Ok(Field {
        number: key >> 3,
        value,
        raw: &bytes[..used],
    })
}

fn take_varint(bytes: &[u8]) -> Result<(u64, usize), Malformed> {
    let mut value = 0;
    for (index, byte) in bytes.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return Ok((value, index + 1));
        }
    }
    Err(Malformed)
}

fn push_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_of_the_format_are_read() {
        // "Encoding": a message whose field 1 is 150, and one whose field 2 is "testing".
        assert_eq!(find_varint(&[0x08, 0x96, 0x01], 1), Ok(Some(150)));
        assert_eq!(
            find_bytes(&[0x12, 0x07, 0x74, 0x65, 0x73, 0x74, 0x69, 0x6e, 0x67], 2),
            Ok(Some(&b"testing"[..]))
        );
    }

    #[test]
    fn what_was_put_is_found_and_the_last_value_counts() {
        let mut message = Vec::new();
        put_varint(&mut message, 1, u64::MAX);
        put_bytes(&mut message, 37, &[7; 300]);
        put_varint(&mut message, 1, 3);
        assert_eq!(find_varint(&message, 1), Ok(Some(3)));
        assert_eq!(find_bytes(&message, 37), Ok(Some(&[7; 300][..])));
        assert_eq!(find(&message, 2), Ok(None));
        let rest = without(&message, |number| number == 1).unwrap();
        assert_eq!(fields(&rest).count(), 1);
    }

    #[test]
    fn cut_off_messages_are_malformed_and_do_not_panic() {
        let mut message = Vec::new();
        put_bytes(&mut message, 5, b"abc");
        for length in 1..message.len() {
            assert_eq!(find(&message[..length], 1), Err(Malformed), "{length}");
        }
        assert_eq!(find(&[0xff; 12], 1), Err(Malformed));
        assert_eq!(
            find(
                &[0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
                2
            ),
            Err(Malformed)
        );
        assert_eq!(find(&[0x0b], 1), Err(Malformed), "groups are not used");
    }
}
